// An iteration as pictures: histograms of its rows and tokens, and a column over rows and tokens.

import { get, runPath } from "./api.js";
import { bars, draw, heat } from "./charts.js";
import { h, labelled, link, select } from "./dom.js";
import { csvButton, pngButton } from "./download.js";
import { columnMeaning } from "./glossary.js";
import { currentPlace, noteChoice } from "./place.js";
import { Scale, centreOf } from "./scale.js";
import { fullValue, number } from "./text.js";
import { t } from "./words.js";

const FIRST = "advantages";

export function pictureBoard(place) {
  const { page, id, iteration } = place;
  const grid = h("div", { class: "board" });
  const map = new HeatMap(place);
  return {
    element: h("div", {}, h("h2", {}, t("histograms")), grid, map.element),
    async start() {
      const [answer] = await Promise.all([get(runPath(id, "rollouts", iteration, "histograms")), map.show()]);
      page.problems(answer.problems);
      for (const [name, made] of Object.entries(answer.histograms)) await addHistogram(grid, name, made);
    },
  };
}

async function addHistogram(grid, name, made) {
  const plot = h("div", { class: "plot", role: "img", "aria-label": t("histogram_of", { name: t(`hist_${name}`) }) });
  const fact = (words, value) => h("span", { class: "num", title: fullValue(value) }, `${t(words)} ${number(value)}`);
  const rows = () => [["from", "to", "count"], ...made.counts.map((n, i) => [made.edges[i], made.edges[i + 1], n])];
  grid.append(
    h(
      "section",
      { class: "card chart" },
      h("h3", {}, t(`hist_${name}`)),
      h("p", { class: "facts" }, fact("mean", made.mean), fact("spread", made.std), fact("least", made.min), fact("most", made.max)),
      plot,
      h("p", { class: "chart-tools" }, csvButton(`histogram-${name}`, rows), pngButton(t(`hist_${name}`), () => plot)),
    ),
  );
  await draw(plot, [bars(made.edges, made.counts, { variable: "--c0" })], {
    hovermode: "closest",
    xaxis: { tickformat: "", rangemode: "normal" },
  });
}

class HeatMap {
  constructor({ page, id, iteration, about }) {
    Object.assign(this, { page, id, iteration, meanings: about.columns });
    const names = Object.keys(about.columns);
    const asked = currentPlace().choices.get("column");
    this.column = names.includes(asked) ? asked : FIRST;
    this.plot = h("div", { class: "plot heat", role: "img", "aria-label": t("heat") });
    this.legend = h("div", { role: "status" });
    this.note = h("p", { class: "muted" });
    const chooser = select(names.map((name) => [name, name]), this.column, (name) => this.choose(name));
    this.element = h(
      "section",
      { class: "card" },
      h("h2", {}, t("heat")),
      h("div", { class: "bar" }, labelled(t("colour_by"), chooser), this.legend),
      h("p", { class: "muted" }, t("heat_help")),
      this.plot,
      this.note,
      h("p", {}, csvButton("heat", () => this.cells()), pngButton(t("heat"), () => this.plot)),
    );
  }

  choose(name) {
    this.column = name;
    noteChoice("column", name === FIRST ? null : name);
    this.page.run(() => this.show());
  }

  async show() {
    const question = this.column;
    const answer = await get(runPath(this.id, "rollouts", this.iteration, "heat", question));
    if (question !== this.column) return; // another was chosen meanwhile
    this.answer = answer;
    const scale = new Scale(question, answer.cells.flat());
    this.legend.replaceChildren(scale.legend(), h("p", { class: "muted" }, columnMeaning(question, this.meanings)));
    const { rows_per_cell: tall, tokens_per_cell: wide } = answer;
    this.note.textContent = answer.cells.length
      ? tall > 1 || wide > 1
        ? t("heat_folded", { rows: tall, columns: wide })
        : ""
      : t("no_columns");
    const height = Math.min(640, 80 + 16 * answer.cells.length);
    const trace = heat(answer.cells, centreOf(question), scale.reach);
    trace.x = (answer.cells[0] ?? []).map((_, i) => i * wide);
    const ticks = { tickmode: "array", ...rowTicks(answer.rows) };
    await draw(this.plot, [trace], {
      height,
      hovermode: "closest",
      uirevision: question,
      xaxis: { rangemode: "normal", showgrid: false },
      yaxis: { autorange: "reversed", showgrid: false, zeroline: false, ...ticks },
    });
    this.openOnClick();
  }

  openOnClick() {
    if (this.clicks || !this.plot.on) return;
    this.clicks = true;
    this.plot.on("plotly_click", ({ points: [point] }) => {
      const row = this.answer.rows[point.pointIndex?.[0] ?? point.y];
      if (row !== undefined) location.hash = `${link("run", this.id, "iteration", this.iteration, "row", row)}?colour=${this.column}`;
    });
  }

  cells() {
    const width = this.answer?.cells[0]?.length ?? 0;
    const wide = this.answer?.tokens_per_cell ?? 1;
    const heads = ["row", ...Array.from({ length: width }, (_, i) => i * wide)];
    return [heads, ...(this.answer?.cells ?? []).map((cells, i) => [this.answer.rows[i], ...cells])];
  }
}

// Numbers of rows beside the map, as many as fit.
function rowTicks(rows) {
  const step = Math.max(1, Math.ceil(rows.length / 24));
  const at = rows.map((_, i) => i).filter((i) => i % step === 0);
  return { tickvals: at, ticktext: at.map((i) => String(Number(rows[i]))) };
}
