// The image with its regions: they light up under the pointer, or when a word looks at them.

import { h, image, svg } from "./dom.js";

const SIDE = 1000;
let masks = 0;

export class Regions {
  // `onregion` hears which region is pointed at, or null.
  constructor(id, alt, onregion) {
    this.boxes = [];
    this.onregion = onregion;
    this.pointed = null;
    this.mask = svg("mask", { id: `spot-${++masks}`, maskUnits: "userSpaceOnUse", x: 0, y: 0, width: SIDE, height: SIDE });
    this.shade = svg("rect", { class: "dim", width: SIDE, height: SIDE, mask: `url(#spot-${masks})` });
    this.frames = svg("g", { class: "frames" });
    this.layer = svg("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      svg("defs", {}, this.mask), this.shade, this.frames);
    this.node = h("div", {
      class: "regions", tabindex: 0, role: "group",
      "aria-label": `${alt}. Arrow keys go through its regions.`,
      onpointermove: (event) => this.point(this.under(event)),
      onpointerdown: (event) => this.point(this.under(event)),
      onpointerleave: () => this.point(null),
      onblur: () => this.point(null),
      onkeydown: (event) => this.key(event),
    }, image(id, 1280, alt), this.layer);
  }

  set(boxes) {
    this.boxes = boxes ?? [];
    this.node.classList.toggle("plain", !this.boxes.length);
    this.frames.replaceChildren(...this.boxes.map((box) => this.rect(box, { class: "frame" })));
    this.dark();
  }

  rect([x1, y1, x2, y2], props) {
    const cut = (value) => Math.min(1, Math.max(0, value)) * SIDE;
    return svg("rect", { x: cut(x1), y: cut(y1), width: Math.max(1, cut(x2) - cut(x1)), height: Math.max(1, cut(y2) - cut(y1)), rx: 12, ...props });
  }

  // Light regions up, each as strongly as its weight beside the largest one.
  light(weights, kind) {
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
    const area = this.node.getBoundingClientRect();
    const x = (event.clientX - area.left) / area.width, y = (event.clientY - area.top) / area.height;
    const size = ([x1, y1, x2, y2]) => (x2 - x1) * (y2 - y1);
    const hit = this.boxes.map((box, place) => [box, place])
      .filter(([[x1, y1, x2, y2]]) => x >= x1 && x <= x2 && y >= y1 && y <= y2)
      .sort((a, b) => size(a[0]) - size(b[0]));
    return hit.length ? hit[0][1] : null;
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") this.point(null);
    if (!step || !this.boxes.length) return;
    event.preventDefault();
    const count = this.boxes.length;
    this.point(this.pointed === null ? (step > 0 ? 0 : count - 1) : (this.pointed + step + count) % count);
  }
}
