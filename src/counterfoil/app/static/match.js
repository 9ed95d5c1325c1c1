// An image and a sentence: every word weighed, as it is typed.

import { about, get, post } from "./api.js";
import { codePointSlice, debounce, failure, h, link, say, signed } from "./dom.js";
import { chooser, modelOf } from "./models.js";
import { Regions } from "./regions.js";
import { scale } from "./scale.js";
import { darkWords, legend, lightWords, sentence } from "./sentence.js";
import { startView } from "./start.js";

const TYPING = 160, CORRECTING = 450;

export async function matchView(place, params) {
  const id = params.get("image");
  if (!id) return startView(place, params);
  const [facts, info] = await Promise.all([about(), get("/api/image", { image: id })]);
  const view = new Match(id, info, facts, modelOf(facts, params.get("model")));
  place.append(view.node);
  const text = params.get("text") || info.captions[0] || "";
  await view.write(text);
  if (!text) view.field.focus({ preventScroll: true });
  return () => view.close();
}

class Match {
  constructor(id, info, facts, model) {
    this.id = id;
    this.model = model;
    this.match = this.correction = this.scale = this.chosen = null;
    this.request = new AbortController();
    this.regions = new Regions(id, info.captions[0] ?? "The image", (region) => this.region(region));
    this.field = h("textarea", { id: "sentence", rows: 2, maxlength: 600, spellcheck: "false",
      placeholder: facts.examples[0] ?? "a dog on a beach", oninput: () => this.typed() });
    this.score = h("output", { class: "number", for: "sentence" }, "–");
    this.moved = h("span", { class: "moved", "aria-hidden": "true" });
    this.standing = h("p", { class: "standing" });
    this.list = h("div", { class: "weighed" });
    this.below = h("div", { class: "below" });
    this.mending = h("p", { class: model.corrector ? "mending expected" : "mending" });
    this.explainSoon = debounce(TYPING, () => this.explain());
    this.correctSoon = debounce(CORRECTING, () => this.correct());
    this.node = h("article", { class: "pair" },
      h("div", { class: "left" },
        h("p", { class: "back" }, h("a", { href: "#/", onclick: (event) => this.back(event) }, "← Back")),
        this.regions.node,
        h("p", { class: "hint" }, "Choose a word to see where in the image it looks. Point at the image to see which words look there."),
        h("p", { class: "more" }, facts.captions
          ? h("a", { href: link("search", { image: id }) }, "Sentences for this image")
          : h("a", { href: link("match", { model: model.name }) }, "Another photo"))),
      h("div", { class: "right" },
        chooser(facts, model.name, (name) => this.use(modelOf(facts, name))),
        h("label", { for: "sentence", class: "label" }, "Sentence"),
        this.field,
        h("div", { class: "reading" }, h("span", { class: "label" }, "Score"), this.score, this.moved),
        this.standing, this.list, legend(), this.mending, this.below, this.captions(info)));
  }

  captions(info) {
    if (!info.captions.length) return null;
    const counts = new Map();
    for (const text of info.captions) counts.set(text, (counts.get(text) ?? 0) + 1);
    return h("details", { class: "captions" },
      h("summary", {}, "Captions of this image"),
      h("ul", {}, [...counts].map(([text, count]) =>
        h("li", {}, h("button", { type: "button", class: "quiet", onclick: () => this.write(text) },
          text, count > 1 && h("b", { class: "times" }, `×${count}`))))));
  }

  use(model) {
    this.model = model;
    this.mending.classList.toggle("expected", Boolean(model.corrector));
    return this.explain();
  }

  back(event) {
    if (history.length < 2) return;
    event.preventDefault();
    history.back();
  }

  close() {
    this.explainSoon.cancel();
    this.correctSoon.cancel();
    this.request.abort();
  }

  write(text) {
    this.field.value = text;
    return this.explain();
  }

  typed() {
    this.fit();
    this.explainSoon();
  }

  fit() {
    this.field.style.setProperty("height", "auto");
    this.field.style.setProperty("height", `${this.field.scrollHeight + 2}px`);
  }

  // Ask anew; an answer that was overtaken by more typing is never shown.
  async explain() {
    this.fit();
    this.explainSoon.cancel();
    this.correctSoon.cancel();
    this.request.abort();
    this.request = new AbortController();
    const text = this.field.value;
    if (!/[\p{L}\p{N}]/u.test(text)) return this.nothing();
    try {
      const named = { image: this.id, text, model: this.model.name };
      const match = await post("/api/explain", named, this.request.signal);
      if (!this.node.isConnected) return; // another view has the page and its address
      this.correction = this.chosen = null;
      this.show(match);
      history.replaceState(history.state, "", link("match", named));
      if (this.model.corrector) this.correctSoon();
    } catch (error) {
      if (error.name !== "AbortError") this.list.replaceChildren(failure(error));
    }
  }

