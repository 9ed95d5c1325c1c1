// Runs: what they reached, and the curves of how they got there. The view follows runs that train.

import { get } from "./api.js";
import { chart } from "./chart.js";
import { h, link } from "./dom.js";

const FIRST = ["rsum", "recall", "loss", "boundary", "loss-terms"];
const SOON = 2000, LATER = 15000;

export async function runsView(place, params) {
  const view = new RunsView(place, params.get("name"));
  await view.refresh();
  return () => view.close();
}

class RunsView {
  constructor(place, name) {
    Object.assign(this, { place, name, drawn: "", timer: 0, closed: false });
  }

  async refresh() {
    const { runs } = await get("/api/runs");
    const chosen = runs.find((run) => run.name === this.name) ?? runs[0];
    const run = chosen && (await get("/api/run", { name: chosen.name }));
    if (this.closed) return;
    this.draw(runs, run);
    this.again(runs.some((one) => one.training) ? SOON : LATER);
  }

  again(wait) {
    if (this.closed) return;
    this.timer = setTimeout(() => {
      if (document.hidden) this.again(wait);
      else this.refresh().catch(() => this.again(LATER)); // the service may come back
    }, wait);
  }

  // Drawn anew only after a change; what was unfolded stays so.
  draw(runs, run) {
    const state = JSON.stringify([runs, run]);
    if (state === this.drawn) return;
    this.drawn = state;
    const unfolded = this.place.querySelector("details")?.open;
    this.place.replaceChildren(h("h1", {}, "Runs"), ...(run
      ? [runs.length > 1 ? tabs(runs, run) : "", detail(run)]
      : [h("p", { class: "empty" }, "There are no runs. Start the page on a run, or with ", h("code", {}, "--runs FOLDER"), ".")]));
    if (unfolded) this.place.querySelector("details").open = true;
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
  }
}

function tabs(runs, shown) {
  return h("nav", { class: "tabs", "aria-label": "Runs" }, runs.map((run) =>
    h("a", { href: link("runs", { name: run.name }), "aria-current": run.name === shown.name && "true" },
      run.name, run.training ? h("b", { class: "live" }, "training") : run.rsum != null && h("b", {}, run.rsum.toFixed(1)))));
}

function stateOf(run) {
  const done = run.epochs ? `${run.epochs_done} of ${run.epochs} epochs` : `${run.epochs_done} epochs`;
  if (run.training) return h("b", { class: "live" }, `training: ${done}`);
  return run.finished ? done : `stopped after ${done}, no test results`;
}

function detail(run) {
  const order = (plot) => (FIRST.indexOf(plot.name) + 1 || 99);
  const plots = run.plots.filter((plot) => plot.series.some((one) => one.points.length)).sort((a, b) => order(a) - order(b));
  return h("section", { class: "run" },
    h("header", {}, h("h2", {}, run.name),
      h("p", { class: "facts" }, [run.model, run.objective, run.data].filter(Boolean).join(" · "), " · ", stateOf(run))),
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
    h("thead", {}, h("tr", {}, h("th", {}, ""), ks.map((k) => h("th", { scope: "col" }, `R@${k}`)), h("th", { scope: "col" }, "median rank"))),
    h("tbody", {}, row("image → text", i2t), row("text → image", t2i))));
}
