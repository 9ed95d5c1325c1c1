"use strict";
const by = (name) => document.querySelector(name);
const lists = [...document.querySelectorAll(".list")];
const cardsOf = (list) => [...list.querySelectorAll(".finding")];
let cards = lists.flatMap(cardsOf);
const tabs = [...document.querySelectorAll(".tabs button")];
const checks = [...document.querySelectorAll(".chip input")];
const search = by("#search"), order = by("#order"), shown = by("#shown"), chosenState = by("#state");
const decidable = cards.filter((card) => card.dataset.key);
cards.forEach((card, index) => { card.dataset.index = index; });
const value = (card, key) => key === "image" ? card.dataset.image : Number(card.dataset[key]);
const compare = {
  suspicion: (a, b) => value(a, "index") - value(b, "index"),
  score: (a, b) => value(a, "score") - value(b, "score"),
  margin: (a, b) => value(a, "margin") - value(b, "margin"),
  rank: (a, b) => value(b, "rank") - value(a, "rank"),
  image: (a, b) => value(a, "image").localeCompare(value(b, "image"), undefined, {numeric: true}),
};
function update() {
  const wanted = checks.filter((box) => box.checked).map((box) => box.value);
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const card of cards) {
    const signs = card.dataset.signs.split(" ");
    const text = card.dataset.text.toLowerCase();
    const decided = Boolean(decisions[card.dataset.key]);
    card.hidden = !(wanted.every((sign) => signs.includes(sign)) &&
      words.every((word) => text.includes(word)) &&
      (chosenState.value === "all" || !card.dataset.key || decided === (chosenState.value === "decided")));
  }
  const open = cards.filter((card) => !card.closest("section").hidden);
  const count = open.filter((card) => !card.hidden).length;
  shown.textContent = `${count} of ${open.length} findings shown`;
}
function sort() {
  for (const list of lists) list.append(...cardsOf(list).sort(compare[order.value]));
  cards = lists.flatMap(cardsOf);
}
function open(name) {
  for (const tab of tabs) {
    const own = tab.dataset.section === name;
    tab.setAttribute("aria-pressed", own);
    document.getElementById(tab.dataset.section).hidden = !own;
  }
  by("fieldset").hidden = name !== "suspicious";
  if (name !== "suspicious") for (const box of checks) box.checked = false;
  update();
}
function move(step) {
  const visible = cards.filter((card) => !card.hidden && !card.closest("section").hidden);
  const here = visible.indexOf(document.activeElement.closest(".finding"));
  const next = here < 0 ? visible[0] : visible[here + step];
  if (next) next.focus();
}
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === search && event.key === "Escape") { search.value = ""; update(); }
  if (/^(input|select)$/i.test(event.target.tagName) && event.target.type !== "checkbox") return;
  const step = {j: 1, ArrowDown: 1, ArrowUp: -1}[event.key];
  if (step) { move(step); event.preventDefault(); }
  const card = document.activeElement.closest("[data-key]");
  const act = {k: keep, e: edit, s: suggest, d: discard}[event.key];
  if (act && card && !event.repeat) { act(card); event.preventDefault(); }
  if (event.key === "u") undo(card && decisions[card.dataset.key] ? card : undefined);
  if (event.key === "/") { search.focus(); event.preventDefault(); }
});
// Decisions: kept in this browser, and written as lines that `counterfoil audit merge` reads.
const NAMES = {keep: "Kept", fix: "Fixed", discard: "Discarded"};
const storage = `counterfoil-decisions:${location.pathname}`;
function stored(name, value) {
  try {
    if (value !== undefined) localStorage.setItem(name, value);
    return localStorage.getItem(name);
  } catch { return null; }
}
const reviewer = by("#reviewer");
const past = [];
function load() {
  try { return Object.assign(Object.create(null), JSON.parse(stored(storage))); }
  catch { return Object.create(null); }
}
const decisions = load();
function element(tag, text, props = {}) {
  const node = document.createElement(tag);
  node.textContent = text;
  return Object.assign(node, props);
}
function decide(card, action, correction = null) {
  const key = card.dataset.key;
  past.push([card, decisions[key]]);
  decisions[key] = {action, correction, reviewer: reviewer.value.trim() || "anonymous",
    time: new Date().toISOString()};
  save(card);
  const open = (one) => !one.hidden && !decisions[one.dataset.key];
  const all = cards.filter((one) => one.dataset.key);
  (all.slice(all.indexOf(card) + 1).find(open) ?? all.find(open) ?? card).focus();
}
const keep = (card) => decide(card, "keep");
const discard = (card) => decide(card, "discard");
// A caption as one line, which a decision has to be; a change of white space alone keeps it.
const oneLine = (text) => text.replace(/[\p{Z}\p{Cc}]+/gu, " ").trim();
function fix(card, text) {
  const isSame = oneLine(text) === oneLine(JSON.parse(card.dataset.key).text);
  if (isSame) keep(card); else decide(card, "fix", oneLine(text));
}
function suggest(card) {
  const text = JSON.parse(card.dataset.suggestion);
  if (text) fix(card, text);
}
// Takes back the decision on a card, also one of an earlier visit; without a card, the last one.
function undo(card = past.at(-1)?.[0]) {
  if (!card) return;
  const at = past.findLastIndex(([one]) => one === card);
  const [, before] = at < 0 ? [] : past.splice(at, 1)[0];
  if (before) decisions[card.dataset.key] = before;
  else delete decisions[card.dataset.key];
  save(card);
  if (card.hidden) move(1); else card.focus();
}
function edit(card) {
  const text = JSON.parse(card.dataset.key).text;
  const field = element("input", "", {type: "text", maxLength: 4000, ariaLabel: "Corrected caption",
    value: oneLine(decisions[card.dataset.key]?.correction ?? text)});
  const done = () => { if (oneLine(field.value)) fix(card, field.value); };
  field.addEventListener("keydown", (event) => {
    event.stopPropagation();
    if (event.key === "Enter") done();
    if (event.key === "Escape") { paint(card); card.focus(); }
  });
  card.querySelector(".decide").replaceChildren(field, element("button", "Save",
    {type: "button", onclick: done}));
  field.focus();
}
function paint(card) {
  const one = decisions[card.dataset.key];
  const button = (text, act) => element("button", text, {type: "button", onclick: () => act(card)});
  card.classList.toggle("decided", Boolean(one));
  card.querySelector(".decide").replaceChildren(button("Keep", keep), button("Edit", edit),
    ...(card.dataset.suggestion === "null" ? [] : [button("Suggestion", suggest)]),
    button("Discard", discard),
    element("span", one ? `${NAMES[one.action]} by ${one.reviewer}${one.correction ? `: ${one.correction}` : ""}` : ""),
    ...(one ? [button("Undo", undo)] : []));
}
function save(card) {
  stored(storage, JSON.stringify(decisions));
  paint(card);
  count();
  update();
}
function count() {
  const done = decidable.filter((card) => decisions[card.dataset.key]).length;
  by("#progress").textContent = `${done} of ${decidable.length} decided, ${decidable.length - done} left`;
}
function download() {
  const lines = Object.entries(decisions).map(([key, one]) =>
    JSON.stringify({...JSON.parse(key), ...one}) + "\n");
  const address = URL.createObjectURL(new Blob(lines, {type: "application/jsonl"}));
  element("a", "", {href: address, download: "decisions.jsonl"}).click();
  setTimeout(() => URL.revokeObjectURL(address), 60000);
}
for (const card of decidable) {
  card.lastElementChild.append(element("div", "", {className: "decide"}));
  paint(card);
}
reviewer.value = stored("counterfoil-reviewer") ?? "";
reviewer.addEventListener("change", () => stored("counterfoil-reviewer", reviewer.value.trim()));
by("#download").addEventListener("click", download);
chosenState.addEventListener("input", update);
by(".review").hidden = !decidable.length;
count();
for (const tab of tabs) tab.addEventListener("click", () => open(tab.dataset.section));
for (const control of [search, ...checks]) control.addEventListener("input", update);
order.addEventListener("input", sort);
by(".tools").hidden = by(".tabs").hidden = false;
const first = location.hash === "#near-duplicates" ? 1 : 0;
open(tabs[first].dataset.section);
