// NAAF's boundary on a small scale: what words reach with right and with wrong images, and where
// the words of this sentence lie.

import { h, signed, svg } from "./dom.js";
import { kindOf } from "./sentence.js";

const WIDTH = 640, HEIGHT = 132, FLOOR = 84, ROOM = 14;

export function scale(match, handlers) {
  const { scale: learned, words } = match;
  const known = words.map((word, place) => ({ ...word, place }))
    .filter((word) => word.similarity != null && ["for", "against"].includes(kindOf(word)));
  if (!learned || !known.length) return null;
  const sides = [learned.matched, learned.mismatched].filter(Boolean);
  const reach = [...known.map((word) => word.similarity), learned.boundary, ...sides.flatMap((s) => [s.mean - 2.6 * s.std, s.mean + 2.6 * s.std])];
  const low = Math.min(...reach) - 0.02, high = Math.max(...reach) + 0.02;
  const x = (value) => ROOM + ((value - low) / (high - low)) * (WIDTH - 2 * ROOM);
  const bells = [["mismatched", "wrong"], ["matched", "right"]]
    .filter(([side]) => learned[side])
    .map(([side, kind]) => bell(learned[side], low, high, x, kind, sides));
  const t = x(learned.boundary);
  const end = t > WIDTH - 150;
  const dots = known.map((word) => svg("circle", {
    class: `dot ${kindOf(word)}`, "data-place": word.place,
    cx: x(word.similarity), cy: FLOOR, r: 6,
    onpointerenter: () => handlers.enter(word.place), onpointerleave: () => handlers.leave(),
  }, svg("title", {}, `${word.word}: ${word.similarity.toFixed(3)}`)));
  const label = svg("text", { class: "dot-label", y: FLOOR + 26, "text-anchor": "middle" });
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img",
    "aria-label": `Boundary at ${learned.boundary.toFixed(3)}; ${known.filter((w) => w.similarity < learned.boundary).length} of ${known.length} words lie below it.` },
    bells,
    svg("line", { class: "axis", x1: ROOM, x2: WIDTH - ROOM, y1: FLOOR, y2: FLOOR }),
    svg("line", { class: "boundary", x1: t, x2: t, y1: 6, y2: FLOOR + 12 }),
    svg("text", { class: "boundary-label", x: t + (end ? -7 : 7), y: 16, "text-anchor": end ? "end" : "start" }, `boundary ${learned.boundary.toFixed(2)}`),
    dots, label,
    svg("text", { class: "edge", x: ROOM, y: HEIGHT - 4 }, "fits no region"),
    svg("text", { class: "edge", x: WIDTH - ROOM, y: HEIGHT - 4, "text-anchor": "end" }, "fits a region well"));
  const node = h("figure", { class: "scale" }, drawing,
    h("figcaption", {}, "Each dot is a word, in the color of the word above, at its highest similarity with a region. ",
      bells.length > 0 && "The curves show the similarities of words in training: filled for matching images, dashed for mismatched ones."));
  return { node, point: (place) => point(node, label, known, x, place) };
}

function bell({ mean, std }, low, high, x, kind, sides) {
  const narrow = Math.min(...sides.map((side) => side.std));
  const top = FLOOR - 26;
  const points = Array.from({ length: 81 }, (_, i) => low + ((high - low) * i) / 80)
    .map((v) => `${x(v).toFixed(1)},${(FLOOR - top * (narrow / std) * Math.exp(-((v - mean) ** 2) / (2 * std ** 2))).toFixed(1)}`);
  return svg("polygon", { class: `bell ${kind}`, points: `${x(low)},${FLOOR} ${points.join(" ")} ${x(high)},${FLOOR}` });
}

function point(node, label, known, x, place) {
  const word = known.find((one) => one.place === place);
  node.querySelectorAll(".dot").forEach((dot) => dot.classList.toggle("on", dot.dataset.place === String(place)));
  label.textContent = word ? `${word.word} ${word.similarity.toFixed(2)} (${signed(word.effect)})` : "";
  if (word) label.setAttribute("x", Math.min(WIDTH - 80, Math.max(80, x(word.similarity))));
}
