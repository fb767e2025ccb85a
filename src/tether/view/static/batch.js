// What if, for all rows of an iteration: how many tokens would be clipped, and how the advantages
// that the loss uses would spread.

import { exported, runPath } from "./api.js";
import { bars, draw } from "./charts.js";
import { Controls } from "./controls.js";
import { h } from "./dom.js";
import { csvButton, pngButton, tableCells } from "./download.js";
import { numberCells, pair } from "./whatif.js";
import { t } from "./words.js";

export function batchPanel({ page, id, iteration }) {
  const head = [h("h2", {}, t("batch_whatif")), h("p", { class: "muted" }, t("batch_help"))];
  if (exported()) {
    return { element: h("section", { class: "card" }, head, h("p", { class: "muted" }, t("whatif_export"))) };
  }
  const plot = h("div", { class: "plot", role: "img", "aria-label": t("batch_histogram") });
  const totals = h("div", { class: "scroll fit" });
  const controls = new Controls(runPath(id, "rollouts", iteration), (answer) => show(answer));

  async function show(answer) {
    page.problems(answer.problems);
    const changed = t("batch_changed", { turned: answer.turned });
    controls.said.textContent = [answer.own ? t("whatif_own") : changed, answer.note].filter(Boolean).join(" ");
    totals.replaceChildren(totalsTable(answer));
    const made = ["before", "after"].filter((side) => answer.histograms[side]);
    const style = { before: { variable: "--c0" }, after: { variable: "--c1" } };
    const traces = made.map((side) => {
      const { edges, counts } = answer.histograms[side];
      return bars(edges, counts, style[side], 0.55);
    });
    const xaxis = { tickformat: "", rangemode: "normal" };
    await draw(plot, traces, { height: 260, barmode: "overlay", hovermode: "closest", xaxis });
  }

  const swatch = (variable) => h("span", { class: `swatch ${variable}`, "aria-hidden": "true" });
  return {
    element: h(
      "section",
      { class: "card whatif batch" },
      head,
      controls.element,
      h(
        "div",
        { class: "halves" },
        h("div", {}, totals, h("p", {}, csvButton("batch-what-if", () => tableCells(totals.querySelector("table") ?? h("table"))))),
        h(
          "div",
          {},
          h("h3", {}, t("batch_histogram")),
          h("p", { class: "legend" }, h("span", {}, swatch("c0"), t("before")), h("span", {}, swatch("c1"), t("after"))),
          plot,
          h("p", {}, pngButton(t("batch_histogram"), () => plot)),
        ),
      ),
    ),
    start: () => controls.begin(),
  };
}

function totalsTable({ before, after }) {
  const names = Object.keys(after).filter((name) => before[name] !== null || after[name] !== null);
  const sides = ["before", "after"].map((side) => h("th", { scope: "col", class: "num" }, t(side)));
  const lines = names.map((name) =>
    h("tr", {}, h("th", { scope: "row" }, t(`batch_${name}`)), numberCells(pair(before[name], after[name]))),
  );
  return h("table", { class: "totals" }, h("thead", {}, h("tr", {}, h("td"), sides)), h("tbody", {}, lines));
}
