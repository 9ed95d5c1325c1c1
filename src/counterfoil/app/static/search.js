// Search by a sentence or an image, and the library where nothing is asked yet.

import { about, get, post } from "./api.js";
import { failure, fileField, h, image, link, roving, say, strip } from "./dom.js";

const LIBRARY = 24, BEHIND = 12;

export async function searchView(place, params) {
  const text = (params.get("q") ?? "").trim();
  const imageId = params.get("image");
  if (!(await about()).images) return nothingToSearch(place);
  const results = h("section", { class: "results", "aria-label": "Results" });
  place.append(await head(text, !text && !imageId), results);
  try {
    if (imageId) await byImage(results, imageId);
    else if (text) await byText(results, text);
    else await library(results);
  } catch (error) {
    results.replaceChildren(failure(error));
  }
}

function nothingToSearch(place) {
  place.append(h("h1", {}, "Search"), h("p", { class: "empty" },
    "No library is served, so there is nothing to search. Serve a folder of photos with ",
    h("code", {}, "counterfoil demo FOLDER"), " or an index with ", h("code", {}, "counterfoil serve INDEX"), ". You can ",
    h("a", { href: "#/match" }, "match a photo of yours with a sentence"), "."));
}

async function head(text, home) {
  const facts = await about();
  const field = h("input", {
    id: "query", type: "search", name: "q", value: text, maxlength: 600, autocomplete: "off",
    enterkeyhint: "search", placeholder: facts.examples[0] ?? "Say what to look for",
    "aria-label": "Say what to look for",
  });
  const file = fileField();
  const form = h(
    "form",
    {
      class: "ask", role: "search",
      onsubmit: (event) => {
        event.preventDefault();
        const to = link("", field.value.trim() ? { q: field.value.trim() } : {});
        if (to === location.hash) dispatchEvent(new HashChangeEvent("hashchange"));
        else location.hash = to;
      },
    },
    field,
    facts.can_upload &&
      h("button", { type: "button", class: "quiet pick", onclick: () => file.click() }, "Image …"),
    h("button", { type: "submit", class: "go" }, "Search"),
    file,
  );
  return h(
    "section",
    { class: home ? "hero" : "hero small" },
    home && h("h1", {}, "Which image fits the sentence? Which words do not fit?"),
    form,
    home && h("p", { class: "hint" },
      facts.can_upload ? "Type a sentence, or drop an image anywhere on this page. " : "Type a sentence. ",
      "Open a result to see which words fit."),
  );
}

async function library(results) {
  let offset = 0;
  const grid = h("ul", { class: "grid", role: "list" });
  const tries = h("p", { class: "tries" });
  const more = h("button", { type: "button", class: "quiet more", onclick: () => add() }, "Show more");
  async function add() {
    const page = await get("/api/images", { offset, limit: LIBRARY });
    grid.append(...page.images.map((item) => card(item.id, item.captions[0] ?? "", null)));
    offset += page.images.length;
    more.hidden = offset >= page.total;
    return page;
  }
  const page = await add();
  const { examples } = await about();
  tries.append("Try ", ...examples.slice(0, 3).flatMap((words) => [h("a", { href: link("", { q: words }) }, words), " "]));
  results.append(examples.length ? tries : "", h("h2", {}, `The library: ${page.total.toLocaleString("en")} images`), grid, more);
  arrows(grid);
}

async function byText(results, text) {
  const [result, facts] = await Promise.all([post("/api/search", { text, k: 24 }), about()]);
  const explainer = facts.models[0].name;
  const top = Math.max(...result.hits.map((hit) => hit.score), 1e-9);
  const grid = h("ul", { class: "grid", role: "list" },
    result.hits.map((hit) => card(hit.image, text, hit, hit.score / top)));
  results.replaceChildren(
    h("h2", {}, `Best ${result.hits.length} for “${text}”`),
    result.unknown.length
      ? h("p", { class: "note" }, `Unknown words, left out: ${result.unknown.join(", ")}`)
      : "",
    facts.search_model !== explainer
      ? h("p", { class: "note" }, `Ranked by ${facts.search_model}; when you open an image, ${explainer} weighs the words.`)
      : "",
    grid,
  );
  arrows(grid);
  say(`${result.hits.length} images found`);
}

// A ticket: the image, a perforation, and the stub with the score.
export function card(id, text, hit, share = 0) {
  const label = hit ? `Rank ${hit.rank}, score ${hit.score.toFixed(3)}: ${hit.captions[0] ?? id}` : text || id;
  return h("li", {}, h(
    "a",
    { class: "ticket", href: link("match", { image: id, text }), "aria-label": label },
    h("span", { class: "shot" }, image(id, 320, "")),
    h("span", { class: "stub" },
      hit
        ? [
            h("span", { class: "line" },
              h("span", { class: "rank" }, `No. ${hit.rank}`),
              h("span", { class: "score" }, hit.score.toFixed(3))),
            h("span", { class: "bar" }, h("i", { style: { width: `${Math.max(2, 100 * share)}%` } })),
          ]
        : h("span", { class: "says" }, text || id)),
  ));
}

async function byImage(results, id) {
  const result = await post("/api/search", { image: id, k: 15 });
  const top = Math.max(...result.hits.map((hit) => hit.score), 1e-9);
  const items = result.hits.map((hit) =>
    h("a", { class: "sentence-hit", href: link("match", { image: id, text: hit.text }) },
      h("span", { class: "says" }, hit.text, hit.count > 1 && h("b", { class: "times" }, `×${hit.count}`)),
      h("span", { class: "score" }, hit.score.toFixed(3)),
      h("span", { class: "bar" }, h("i", { style: { width: `${Math.max(2, (100 * hit.score) / top)}%` } }))));
  roving(items, true);
  const behind = (hit) => hit.count > 1 && h("details", { class: "behind" },
    h("summary", {}, `${hit.images.length} ${hit.images.length === 1 ? "image" : "images"} with this caption`),
    strip(hit.images.slice(0, BEHIND), hit.text, hit.images.length - BEHIND));
  results.replaceChildren(
    h("h2", {}, "Sentences that fit this image best"),
    h("div", { class: "by-image" },
      h("figure", { class: "asked" }, image(id, 640, "The image you searched with"),
        h("figcaption", {}, h("a", { href: link("match", { image: id, text: result.hits[0]?.text ?? "" }) },
          "Write a sentence of your own"))),
      h("div", { class: "sentences" }, items.map((item, place) => [item, behind(result.hits[place])]))),
  );
  say(`${result.hits.length} sentences found`);
}

// Arrow keys go over the grid as the eye does.
function arrows(grid) {
  grid.addEventListener("keydown", (event) => {
    const cards = [...grid.querySelectorAll(".ticket")];
    const at = cards.indexOf(event.target.closest(".ticket"));
    if (at < 0) return;
    const across = cards.filter((one) => Math.abs(one.offsetTop - cards[0].offsetTop) < 4).length || 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
    if (!step || !cards[at + step]) return;
    event.preventDefault();
    cards[at + step].focus();
  });
}
