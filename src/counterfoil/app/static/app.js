// The frame of the page: which view is shown, light or dark, dropped and pasted images.

import { about, upload } from "./api.js";
import { chooseTheme, failure, h, link, say } from "./dom.js";
import { auditView } from "./audit.js";
import { matchView } from "./match.js";
import { runsView } from "./runs.js";
import { searchView } from "./search.js";
import { openSession, tokenForm } from "./session.js";

const VIEWS = { search: searchView, match: matchView, audit: auditView, runs: runsView };
const TITLES = { search: "Search", match: "Match", audit: "Audit", runs: "Runs" };
const main = document.getElementById("main");
let leave = () => {};
let shows = 0;

function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return [path, new URLSearchParams(query)];
}

async function show() {
  const number = ++shows;
  const isStale = () => number !== shows; // the address changed again meanwhile
  const refused = await openSession().catch((error) => error);
  const [path, params] = address();
  // without a library, a photo and a sentence come first
  const home = await about().then((facts) => (facts.images ? "search" : "match"), () => "search");
  const view = path in VIEWS ? path : home;
  if (isStale()) return;
  leave();
  leave = () => {};
  document.title = `${TITLES[view]} · Counterfoil`;
  for (const item of document.querySelectorAll("#nav a[data-view]")) {
    const own = item.dataset.view === view;
    own ? item.setAttribute("aria-current", "page") : item.removeAttribute("aria-current");
  }
  const place = h("div", { class: `view ${view}` });
  main.replaceChildren(place);
  window.scrollTo(0, 0);
  try {
    if (refused) throw refused;
    const close = (await VIEWS[view](place, params)) ?? (() => {});
    isStale() ? close() : (leave = close);
  } catch (error) {
    place.replaceChildren(error.status === 401 ? tokenForm() : failure(error));
  }
  place.dataset.ready = "";
}

// An image searches the captions of the library; without any, or in the match view's start, it is matched.
async function use(file) {
  if (!file) return;
  say("Reading the image");
  document.body.classList.add("busy");
  try {
    const [{ id }, facts] = await Promise.all([upload(file), about()]);
    const [path, params] = address();
    const kept = ["text", "model"].filter((key) => params.get(key)).map((key) => [key, params.get(key)]);
    const starts = path === "match" && !params.get("image");
    location.hash = facts.captions && !starts ? link("", { image: id })
      : link("match", { image: id, ...Object.fromEntries(kept) });
  } catch (error) {
    main.querySelector(".view")?.prepend(failure(error));
  } finally {
    document.body.classList.remove("busy");
  }
}

function acceptImages() {
  const veil = document.getElementById("drop");
  let depth = 0;
  const carries = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  addEventListener("dragenter", (event) => {
    if (carries(event)) veil.hidden = ++depth === 0;
  });
  addEventListener("dragleave", (event) => {
    if (carries(event)) veil.hidden = --depth <= 0;
  });
  addEventListener("dragover", (event) => event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    depth = 0;
    veil.hidden = true;
    use(event.dataTransfer.files[0]);
  });
  addEventListener("paste", (event) => {
    const file = [...(event.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
    if (file) use(file);
  });
  addEventListener("counterfoil:file", (event) => use(event.detail));
}

function shortcuts() {
  addEventListener("keydown", (event) => {
    const writing = event.target.closest?.("input, textarea, select");
    if (event.key === "/" && !writing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      const field = document.getElementById("query") ?? document.getElementById("sentence");
      field ? field.focus() : (location.hash = "#/");
    }
  });
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    main.focus();
  });
}

async function footer() {
  const facts = await about();
  const library = facts.images
    ? `${facts.images.toLocaleString("en")} images, ${facts.captions.toLocaleString("en")} captions`
    : "no library";
  document.getElementById("foot").textContent =
    [`Counterfoil ${facts.version}`, facts.models.map((one) => one.name).join(", "), library].join(" · ");
}

chooseTheme();
acceptImages();
shortcuts();
addEventListener("hashchange", show);
show().then(footer).catch(() => {});
