// Runs: what they reached, and the curves of how they got there.

import { get } from "./api.js";
import { chart } from "./chart.js";
import { h, link } from "./dom.js";

const FIRST = ["rsum", "recall", "loss", "boundary", "loss-terms"];

export async function runsView(place, params) {
  const name = params.get("name");
  const { runs } = await get("/api/runs");
  if (!runs.length) {
    place.append(h("h1", {}, "Runs"), h("p", { class: "empty" }, "No runs are shown. Start the page on a run, or with ",
      h("code", {}, "--runs FOLDER"), "."));
    return;
  }
  const shown = runs.find((run) => run.name === name) ?? runs[0];
  const tabs = h("nav", { class: "tabs", "aria-label": "Runs" }, runs.map((run) =>
    h("a", { href: link("runs", { name: run.name }), "aria-current": run === shown && "true" },
      run.name, run.rsum != null && h("b", {}, run.rsum.toFixed(1)))));
  place.append(h("h1", {}, "Runs"), runs.length > 1 ? tabs : "", await detail(shown.name));
}

async function detail(name) {
  const run = await get("/api/run", { name });
  const order = (plot) => (FIRST.indexOf(plot.name) + 1 || 99);
  const plots = run.plots.filter((plot) => plot.series.some((one) => one.points.length)).sort((a, b) => order(a) - order(b));
  return h("section", { class: "run" },
    h("header", {}, h("h2", {}, run.name), h("p", { class: "facts" }, [run.model, run.objective, run.data].filter(Boolean).join(" · "), run.finished ? "" : " · no test results yet")),
    run.warnings.length > 0 && h("ul", { class: "problem" }, run.warnings.map((text) => h("li", {}, text))),
    table(run.results),
    plots.length ? h("div", { class: "charts" }, plots.map((plot) => chart({ ...plot, series: plot.series.filter((one) => one.points.length) })))
      : h("p", { class: "empty" }, "No curves yet."),
    run.config && h("details", {}, h("summary", {}, "Configuration"), h("pre", {}, run.config)));
}

function table({ i2t, t2i, rsum, split }) {
  if (!i2t?.recalls || !t2i?.recalls) return null;
  const ks = Object.keys(i2t.recalls);
  const row = (label, side) => h("tr", {}, h("th", { scope: "row" }, label), ks.map((k) => h("td", {}, side.recalls[k].toFixed(1))), h("td", {}, String(side.median_rank)));
  return h("div", { class: "scroll" }, h("table", {},
    h("caption", {}, `Retrieval on ${split}: RSUM ${Number(rsum).toFixed(1)}`),
    h("thead", {}, h("tr", {}, h("th", {}, ""), ks.map((k) => h("th", { scope: "col" }, `R@${k}`)), h("th", { scope: "col" }, "median"))),
    h("tbody", {}, row("image → text", i2t), row("text → image", t2i))));
}
