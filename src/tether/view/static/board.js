// The board of curves: one small chart a metric, the chosen runs laid over one another.

import { draw, forget, line, lineStyle, points } from "./charts.js";
import { h, labelled, select } from "./dom.js";
import { fullValue, number } from "./text.js";
import { meaningOf } from "./glossary.js";
import { t } from "./words.js";

export const SCORE = "score/mean";

// In the order of the data flow; a run that lacks one has no chart for it.
export const FIRST_CURVES = [
  SCORE,
  "kl/sequence_mean",
  "actor/entropy",
  "actor/pg_clipfrac",
  "actor/approx_kl",
  "actor/pg_loss",
  "critic/vf_loss",
  "critic/explained_variance",
  "response/length_mean",
  "time/iteration",
  "throughput/tokens_per_second",
];

export class Board {
  constructor(onMore) {
    this.added = [];
    this.charts = new Map();
    this.grid = h("div", { class: "board" });
    this.more = h("div", { class: "more" });
    this.element = h("div", {}, this.grid, this.more);
    this.onMore = onMore;
  }

  get wanted() {
    return [...FIRST_CURVES, ...this.added];
  }

  // shown: [{series: RunSeries, index: colour}]
  async show(shown) {
    const present = new Set(shown.flatMap(({ series }) => series.about?.names ?? []));
    const names = this.wanted.filter((name) => present.has(name));
    for (const [name, chart] of this.charts) if (!names.includes(name)) this.drop(name, chart);
    this.offer([...present].filter((name) => !this.wanted.includes(name)));
    for (const name of names) await this.chart(name).show(name, shown);
  }

  chart(name) {
    if (!this.charts.has(name)) {
      const remove = this.added.includes(name) ? () => this.remove(name) : null;
      this.charts.set(name, new Chart(name, remove));
      this.grid.append(this.charts.get(name).element);
    }
    return this.charts.get(name);
  }

  drop(name, chart) {
    forget(chart.plot);
    chart.element.remove();
    this.charts.delete(name);
  }

  remove(name) {
    this.added = this.added.filter((other) => other !== name);
    this.drop(name, this.charts.get(name));
    this.onMore();
  }

  offer(names) {
    if (this.more.contains(document.activeElement)) return; // a choice is being made
    const options = [["", t("choose")], ...names.map((name) => [name, name])];
    const add = (name) => {
      if (name) this.added.push(name);
      this.onMore();
    };
    this.more.replaceChildren(names.length ? labelled(t("more_curve"), select(options, "", add)) : "");
  }
}

class Chart {
  constructor(name, remove) {
    this.help = h("p", { class: "muted" });
    this.latest = h("span", { class: "latest" });
    this.plot = h("div", { class: "plot", role: "img", "aria-label": t("chart_of", { name }) });
    const head = h("summary", {}, h("span", { class: "metric" }, name), this.latest);
    this.element = h(
      "section",
      { class: "card chart" },
      h("details", {}, head, this.help),
      this.plot,
      name === SCORE ? h("p", { class: "muted key" }, t("eval_marks")) : null,
      remove && h("button", { type: "button", class: "quiet", on: { click: remove } }, t("remove")),
    );
  }

  async show(name, shown) {
    const traces = shown.flatMap(({ series, index }) => tracesOf(name, series, lineStyle(index)));
    this.help.textContent = meaningOf(name, shown[0]?.series.about?.glossary);
    this.latest.replaceChildren(...shown.slice(0, 4).map((one) => latestOf(name, one)));
    await draw(this.plot, traces);
  }
}

function tracesOf(name, series, style) {
  const curve = line(series.iteration, series.values.get(name) ?? [], style);
  if (name !== SCORE) return [curve];
  const sampled = held(series.evals, "sampled", style, "circle");
  return [curve, sampled, held(series.evals, "greedy", style, "diamond")];
}

function held(evals, decoding, style, symbol) {
  const found = evals.filter((record) => typeof record[decoding]?.mean === "number");
  const [mean, low, high] = ["mean", "low", "high"].map((field) =>
    found.map((record) => record[decoding][field]),
  );
  return points(found.map((record) => record.iteration), mean, low, high, style, symbol);
}

function latestOf(name, { series, index }) {
  const value = series.last(name);
  const swatch = h("span", { class: `swatch c${index % 6}`, "aria-hidden": "true" });
  return h("span", { class: "num", title: fullValue(value) }, swatch, number(value));
}
