// The served models: which one weighs the words, and what is missing for others.

import { h } from "./dom.js";

export const modelOf = (facts, name) => facts.models.find((one) => one.name === name) ?? facts.models[0];

// A list to choose from, with a line about the chosen one; a single model only has its line, if any.
export function chooser(facts, name, onchoose) {
  const [first, ...others] = facts.models;
  if (!others.length) return first.summary && h("p", { class: "hint" }, `Model: ${first.name}. ${first.summary}`);
  const about = h("small", { class: "hint" }, modelOf(facts, name).summary);
  const list = h("select", {
    id: "model",
    onchange: () => {
      about.textContent = modelOf(facts, list.value).summary;
      onchoose(list.value);
    },
  }, facts.models.map((one) => h("option", { value: one.name, selected: one === modelOf(facts, name) }, one.name)));
  return h("p", { class: "models" }, h("label", { for: "model", class: "label" }, "Model"), list, about);
}

export function missing(facts) {
  return facts.missing.length > 0 &&
    h("ul", { class: "missing", "aria-label": "Models that are not served" }, facts.missing.map((line) => h("li", {}, line)));
}
