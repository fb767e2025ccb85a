// What if beta were twice as large? The server computes the row again with the functions that
// trained it, and both answers stand side by side.

import { exported } from "./api.js";
import { Controls } from "./controls.js";
import { h } from "./dom.js";
import { csvButton, tableCells } from "./download.js";
import { fullValue, number, visibleToken } from "./text.js";
import { t } from "./words.js";

// onAnswer is told what the settings make of the row.
export function whatIfPanel(path, row, onAnswer) {
  if (exported()) return { element: closed(t("whatif_export")), start() {} };
  const panel = new WhatIf(path, row, onAnswer);
  return { element: panel.element, start: () => panel.controls.begin() };
}

function closed(sentence) {
  return h("section", { class: "card" }, h("h2", {}, t("whatif")), h("p", { class: "muted" }, sentence));
}

class WhatIf {
  constructor(path, row, onAnswer) {
    this.row = row;
    this.controls = new Controls(path, (answer) => {
      this.show(answer);
      onAnswer(answer);
    });
    this.totals = h("div");
    this.cells = h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": t("whatif") });
    this.element = h(
      "section",
      { class: "card whatif" },
      h("h2", {}, t("whatif")),
      h("p", { class: "muted" }, t("whatif_help")),
      this.controls.element,
      this.totals,
      h("p", {}, csvButton("what-if", () => tableCells(this.cells.querySelector("table") ?? h("table")))),
      this.cells,
    );
  }

  show(answer) {
    const { before, after, totals } = answer;
    const names = Object.keys(after).filter((name) => before[name] && after[name]);
    let different = 0;
    const lines = this.row.tokens.map((token, at) => {
      const pairs = names.map((name) => pair(before[name][at], after[name][at]));
      const clips = pair(answer.clip_before[at], answer.clip_after[at]);
      different += pairs.filter(({ differs }) => differs).length;
      return h(
        "tr",
        { class: this.row.mask[at] ? null : "hatched" },
        h("th", { scope: "row", class: "model-text" }, visibleToken(token ?? `#${this.row.ids[at]}`)),
        pairs.flatMap(numberCells),
        clipCells(clips),
      );
    });
    const own = answer.own ? t("whatif_own") : t("whatif_changed", { cells: different });
    this.controls.said.textContent = [own, answer.note, ...answer.problems].filter(Boolean).join(" ");
    this.totals.replaceChildren(totalsTable(totals));
    const head = heads([...names, "clip"]);
    this.cells.replaceChildren(h("table", { class: "numbers" }, head, h("tbody", {}, lines)));
  }
}

export function pair(before, after) {
  return { before: before ?? null, after: after ?? null, differs: (before ?? null) !== (after ?? null) };
}

export function numberCells({ before, after, differs }) {
  return [
    h("td", { class: "num", title: fullValue(before) }, number(before)),
    h("td", { class: differs ? "num after differs" : "num after", title: fullValue(after) }, number(after)),
  ];
}

function clipCells({ before, after, differs }) {
  const words = (state) => (state ? t(`clip_${state}`) : "");
  return [h("td", {}, words(before)), h("td", { class: differs ? "after differs" : "after" }, words(after))];
}

function heads(names) {
  const columns = names.map((name) => h("th", { scope: "colgroup", colspan: 2 }, name));
  const sides = names.flatMap(() => [
    h("th", { scope: "col", class: "num" }, t("before")),
    h("th", { scope: "col", class: "num after" }, t("after")),
  ]);
  const token = h("th", { scope: "col", rowspan: 2 }, t("token"));
  return h("thead", {}, h("tr", {}, token, columns), h("tr", {}, sides));
}

function totalsTable({ before, after }) {
  const line = (name) =>
    h("tr", {}, h("th", { scope: "row" }, t(`total_${name}`)), numberCells(pair(before[name], after[name])));
  const sides = ["before", "after"].map((side) => h("th", { scope: "col", class: "num" }, t(side)));
  const head = h("thead", {}, h("tr", {}, h("td"), sides));
  const lines = h("tbody", {}, ["reward", "clipped", "objective"].map(line));
  return h("table", { class: "totals" }, head, lines);
}
