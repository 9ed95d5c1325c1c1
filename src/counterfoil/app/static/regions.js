// The image with its regions: they light up under the pointer, or when a word looks at them.
// Cells of a grid are shown as a heat map, other regions by their outlines.

import { h, image, svg } from "./dom.js";
import { HeatMap, heatKey } from "./heat.js";

const SIDE = 1000;
let masks = 0;

export class Regions {
  // `onregion` hears which region is pointed at, or null.
  constructor(id, alt, onregion) {
    this.boxes = [];
    this.grid = null;
    this.heat = new HeatMap();
    this.onregion = onregion;
    this.pointed = null;
    this.mask = svg("mask", { id: `spot-${++masks}`, maskUnits: "userSpaceOnUse", x: 0, y: 0, width: SIDE, height: SIDE });
    this.shade = svg("rect", { class: "dim", width: SIDE, height: SIDE, mask: `url(#spot-${masks})` });
    this.frames = svg("g", { class: "frames" });
    this.layer = svg("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("defs", {}, this.mask), this.shade, this.frames);
    this.shape = 1; // width / height
    const shown = image(id, 1280, alt);
    shown.addEventListener("load", () => {
      this.shape = shown.naturalWidth / shown.naturalHeight || 1;
      this.area.style.setProperty("--shape", this.shape);
    });
    this.area = h("div", {
      class: "regions", tabindex: 0, role: "group",
      "aria-label": `${alt}. Arrow keys go through its regions.`,
      onpointermove: (event) => this.point(this.under(event)),
      onpointerdown: (event) => this.point(this.under(event)),
      onpointerleave: (event) => event.pointerType === "mouse" && this.point(null), // a finger is lifted
      onblur: () => this.point(null),
      onkeydown: (event) => this.move(event),
    }, shown, this.layer, this.heat.node);
    this.key = heatKey();
    this.node = h("div", { class: "picture" }, this.area, this.key);
    this.set([], null);
  }

  set(boxes, grid) {
    this.boxes = boxes ?? [];
    this.grid = grid;
    this.key.hidden = !grid;
    this.layer.classList.toggle("grid", Boolean(grid));
    this.area.classList.toggle("plain", !this.boxes.length);
    this.frames.replaceChildren(...this.boxes.map((box) => this.rect(box, { class: "frame" })));
    this.dark();
  }

  rect([x1, y1, x2, y2], props) {
    const cut = (value) => Math.min(1, Math.max(0, value)) * SIDE;
    return svg("rect", { x: cut(x1), y: cut(y1), width: Math.max(1, cut(x2) - cut(x1)), height: Math.max(1, cut(y2) - cut(y1)), rx: 12, ...props });
  }

  // Light regions up, each as strongly as its weight beside the largest one.
  light(weights, kind) {
    if (this.grid) return this.heat.draw(this.grid, weights, this.shape);
    const most = Math.max(...weights, 1e-9);
    const strength = weights.map((weight) => weight / most);
    this.mask.replaceChildren(svg("rect", { width: SIDE, height: SIDE, fill: "white" }),
      ...this.boxes.map((box, place) => strength[place] > 0.15 &&
        this.rect(box, { fill: "black", "fill-opacity": strength[place].toFixed(3) })).filter(Boolean));
    [...this.frames.children].forEach((frame, place) => {
      frame.setAttribute("class", `frame ${strength[place] > 0.3 ? `lit ${kind}` : ""}`);
      frame.style.setProperty("opacity", strength[place] > 0.3 ? 0.35 + 0.65 * strength[place] : 0);
    });
    this.layer.classList.add("on");
  }

  dark() {
    this.heat.clear();
    this.layer.classList.remove("on");
    for (const frame of this.frames.children) {
      frame.setAttribute("class", "frame");
      frame.style.removeProperty("opacity");
    }
  }

  point(place) {
    if (place === this.pointed) return;
    this.pointed = place;
    this.onregion(place);
  }

  // The smallest region under the pointer; the whole image only where there is no other.
  under(event) {
    const area = this.area.getBoundingClientRect();
    const x = (event.clientX - area.left) / area.width, y = (event.clientY - area.top) / area.height;
    const size = ([x1, y1, x2, y2]) => (x2 - x1) * (y2 - y1);
    const hit = this.boxes.map((box, place) => [box, place])
      .filter(([[x1, y1, x2, y2]]) => x >= x1 && x <= x2 && y >= y1 && y <= y2)
      .sort((a, b) => size(a[0]) - size(b[0]));
    return hit.length ? hit[0][1] : null;
  }

  // Arrow keys go from region to region, in a grid also from row to row.
  move(event) {
    if (event.key === "Escape") this.point(null);
    const order = this.grid?.cells ?? this.boxes.map((_, place) => place);
    const row = this.grid?.columns ?? 1;
    const step = { ArrowRight: 1, ArrowDown: row, ArrowLeft: -1, ArrowUp: -row }[event.key];
    if (!step || !order.length) return;
    event.preventDefault();
    const at = order.indexOf(this.pointed), count = order.length;
    this.point(order[at < 0 ? (step > 0 ? 0 : count - 1) : (at + step + count) % count]);
  }
}
