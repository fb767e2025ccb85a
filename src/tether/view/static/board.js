// The board of curves: one small chart per metric, the chosen runs laid over one another.

import { band, draw, forget, line, lineStyle, pale, points, zoomTo } from "./charts.js";
import { button, h, labelled, select } from "./dom.js";
import { csvButton, pngButton } from "./download.js";
import { meaningOf } from "./glossary.js";
import { remember, remembered } from "./preferences.js";
import { fold, meanOf, smooth } from "./smooth.js";
import { fullValue, number } from "./text.js";
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
    this.pins = list(remembered("pins"));
    this.smoothing = Number(remembered("smoothing")) || 0;
    this.log = false;
    this.zoom = null;
    this.shown = [];
    this.charts = new Map();
    this.grid = h("div", { class: "board" });
    this.more = h("div", { class: "more" });
    this.tools = h("div", { class: "bar tools", hidden: true }, this.controls());
    this.element = h("div", {}, this.tools, this.grid, this.more);
    this.onMore = onMore;
  }

  get wanted() {
    return [...new Set([...this.pins, ...FIRST_CURVES, ...this.added])];
  }

  controls() {
    const value = h("span", { class: "num muted" }, this.smoothing.toFixed(2));
    const slider = h("input", { type: "range", min: 0, max: 0.99, step: 0.01 });
    slider.value = this.smoothing;
    slider.addEventListener("input", () => {
      this.smoothing = Number(slider.value);
      value.textContent = this.smoothing.toFixed(2);
      remember("smoothing", this.smoothing);
      this.redraw();
    });
    const log = h("input", { type: "checkbox" });
    log.addEventListener("change", () => {
      this.log = log.checked;
      this.redraw();
    });
    this.unzoom = button(t("unzoom"), () => this.zoomAll(null), { hidden: true });
    return [labelled(t("smoothing"), slider), value, labelled(t("log_axis"), log), this.unzoom];
  }

  // shown: [{members: [RunSeries], index: colour}]; several members are seeds folded into one.
  async show(shown) {
    this.shown = shown;
    const present = new Set(shown.flatMap(({ members }) => members.flatMap(({ about }) => about?.names ?? [])));
    const names = this.wanted.filter((name) => present.has(name));
    for (const [name, chart] of this.charts) if (!names.includes(name)) this.drop(name, chart);
    this.offer([...present].filter((name) => !this.wanted.includes(name)));
    this.tools.hidden = !names.length;
    names.forEach((name) => this.chart(name));
    this.arrange(names);
    for (const name of names) await this.chart(name).show(shown);
  }

  // Only what stands elsewhere is moved: a chart that is touched is drawn anew by the browser.
  arrange(names) {
    const wanted = names.map((name) => this.chart(name).element);
    if (wanted.some((element, i) => this.grid.children[i] !== element)) this.grid.replaceChildren(...wanted);
  }

  redraw() {
    for (const chart of this.charts.values()) chart.show(this.shown);
  }

  chart(name) {
    if (!this.charts.has(name)) this.charts.set(name, new Chart(name, this));
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

  pin(name) {
    const pinned = this.pins.includes(name);
    this.pins = pinned ? this.pins.filter((other) => other !== name) : [...this.pins, name];
    remember("pins", JSON.stringify(this.pins));
    if (pinned && !FIRST_CURVES.includes(name)) this.added.push(name); // it stays until removed
    this.show(this.shown);
  }

  // One stretch of iterations for all charts.
  async zoomAll(range) {
    this.zoom = range;
    this.unzoom.hidden = !range;
    await Promise.all([...this.charts.values()].map(({ plot }) => zoomTo(plot, range)));
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

function list(text) {
  try {
    const found = JSON.parse(text ?? "[]");
    return Array.isArray(found) ? found.filter((name) => typeof name === "string").slice(0, 20) : [];
  } catch {
    return [];
  }
}

class Chart {
  constructor(name, board) {
    Object.assign(this, { name, board, shown: [] });
    this.help = h("p", { class: "muted" });
    this.latest = h("span", { class: "latest" });
    this.plot = h("div", { class: "plot", role: "img", "aria-label": t("chart_of", { name }) });
    const head = h("summary", {}, h("span", { class: "metric" }, name), this.latest);
    this.pin = button("", () => board.pin(name), { class: "quiet" });
    this.larger = button(t("enlarge"), () => this.enlarge(), { class: "quiet" });
    this.drop = button(t("remove"), () => board.remove(name), { class: "quiet" });
    this.element = h(
      "section",
      { class: "card chart" },
      h("details", {}, head, this.help),
      this.plot,
      name === SCORE ? h("p", { class: "muted key" }, t("eval_marks")) : null,
      h(
        "p",
        { class: "chart-tools" },
        this.pin,
        this.larger,
        csvButton(name, () => this.table()),
        pngButton(name, () => this.plot),
        this.drop,
      ),
    );
  }

  enlarge() {
    const large = this.element.classList.toggle("large");
    this.larger.textContent = t(large ? "shrink" : "enlarge");
    this.show(this.shown);
  }

  async show(shown) {
    this.shown = shown;
    const { board, name } = this;
    const pinned = board.pins.includes(name);
    this.pin.textContent = t(pinned ? "unpin" : "pin");
    this.pin.setAttribute("aria-pressed", String(pinned));
    this.drop.hidden = !board.added.includes(name);
    this.help.textContent = meaningOf(name, shown[0]?.members[0]?.about?.glossary);
    this.latest.replaceChildren(...shown.slice(0, 4).map((one) => latestOf(name, one)));
    const traces = shown.flatMap(({ members, index }) => this.traces(members, lineStyle(index)));
    const large = this.element.classList.contains("large");
    await draw(this.plot, traces, { height: large ? 420 : 190, yaxis: { type: board.log ? "log" : "linear" } });
    this.follow();
  }

  // A zoom by hand is a zoom of every chart.
  follow() {
    if (this.following || !this.plot.on) return;
    this.following = true;
    this.plot.on("plotly_relayout", (change) => {
      const range = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      const given = range.every((x) => typeof x === "number");
      if (given && String(range) !== String(this.board.zoom)) this.board.zoomAll(range);
      else if (change["xaxis.autorange"] && this.board.zoom) this.board.zoomAll(null);
    });
  }

  traces(members, style) {
    const { name, board } = this;
    const curves = members.map((series) => ({ x: series.iteration, y: series.values.get(name) ?? [] }));
    const evals = name === SCORE ? members.flatMap((series) => held(series.evals, style)) : [];
    if (curves.length > 1) {
      const { x, mean, low, high } = fold(curves);
      const calm = (y) => smooth(y, board.smoothing);
      return [line(x, calm(mean), style), ...band(x, calm(low), calm(high), style), ...evals];
    }
    const [{ x, y }] = curves;
    const curve = line(x, smooth(y, board.smoothing), style);
    return board.smoothing ? [curve, pale(line(x, y, style)), ...evals] : [curve, ...evals];
  }

  // Every iteration of every run that is drawn.
  table() {
    const series = this.shown.flatMap(({ members }) => members);
    const rows = series.flatMap(({ id, iteration, values }) =>
      iteration.map((at, i) => [id, at, values.get(this.name)?.[i] ?? null]),
    );
    return [["run", "iteration", this.name], ...rows];
  }
}

function held(evals, style) {
  return [
    heldPoints(evals, "sampled", style, "circle"),
    heldPoints(evals, "greedy", style, "diamond"),
  ];
}

function heldPoints(evals, decoding, style, symbol) {
  const found = evals.filter((record) => typeof record[decoding]?.mean === "number");
  const [mean, low, high] = ["mean", "low", "high"].map((field) =>
    found.map((record) => record[decoding][field]),
  );
  return points(found.map((record) => record.iteration), mean, low, high, style, symbol);
}

function latestOf(name, { members, index }) {
  const value = meanOf(members.map((series) => series.last(name)));
  const swatch = h("span", { class: `swatch c${index % 6}`, "aria-hidden": "true" });
  const many = members.length > 1 ? ` (${members.length})` : "";
  return h("span", { class: "num", title: fullValue(value) }, swatch, number(value) + many);
}
