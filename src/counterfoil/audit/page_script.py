"""What the audit page does when its controls are used; without it, everything is simply shown."""

SCRIPT = """
"use strict";
const list = document.querySelector("#findings");
const cards = [...list.children];
const by = (name) => document.querySelector(name);
const checks = [...document.querySelectorAll(".chip input")];
const search = by("#search"), order = by("#order"), kind = by("#kind"), shown = by("#shown");
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
  const words = search.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let count = 0;
  for (const card of cards) {
    const signs = card.dataset.signs.split(" ");
    const text = card.dataset.text.toLowerCase();
    card.hidden = !(wanted.every((sign) => signs.includes(sign)) &&
      words.every((word) => text.includes(word)) &&
      (!kind.value || card.dataset.kind === kind.value));
    count += !card.hidden;
  }
  shown.textContent = `${count} of ${cards.length} findings shown`;
}
function sort() { list.append(...cards.sort(compare[order.value])); }
function move(step) {
  const visible = cards.filter((card) => !card.hidden);
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
for (const control of [search, kind, ...checks]) control.addEventListener("input", update);
order.addEventListener("input", sort);
by(".tools").hidden = false;
update();
"""
