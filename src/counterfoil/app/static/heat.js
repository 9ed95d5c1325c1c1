// A heat map over a photo: the weights of a grid's cells, interpolated between their centers.

import { h } from "./dom.js";

const LONGER = 384;
// Dark violet, magenta, orange, light yellow: its lightness only rises, so that it reads without color, too.
const COLORS = [[66, 10, 104], [147, 38, 103], [221, 81, 58], [252, 165, 10], [252, 255, 164]];
const FAINT = 0.06, STRONGEST = 0.82;

export class HeatMap {
  constructor() {
    this.node = h("canvas", { class: "heat", "aria-hidden": "true" });
  }

  // `weights` of all boxes; `shape` is width / height of the photo.
  draw(grid, weights, shape) {
    const { node } = this;
    node.width = Math.max(1, Math.round(shape >= 1 ? LONGER : LONGER * shape));
    node.height = Math.max(1, Math.round(shape >= 1 ? LONGER / shape : LONGER));
    const field = interpolated(aboveAverage(grid.cells.map((place) => weights[place])), grid, node.width, node.height);
    const context = node.getContext("2d");
    const picture = context.createImageData(node.width, node.height);
    field.forEach((value, at) => picture.data.set(shade(value), 4 * at));
    context.putImageData(picture, 0, 0);
    node.classList.add("on");
  }

  clear() {
    this.node.classList.remove("on");
  }
}

export function heatKey() {
  const stops = COLORS.map((color, at) => `rgb(${color.join(" ")} / ${strength(at / (COLORS.length - 1)).toFixed(2)})`);
  return h("p", { class: "heat-key" }, h("span", {}, "less"),
    h("i", { "aria-hidden": "true", style: { "background-image": `linear-gradient(90deg, ${stops.join(", ")})` } }),
    h("span", {}, "more attention"));
}

// Weights as 0…1: the average and less is 0. Twice the average is needed for 1, so that a word that looks
// everywhere has a faint map.
function aboveAverage(weights) {
  const mean = weights.reduce((sum, weight) => sum + weight, 0) / weights.length;
  const most = Math.max(Math.max(...weights) - mean, mean, 1e-9);
  return weights.map((weight) => Math.max(0, (weight - mean) / most));
}

const strength = (value) => Math.min(1, Math.max(0, (value - FAINT) / 0.5)) * STRONGEST;

function shade(value) {
  const at = value * (COLORS.length - 1), low = Math.min(COLORS.length - 2, Math.floor(at)), share = at - low;
  const mixed = COLORS[low].map((one, channel) => Math.round(one + (COLORS[low + 1][channel] - one) * share));
  return [...mixed, Math.round(255 * strength(value))];
}

// The field at every pixel; outside of the grid's box it is 0.
function interpolated(cells, { rows, columns, box: [x1, y1, x2, y2] }, width, height) {
  const across = places(width, x1, x2, columns), down = places(height, y1, y2, rows);
  const field = new Float32Array(width * height);
  down.forEach((y, j) => y && across.forEach((x, i) => {
    if (!x) return;
    let sum = 0;
    for (const [row, a] of y) for (const [column, b] of x) sum += a * b * cells[row * columns + column];
    field[j * width + i] = Math.min(1, Math.max(0, sum));
  }));
  return field;
}

// For every pixel along a side the four nearest cells with their shares (Catmull-Rom); null outside.
function places(size, start, end, count) {
  return Array.from({ length: size }, (_, at) => {
    const along = ((at + 0.5) / size - start) / Math.max(end - start, 1e-9);
    if (along < 0 || along > 1) return null;
    const cell = along * count - 0.5, low = Math.floor(cell), t = cell - low;
    const shares = [t * (t * (2 - t) - 1), t * t * (3 * t - 5) + 2, t * (t * (4 - 3 * t) + 1), t * t * (t - 1)];
    return shares.map((share, k) => [Math.min(count - 1, Math.max(0, low - 1 + k)), share / 2]);
  });
}
