// The rows of one iteration: sort by any column, filter by text and score, open one.

import { get, runPath } from "./api.js";
import { button, debounce, h, labelled, link } from "./dom.js";
import { runTabs } from "./run.js";
import { fullValue, number, visible } from "./text.js";
import { t } from "./words.js";

const NUMBERS = ["score", "kl", "reward", "advantage", "length"];
const COLUMNS = ["row", "prompt", "response", ...NUMBERS, "finish_reason"];
const TEXTS = new Set(["prompt", "response", "finish_reason"]);
const PAGE = 200; // rows in the document at a time, so that thousands stay quick
const CELL_CHARACTERS = 160;

export async function iterationView(page, id, which) {
  const about = await get(runPath(id));
  const iterations = about.rollouts;
  if (!iterations.length) {
    page.problems(about.problems);
    const note = h("p", { class: "muted" }, t("no_rollouts"));
    return { element: h("div", {}, runTabs(id, "look"), h("h1", {}, t("look")), note) };
  }
  const iteration = which === "last" ? iterations.at(-1) : Number(which);
  const answer = await get(runPath(id, "rollouts", iteration));
  page.problems([...about.problems, ...answer.problems]);
  const rows = new RowTable(id, iteration, answer.rows);
  return {
    element: h(
      "div",
      {},
      runTabs(id, "look"),
      h("h1", {}, t("iteration_n", { n: iteration })),
      picker(id, iteration, iterations),
      rows.element,
    ),
  };
}

function picker(id, iteration, iterations) {
  const at = iterations.indexOf(iteration);
  const go = (index) => {
    location.hash = link("run", id, "iteration", iterations[index]);
  };
  const slider = h("input", {
    type: "range",
    min: 0,
    max: iterations.length - 1,
    value: at,
    "aria-label": t("iteration"),
    "aria-valuetext": String(iteration),
    on: {
      input: () => (exact.value = iterations[slider.value]),
      change: () => go(slider.value),
    },
  });
  const exact = h("input", {
    type: "number",
    min: 0,
    value: iteration,
    on: { change: () => go(nearest(iterations, Number(exact.value))) },
  });
  return h(
    "div",
    { class: "bar" },
    button(t("previous"), () => go(at - 1), { disabled: at <= 0 }),
    slider,
    button(t("next"), () => go(at + 1), { disabled: at >= iterations.length - 1 }),
    labelled(t("iteration"), exact),
  );
}

function nearest(iterations, wanted) {
  const distance = (i) => Math.abs(iterations[i] - wanted);
  return iterations.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
}

class RowTable {
  constructor(id, iteration, rows) {
    Object.assign(this, { id, iteration, rows, order: "row", falling: false, first: 0 });
    const later = debounce(120, () => this.filter());
    const input = (attributes) => h("input", { ...attributes, on: { input: later } });
    this.text = input({ type: "search" });
    this.low = input({ type: "number", step: "any", class: "short" });
    this.high = input({ type: "number", step: "any", class: "short" });
    this.head = h("thead");
    this.body = h("tbody");
    this.count = h("span", { class: "muted", role: "status" });
    this.turns = h("span");
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "bar" },
        labelled(t("filter_text"), this.text),
        labelled(t("score_from"), this.low),
        labelled(t("score_to"), this.high),
        this.count,
        this.turns,
      ),
      h(
        "div",
        { class: "scroll tall", tabindex: "0", role: "region", "aria-label": t("look") },
        h("table", { class: "rows" }, this.head, this.body),
      ),
    );
    this.filter();
  }

  filter() {
    const sought = this.text.value.toLowerCase();
    const [low, high] = [bound(this.low, -Infinity), bound(this.high, Infinity)];
    const anyScore = low === -Infinity && high === Infinity;
    this.found = this.rows.filter(
      (row) =>
        (anyScore || (row.score !== null && row.score >= low && row.score <= high)) &&
        [row.prompt, row.response].some((text) => String(text ?? "").toLowerCase().includes(sought)),
    );
    this.sort();
  }

  sort() {
    this.found.sort((a, b) => compare(a[this.order], b[this.order], this.falling) || a.row - b.row);
    this.first = 0;
    this.show();
  }

  by(column) {
    this.falling = this.order === column ? !this.falling : !TEXTS.has(column) && column !== "row";
    this.order = column;
    this.sort();
    this.head.querySelector("[aria-sort] button").focus();
  }

  show() {
    const last = Math.min(this.first + PAGE, this.found.length);
    this.head.replaceChildren(h("tr", {}, COLUMNS.map((column) => this.heading(column))));
    this.body.replaceChildren(...this.found.slice(this.first, last).map((row) => this.line(row)));
    this.count.textContent = this.found.length
      ? t("rows_shown", { from: this.first + 1, to: last, total: this.found.length })
      : t("no_match");
    const turn = (by) => () => {
      this.first += by;
      this.show();
    };
    this.turns.replaceChildren(
      this.first > 0 ? button(t("previous"), turn(-PAGE)) : "",
      last < this.found.length ? button(t("next"), turn(PAGE)) : "",
    );
  }

  heading(column) {
    const sorted = column === this.order;
    const arrow = sorted ? (this.falling ? " ▾" : " ▴") : "";
    const direction = sorted ? (this.falling ? "descending" : "ascending") : null;
    const label = t("sort_by", { name: t(column) });
    const title = column === "kl" ? t("kl_help") : label;
    return h(
      "th",
      { scope: "col", "aria-sort": direction, class: TEXTS.has(column) ? null : "num" },
      button(t(column) + arrow, () => this.by(column), { title }),
    );
  }

  line(row) {
    const href = link("run", this.id, "iteration", this.iteration, "row", row.row);
    const cells = COLUMNS.map((column) => {
      const value = row[column];
      if (column === "row") return h("td", { class: "num" }, h("a", { href }, String(value)));
      if (TEXTS.has(column)) return h("td", { class: `model-text ${column}` }, visible(clipped(value)));
      return h("td", { class: "num", title: fullValue(value) }, number(value));
    });
    return h("tr", { class: row.usable === false ? "unusable" : null }, cells);
  }
}

function bound(input, otherwise) {
  return input.value === "" ? otherwise : Number(input.value);
}

function clipped(text) {
  const whole = String(text ?? "");
  return whole.length > CELL_CHARACTERS ? `${whole.slice(0, CELL_CHARACTERS)} …` : whole;
}

// Missing values come last, whichever way the others run.
function compare(a, b, falling) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return (a < b ? -1 : 1) * (falling ? -1 : 1);
}
