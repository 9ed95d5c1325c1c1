// Findings of an audit: what is wrong, and what should stand there; near-duplicates apart.

import { get } from "./api.js";
import { codePointSlice, h, image, link, say, signed, strip } from "./dom.js";
import { review } from "./review.js";

const PAGE = 20, AWAITED = 1000;
const FEW_NOTES = 2; // more are folded, so that the findings stay in sight
const SECTIONS = { suspicious: "Suspicious", "near-duplicates": "Near-duplicates" };
const STATES = { open: "Open", decided: "Decided", all: "All" };
const EMPTY = { open: "Every finding is decided.", decided: "Nothing is decided yet.", all: "There are no findings." };
const HINTS = {
  suspicious: "most suspicious first; the first page has at most one of an image and two of a caption pattern.",
  "near-duplicates": "Different images have nearly the same caption: likely false negatives in training, not errors.",
};
const PLANTED = { swapped: "caption of another image", words: "words exchanged" };

export async function auditView(place, params) {
  const facts = await get("/api/about"); // not the stored answer: an audit may be complete by now
  if (facts.audit_awaited) return awaitAudit(place);
  if (facts.audit_problem) throw new Error(`The audit could not be made: ${facts.audit_problem}`);
  if (!facts.audit) {
    place.append(h("h1", {}, "Audit"), h("p", { class: "empty" },
      "No audit is shown yet. Write one with ", h("code", {}, "counterfoil audit RUN PAIRS --out report"),
      " and start the page with ", h("code", {}, "--audit report"), "."));
    return;
  }
  const reason = params.get("reason");
  const section = Object.hasOwn(SECTIONS, params.get("section")) ? params.get("section") : "suspicious";
  const state = Object.hasOwn(STATES, params.get("state")) ? params.get("state") : "open";
  const isReview = section === "suspicious";
  const list = h("ul", { class: "findings", role: "list" });
  const reviewing = isReview ? review(() => !more.hidden && add()) : null;
  let last = null;
  let offset = 0;
  const more = h("button", { type: "button", class: "quiet more", onclick: () => add() }, "Show more");
  // Suspicious captions are fetched behind the last one: decisions shorten the list meanwhile.
  async function add() {
    const page = await get("/api/audit", isReview
      ? { after: last, limit: PAGE, reason, state }
      : { offset, limit: PAGE, section });
    const model = facts.models.find((one) => one.name === page.model)?.name;
    for (const entry of page.findings) {
      const item = isReview ? finding(entry, model) : nearDuplicate(entry, model);
      if (!reviewing || reviewing.attach(entry, item)) list.append(item);
    }
    last = page.findings.at(-1)?.key ?? last;
    offset += page.findings.length;
    more.hidden = !page.left;
    reviewing?.showCounts(page.review);
    return page;
  }
  const page = await add();
  const kept = { ...(reason && { reason }), ...(state !== "open" && { state }) };
  const tab = (name) => h("a", {
    href: link("audit", name === "suspicious" ? {} : { section: name }), "aria-current": name === section && "true",
  }, SECTIONS[name], h("b", {}, page.counts[name].toLocaleString("en")));
  const tag = (text, changes, own, count) => h("a", {
    class: "tag", href: link("audit", { ...kept, ...changes }),
    "aria-current": own && "true",
  }, text, count != null && h("b", {}, count.toLocaleString("en")));
  const many = page.total === 1 ? "caption" : isReview ? "captions" : "different captions";
  const what = many + (isReview ? ", " : ". ");
  const notes = page.notes.map((note) => h("p", { class: "hint" }, note));
  const empty = EMPTY[page.review.findings ? state : "all"];
  place.append(
    h("h1", {}, "Captions to look at"),
    h("nav", { class: "tabs", "aria-label": "Sections of the audit" }, Object.keys(SECTIONS).map(tab)),
    ...(isReview ? [
      reviewing.panel,
      h("p", { class: "filters", "aria-label": "State" }, Object.entries(STATES).map(([name, text]) =>
        tag(text, { state: name === "open" ? "" : name }, name === state))),
      h("p", { class: "filters", "aria-label": "Reason" }, tag("Any reason", { reason: "" }, !reason),
        page.reasons.map((one) => tag(one.name, { reason: one.sign }, one.sign === reason, one.count))),
    ] : []),
    h("div", { class: "notes" },
      h("p", { class: "hint" }, page.total.toLocaleString("en"), " ", what, HINTS[section]),
      notes.length > FEW_NOTES ? h("details", {}, h("summary", {}, `${notes.length} notes on this audit`), notes) : notes),
    page.findings.length ? list : h("p", { class: "empty" }, isReview ? empty : "There are none."), more);
  say(`${page.total} findings`);
  return reviewing?.listen();
}