  async correct() {
    const text = this.field.value;
    try {
      const correction = await post("/api/correct", { image: this.id, text, model: this.model.name }, this.request.signal);
      if (correction.text !== this.match?.text) return;
      this.correction = correction;
      this.draw();
    } catch (error) {
      if (error.name !== "AbortError") this.mending.replaceChildren(failure(error));
    }
  }

  nothing() {
    this.match = this.correction = null;
    this.score.textContent = "–";
    this.moved.textContent = this.standing.textContent = "";
    this.list.replaceChildren(h("p", { class: "hint" }, "Write a few words about the image."));
    this.mending.replaceChildren();
    this.below.replaceChildren();
    this.regions.set([], null);
  }

  show(match) {
    const before = this.match?.score;
    this.match = match;
    this.regions.set(match.boxes, match.grid);
    this.score.textContent = match.score.toFixed(3);
    const change = before == null ? 0 : match.score - before;
    const visible = Math.abs(change) >= 0.0005;
    this.moved.textContent = visible ? signed(change) : "";
    this.moved.className = `moved ${visible ? (change > 0 ? "for" : "against") : ""}`;
    this.standing.textContent = match.standing;
    say(`Score ${match.score.toFixed(3)}${match.standing ? `, ${match.standing}` : ""}`);
    this.scale = scale(match, this.handlers());
    this.below.replaceChildren(...[this.scale?.node, h("p", { class: "note" }, [match.note, match.colors].join(" "))].filter(Boolean));
    this.draw();
  }

  handlers() {
    return {
      enter: (place) => this.word(place),
      leave: () => this.word(this.chosen),
      choose: (place) => this.word((this.chosen = this.chosen === place ? null : place)),
      apply: (place, instead) => this.apply([{ place, instead }]),
    };
  }

  draw() {
    const focused = this.list.contains(document.activeElement) ? document.activeElement.dataset.place : null;
    this.list.replaceChildren(sentence(this.match, this.correction, this.handlers()));
    if (focused != null) this.list.querySelector(`[data-place="${focused}"]`)?.focus();
    if (this.chosen !== null) this.word(this.chosen);
    const changes = this.correction?.agreed.changes ?? [];
    this.mending.replaceChildren(...(changes.length
      ? [h("span", {}, "Should it be “", h("em", {}, this.correction.agreed.text), "”? "),
         h("button", { type: "button", class: "go mend-all", onclick: () => this.apply(changes) },
           changes.length === 1 ? "Correct it" : `Correct all ${changes.length}`)]
      : this.correction ? [h("span", { class: "fine" }, "No word to correct was found.")] : []));
  }

  // Exchange words, from the last one on so that the places of the others hold.
  apply(changes) {
    let text = this.match.text;
    const order = [...changes].sort((a, b) => b.place - a.place);
    for (const { place, instead } of order) {
      const [start, end] = this.match.words[place].span;
      text = codePointSlice(text, 0, start) + instead + codePointSlice(text, end);
    }
    this.field.focus({ preventScroll: true });
    return this.write(text);
  }

  word(place) {
    const word = place === null ? null : this.match?.words[place];
    this.scale?.point(place);
    this.list.querySelectorAll(".word").forEach((one) => {
      one.classList.toggle("on", one.dataset.place === String(place));
      one.setAttribute("aria-pressed", String(one.dataset.place === String(this.chosen)));
    });
    if (word?.region_weights && this.match.boxes) this.regions.light(word.region_weights, word.effect < 0 ? "against" : "for");
    else this.regions.dark();
  }

  region(place) {
    if (!this.match?.boxes) return;
    if (place === null) {
      this.regions.dark();
      darkWords(this.list);
      return;
    }
    this.regions.light(this.match.boxes.map((_, at) => (at === place ? 1 : 0)), "plain");
    lightWords(this.list, this.match, place);
    const looked = [...this.list.querySelectorAll(".word.looked .letters")].map((word) => word.textContent);
    say(looked.length ? `Region ${place + 1}: ${looked.join(", ")}` : `Region ${place + 1}: no word attends to it`);
  }
}
