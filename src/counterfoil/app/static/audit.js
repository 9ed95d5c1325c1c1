// Findings of an audit: what is wrong, and what should stand there.

import { about, get } from "./api.js";
import { h, image, link, say, signed } from "./dom.js";

const PAGE = 20;
const PLANTED = { swapped: "caption of another image", words: "words exchanged" };

export async function auditView(place, params) {
  const facts = await about();
  if (!facts.audit) {
    place.append(h("h1", {}, "Audit"), h("p", { class: "empty" },
      "No audit is shown yet. Write one with ", h("code", {}, "counterfoil audit RUN PAIRS --out report"),
      " and start the page with ", h("code", {}, "--audit report"), "."));
    return;
  }
  const reason = params.get("reason");
  const list = h("ul", { class: "findings", role: "list" });
  let offset = 0;
  const more = h("button", { type: "button", class: "quiet more", onclick: () => add() }, "Show more");
  async function add() {
    const page = await get("/api/audit", { offset, limit: PAGE, reason });
    list.append(...page.findings.map(finding));
    offset += page.findings.length;
    more.hidden = offset >= page.total;
    return page;
  }
  const page = await add();
  const filter = (sign, name, count) => h("a", {
    class: "tag", href: link("audit", sign ? { reason: sign } : {}),
    "aria-current": (sign || null) === reason && "true",
  }, name, count != null && h("b", {}, count.toLocaleString("en")));
  place.append(
    h("h1", {}, "Captions to look at"),
    h("p", { class: "filters" }, filter("", "All"), page.reasons.map((one) => filter(one.sign, one.name, one.count))),
    h("p", { class: "hint" }, `${page.total.toLocaleString("en")} findings, most suspicious first.`),
    ...page.notes.map((note) => h("p", { class: "hint" }, note)),
    list, more);
  say(`${page.total} findings`);
}

function finding(found) {
  const falseNegative = found.kind === "false-negative";
  return h("li", { class: "finding" },
    h("a", { class: "shot", href: link("match", { image: found.image, text: found.text }), "aria-label": `Open ${found.image}` },
      image(found.image, 320, "")),
    h("div", { class: "told" },
      h("p", { class: "caption" }, h("a", { href: link("match", { image: found.image, text: found.text }) }, struck(found))),
      found.correction && h("p", { class: "instead" }, h("span", { class: "label" }, "Correction"),
        h("a", { href: link("match", { image: found.image, text: found.correction.text }) }, found.correction.text),
        h("span", { class: "moved for" }, signed(found.correction.after - found.correction.before))),
      !falseNegative && found.better_caption && h("p", { class: "instead" }, h("span", { class: "label" }, "From the pool"),
        h("a", { href: link("match", { image: found.image, text: found.better_caption.text }) }, found.better_caption.text)),
      found.planted && h("p", { class: "instead" }, h("span", { class: "label" }, "Planted"),
        `${PLANTED[found.planted.error]}; it was: `,
        h("a", { href: link("match", { image: found.image, text: found.planted.original }) }, found.planted.original)),
      h("ul", { class: "reasons" }, found.reasons.map((reason) => h("li", {}, reason.text))),
      h("p", { class: "facts" }, falseNegative ? "likely false negative · " : "", `suspicion ${found.suspicion.toFixed(2)} · score ${found.score.toFixed(3)} · own image at rank ${found.rank} of ${found.compared.toLocaleString("en")} · ${found.image}`)));
}

// The caption with its wrong words struck and the likeliest suggestion beside.
function struck(found) {
  const parts = [];
  let last = 0;
  for (const word of [...found.wrong_words].sort((a, b) => a.span[0] - b.span[0])) {
    const [start, end] = word.span;
    if (start < last) continue;
    parts.push(found.text.slice(last, start), h("s", { title: `effect ${signed(word.effect)}, usually ${signed(word.usual)}` }, found.text.slice(start, end)));
    if (word.suggestions.length) parts.push(" ", h("ins", {}, word.suggestions[0]));
    last = end;
  }
  return [...parts, found.text.slice(last)];
}
