// A line chart: axes with round numbers, a legend, and values under the pointer.

import { h, svg } from "./dom.js";

const W = 560, H = 300, LEFT = 54, RIGHT = 12, TOP = 12, BOTTOM = 40;

export function chart({ title, x: xName, y: yName, series }) {
  const points = series.flatMap((one) => one.points);
  const xs = points.map((p) => p[0]), ys = points.map((p) => p[1]);
  const [x0, x1] = span(xs), [y0, y1] = padded(span(ys));
  const x = (v) => LEFT + ((v - x0) / (x1 - x0)) * (W - LEFT - RIGHT);
  const y = (v) => H - BOTTOM - ((v - y0) / (y1 - y0)) * (H - TOP - BOTTOM);
  const grid = [
    ...ticks(y0, y1, 5).map((v) => [
      svg("line", { class: "gridline", x1: LEFT, x2: W - RIGHT, y1: y(v), y2: y(v) }),
      svg("text", { x: LEFT - 8, y: y(v) + 4, "text-anchor": "end" }, short(v))]),
    ...ticks(x0, x1, 6, points.every((p) => Number.isInteger(p[0]))).map((v) => [svg("text", { x: x(v), y: H - BOTTOM + 18, "text-anchor": "middle" }, short(v))]),
  ];
  const lines = series.map((one, place) => one.points.length > 1
    ? svg("polyline", { class: `line c${place % 8}`, points: one.points.map((p) => `${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ") })
    : svg("circle", { class: `spot c${place % 8}`, cx: x(one.points[0][0]), cy: y(one.points[0][1]), r: 4 }));
  const cross = svg("line", { class: "cross", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  const read = h("p", { class: "read", "aria-hidden": "true" });
  const drawing = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title}: ${described(series)}` },
    grid, svg("text", { class: "axis-name", x: (LEFT + W - RIGHT) / 2, y: H - 4, "text-anchor": "middle" }, xName), lines, cross);
  drawing.addEventListener("pointermove", (event) => {
    const area = drawing.getBoundingClientRect();
    const at = x0 + ((((event.clientX - area.left) / area.width) * W - LEFT) / (W - LEFT - RIGHT)) * (x1 - x0);
    const near = series.map((one) => one.points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a)));
    cross.setAttribute("visibility", "visible");
    cross.setAttribute("x1", x(near[0][0]));
    cross.setAttribute("x2", x(near[0][0]));
    read.textContent = `${xName} ${short(near[0][0])}: ` + series.map((one, i) => `${one.name} ${short(near[i][1])}`).join(", ");
  });
  drawing.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    read.textContent = "";
  });
  return h("figure", { class: "chart" }, h("figcaption", {}, title, yName && !title.toLowerCase().includes(yName.toLowerCase()) && h("small", {}, ` ${yName}`)), drawing,
    series.length > 1 && h("ul", { class: "legend" }, series.map((one, place) => h("li", { class: `c${place % 8}` }, one.name))),
    read);
}

function described(series) {
  return series.map(({ name, points }) => `${name} from ${short(points[0][1])} to ${short(points.at(-1)[1])}`).join("; ");
}

function span(values) {
  const low = values.reduce((a, b) => Math.min(a, b)), high = values.reduce((a, b) => Math.max(a, b));
  return high > low ? [low, high] : [low - 0.5, high + 0.5];
}

const padded = ([low, high]) => [low - 0.04 * (high - low), high + 0.04 * (high - low)];

function ticks(low, high, count, whole = false) {
  const rough = (high - low) / count, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * unit).find((s) => s >= rough && (!whole || s >= 1)) ?? 1;
  const values = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) values.push(i * step);
  return values;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(1).replace("e+", "e");
  return Number(value.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 4 });
}
