// A sentence as words on their colors: for the match or against it, with a bar for how much.
// Punctuation and unknown words have no color.

import { codePointSlice, h, roving, signed } from "./dom.js";

const WRONG = 0.5;

// `handlers`: enter(place), leave(), choose(place), apply(place, instead).
export function sentence(match, correction, handlers) {
  const changes = new Map((correction?.agreed.changes ?? []).map((change) => [change.place, change]));
  const words = match.words.map((word, place) => {
    const suspect = correction?.words[place];
    const doubted = suspect && suspect.wrong >= WRONG && word.effect < 0 && /[\p{L}\p{N}]/u.test(word.word);
    return one(match, word, place, changes.get(place), doubted, handlers);
  });
  roving(words.map((item) => item.querySelector(".word")));
  return h("ol", { class: "words", "aria-label": "The words and their effects" }, words);
}

// What a word's color means; the dots of the scale have the same.
export function kindOf(word) {
  if (!word.known) return "unknown";
  if (!/[\p{L}\p{N}]/u.test(word.word)) return "neutral";
  return word.effect < 0 ? "against" : "for";
}

const SPOKEN = {
  for: "counts for the match", against: "counts against it", neutral: "punctuation", unknown: "unknown word, left out",
};

export function legend() {
  const item = (kind, text) => h("li", { class: kind }, h("i", { "aria-hidden": "true" }), text);
  return h("ul", { class: "key", "aria-label": "Colors" },
    item("for", "counts for the match"), item("against", "counts against it"),
    item("neutral", "punctuation"), item("unknown", "unknown word, left out"));
}

function one(match, word, place, change, doubted, handlers) {
  const kind = kindOf(word);
  const number = kind === "unknown" ? "" : `, ${signed(word.effect)}`;
  const text = word.span ? codePointSlice(match.text, ...word.span) : word.word;
  const button = h(
    "button",
    {
      type: "button", class: `word ${kind}${change ? " struck" : ""}${doubted && !change ? " doubted" : ""}`,
      "data-place": place,
      "aria-label": `${text}: ${SPOKEN[kind]}${number}`,
      title: kind === "unknown" && SPOKEN.unknown,
      style: { "--shade": Math.abs(word.shade).toFixed(3) },
      onpointerenter: () => handlers.enter(place),
      onpointerleave: () => handlers.leave(),
      onfocus: () => handlers.enter(place),
      onblur: () => handlers.leave(),
      onclick: () => handlers.choose(place),
      "aria-pressed": "false",
    },
    h("span", { class: "letters" }, change ? h("s", {}, text) : text),
    h("span", { class: "meter", "aria-hidden": "true" }, h("i")),
    h("span", { class: "effect", "aria-hidden": "true" }, word.known ? signed(word.effect) : "unknown"),
  );
  const mend = change && h(
    "button",
    {
      type: "button", class: "mend", "aria-label": `Write “${change.instead}” instead of “${text}”`,
      onclick: () => handlers.apply(place, change.instead),
    },
    change.instead,
  );
  return h("li", {}, button, mend);
}

// How strongly each word looked at a region.
export function lightWords(list, match, region) {
  const weights = match.words.map((word) => word.region_weights?.[region] ?? 0);
  const most = Math.max(...weights, 1e-9);
  list.classList.add("lit");
  list.querySelectorAll(".word").forEach((word, place) => {
    word.classList.toggle("looked", weights[place] > 0.12);
    word.style.setProperty("--look", (weights[place] / most).toFixed(3));
  });
}

export function darkWords(list) {
  list.classList.remove("lit");
  list.querySelectorAll(".word.looked").forEach((word) => word.classList.remove("looked"));
}
