// Small helpers: elements without a framework. All text goes in as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, v] of Object.entries(value)) node.style.setProperty(name, v);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.flat(2).filter((child) => child != null && child !== false && child !== ""));
  return node;
}

export const h = (tag, props = {}, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), props, children);

export function signed(value, digits = 3) {
  const text = Math.abs(value).toFixed(digits);
  return Number(text) === 0 ? text : (value > 0 ? "+" : "−") + text;
}

export function debounce(wait, act) {
  let timer = 0;
  const later = (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => act(...args), wait);
  };
  later.cancel = () => clearTimeout(timer);
  return later;
}

export function say(text) {
  document.getElementById("status").textContent = text;
}

// Spans count code points, as Python does; JavaScript's own slice would cut an emoji in two.
export const codePointSlice = (text, start, end) => [...text].slice(start, end).join("");

// A caption as one line: line breaks, tabs and control characters become single spaces.
export const oneLine = (text) => text.replace(/[\p{Z}\p{Cc}]+/gu, " ").trim();

// One tab stop for a group of things; arrow keys go from one to the next.
export function roving(items, vertical = false) {
  items.forEach((item, place) => {
    item.tabIndex = place ? -1 : 0;
    item.addEventListener("focus", () => items.forEach((one) => (one.tabIndex = one === item ? 0 : -1)));
    item.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1, ...(vertical && { ArrowDown: 1, ArrowUp: -1 }) }[event.key];
      const to = event.key === "Home" ? 0 : event.key === "End" ? items.length - 1 : place + (step ?? NaN);
      if (Number.isNaN(to)) return;
      event.preventDefault();
      items[Math.max(0, Math.min(items.length - 1, to))].focus();
    });
  });
}

export const picture = (id, side) => `/api/picture?${new URLSearchParams({ image: id, side })}`;

// The address of a view; parameters without a value are left out.
export function link(view, params = {}) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value)).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

// An image, or its name where there are no pixels.
export function image(id, side, alt, name = id) {
  const shown = h("img", { src: picture(id, side), alt, loading: "lazy", decoding: "async" });
  shown.addEventListener("error", () => shown.replaceWith(h("span", { class: "nopixels" }, name)));
  return shown;
}

// Small pictures that open the caption with each image, in the model if one is named.
export function strip(ids, text, more, model) {
  return h("p", { class: "strip" },
    ids.map((id) => h("a", { href: link("match", { image: id, text, model }), "aria-label": `Open ${id}` }, image(id, 160, ""))),
    more > 0 && h("span", { class: "fine" }, `and ${more.toLocaleString("en")} more`));
}

// A hidden field for a picture; the frame of the page uploads what is chosen.
export function fileField() {
  const file = h("input", {
    id: "file", type: "file", accept: "image/*", class: "unseen", tabindex: -1, "aria-hidden": "true",
    onchange: () => dispatchEvent(new CustomEvent("counterfoil:file", { detail: file.files[0] })),
  });
  return file;
}

export function failure(error) {
  return h("p", { class: "problem", role: "alert" }, error.message || String(error));
}

// The button for light or dark colors; the choice holds for every page.
export function chooseTheme() {
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const stored = () => {
    try { return localStorage.getItem("theme"); } catch { return null; }
  };
  const now = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  const paint = () => {
    button.textContent = now() === "dark" ? "☀" : "☾";
    button.setAttribute("aria-label", now() === "dark" ? "Use light colors" : "Use dark colors");
  };
  if (stored()) document.documentElement.dataset.theme = stored();
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = now() === "dark" ? "light" : "dark";
    try { localStorage.setItem("theme", now()); } catch { /* private windows keep nothing */ }
    paint();
  });
  dark.addEventListener("change", paint);
  paint();
}
