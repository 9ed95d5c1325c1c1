// The match view before there is an image: drop one, choose a model.

import { about, get } from "./api.js";
import { fileField, h, link } from "./dom.js";
import { chooser, missing, modelOf } from "./models.js";
import { card } from "./search.js";

const OFFERED = 5;

export async function startView(place, params) {
  const facts = await about();
  const model = modelOf(facts, params.get("model"));
  const file = fileField();
  const drop = facts.can_upload
    ? h("div", { class: "dropzone" },
        h("p", {}, "Drop a photo anywhere on this page, paste it, or choose a file."),
        h("button", { type: "button", class: "go", onclick: () => file.click() }, "Choose a photo …"), file,
        h("p", { class: "hint" }, "It stays in the memory of this service and is not stored."))
    : h("p", { class: "empty" }, "This model was trained on precomputed features, so it cannot read photos.");
  place.append(
    h("section", { class: "hero" },
      h("h1", {}, "Does the sentence fit the photo?"),
      drop,
      h("p", { class: "hint" }, "Then type a sentence: the page shows which words fit, and where in the photo they look."),
      chooser(facts, model.name, (name) => (location.hash = link("match", { model: name }))),
      missing(facts) || "",
      !facts.images && h("p", { class: "note" }, "No library is served, so there is nothing to search. To search photos: ",
        h("code", {}, "counterfoil demo FOLDER"), " or ", h("code", {}, "counterfoil serve INDEX"), ".")));
  if (facts.images) place.append(await offered().catch(() => "")); // the view is of use without them
}

async function offered() {
  const { images } = await get("/api/images", { limit: OFFERED });
  return h("section", { "aria-label": "Images of the library" }, h("h2", {}, "Or one of the library"),
    h("ul", { class: "grid", role: "list" }, images.map((item) => card(item.id, item.captions[0] ?? "", null))));
}