// The audit is still being made: look again until it is there, or until the view is left.
function awaitAudit(place) {
  place.append(h("h1", {}, "Audit"), h("p", { class: "empty", role: "status" },
    "The audit is being made. Its findings appear here as soon as it is complete."));
  let left = false;
  let timer = 0;
  const look = async () => {
    const facts = await get("/api/about").catch(() => null);
    if (left) return;
    if (!facts || facts.audit_awaited) timer = setTimeout(look, AWAITED);
    else dispatchEvent(new HashChangeEvent("hashchange")); // the view is shown anew
  };
  timer = setTimeout(look, AWAITED);
  return () => { left = true; clearTimeout(timer); };
}

// The address of a finding's image with a text, in the model that made the audit if it is served.
const opener = (entry, model) => (text) => link("match", { image: entry.image_names[entry.image], text, model });

function shot(entry, address) {
  return h("a", { class: "shot", href: address, "aria-label": `Open ${entry.image}` },
    image(entry.image_names[entry.image], 320, "", entry.image));
}

function finding(entry, model) {
  const opened = opener(entry, model);
  return h("li", { class: "finding" }, shot(entry, opened(entry.text)),
    h("div", { class: "told" },
      h("p", { class: "caption" }, h("a", { href: opened(entry.text) }, struck(entry))),
      entry.correction && h("p", { class: "instead" }, h("span", { class: "label" }, "Correction"),
        h("a", { href: opened(entry.correction.text) }, entry.correction.text),
        h("span", { class: "moved for" }, signed(entry.correction.after - entry.correction.before))),
      entry.better_caption && h("p", { class: "instead" }, h("span", { class: "label" }, "From the pool"),
        h("a", { href: opened(entry.better_caption.text) }, entry.better_caption.text)),
      entry.planted && h("p", { class: "instead" }, h("span", { class: "label" }, "Planted"),
        `${PLANTED[entry.planted.error]}; it was: `,
        h("a", { href: opened(entry.planted.original) }, entry.planted.original)),
      h("ul", { class: "reasons" }, entry.reasons.map((reason) => h("li", {}, reason.text))),
      h("p", { class: "facts" }, `suspicion ${entry.suspicion.toFixed(2)} · score ${entry.score.toFixed(3)} · own image at rank ${entry.rank} of ${entry.compared.toLocaleString("en")} · ${entry.image}`)));
}

// One caption with the images it belongs to, and the likest caption of another image.
function nearDuplicate(entry, model) {
  const opened = opener(entry, model)(entry.text);
  const near = entry.near_duplicate;
  const other = near.text !== entry.text;
  return h("li", { class: "finding" }, shot(entry, opened),
    h("div", { class: "told" },
      h("p", { class: "caption" }, h("a", { href: opened }, entry.text),
        entry.same > 1 && h("b", { class: "times" }, `×${entry.same}`)),
      entry.same_images.length > 1 && strip(entry.same_images.slice(1), entry.text, entry.more_images, model),
      other && h("p", { class: "instead" }, h("span", { class: "label" }, "Nearly the same"), near.text),
      other && strip([entry.image_names[near.image]], near.text, 0, model),
      h("p", { class: "facts" }, `${entry.near_duplicate_images.toLocaleString("en")} other ${entry.near_duplicate_images === 1 ? "image" : "images"} · likeness ${near.score.toFixed(2)} · ${entry.image}`)));
}

// The caption with its wrong words struck, the likeliest suggestion beside, and unknown words marked.
function struck(entry) {
  const parts = [];
  let last = 0;
  for (const word of [...entry.wrong_words, ...entry.unknown_words].sort((a, b) => a.span[0] - b.span[0])) {
    const [start, end] = word.span;
    if (start < last) continue;
    const letters = codePointSlice(entry.text, start, end);
    parts.push(codePointSlice(entry.text, last, start), word.suggestions
      ? h("s", { title: `effect ${signed(word.effect)}, usually ${signed(word.usual)}` }, letters)
      : h("span", { class: "unknown", title: "unknown word, left out" }, letters));
    if (word.suggestions?.length) parts.push(" ", h("ins", {}, word.suggestions[0]));
    last = end;
  }
  return [...parts, codePointSlice(entry.text, last)];
}
