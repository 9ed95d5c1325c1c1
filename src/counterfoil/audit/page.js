"use strict";
const by = (name) => document.querySelector(name);
const lists = [...document.querySelectorAll(".list")];
const cardsOf = (list) => [...list.querySelectorAll(".finding")];
let cards = lists.flatMap(cardsOf);
const tabs = [...document.querySelectorAll(".tabs button")];
const checks = [...document.querySelectorAll(".chip input")];
const search = by("#search"), order = by("#order"), shown = by("#shown");
const value = (card, key) => key === "image" ? card.dataset.image : Number(card.dataset[key]);
const compare = {
  suspicion: (a, b) => value(b, "suspicion") - value(a, "suspicion"),
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
    card.hidden = !(wanted.every((sign) => signs.includes(sign)) &&
      words.every((word) => text.includes(word)));
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
  const step = {j: 1, k: -1}[event.key];
  if (step) { move(step); event.preventDefault(); }
  if (event.key === "/") { search.focus(); event.preventDefault(); }
});
for (const tab of tabs) tab.addEventListener("click", () => open(tab.dataset.section));
for (const control of [search, ...checks]) control.addEventListener("input", update);
order.addEventListener("input", sort);
by(".tools").hidden = by(".tabs").hidden = false;
const first = location.hash === "#near-duplicates" ? 1 : 0;
open(tabs[first].dataset.section);
