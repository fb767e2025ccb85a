// The rows of one iteration as a table: sort by any column, filter by any, open one.

import { button, h, link } from "./dom.js";
import { rowColumns } from "./columns.js";
import { csvButton } from "./download.js";
import { Filters, plain } from "./filters.js";
import { fullValue, number, visible } from "./text.js";
import { t } from "./words.js";

const PAGE = 200; // rows in the document at a time, so that thousands stay quick
const CELL_CHARACTERS = 160;

export function rowTable({ id, iteration, rows }) {
  const table = new RowTable(id, iteration, rows);
  return { element: table.element, keys: table.keys };
}

class RowTable {
  constructor(id, iteration, rows) {
    Object.assign(this, { id, iteration, rows, order: "row", falling: false, first: 0 });
    this.columns = rowColumns(rows);
    this.filters = new Filters(this.columns, () => this.filter());
    this.head = h("thead");
    this.body = h("tbody", { on: { keydown: (event) => this.move(event) } });
    this.count = h("span", { class: "muted", role: "status" });
    this.turns = h("span");
    this.keys = [
      ["/", t("key_find"), () => this.filters.text.focus()],
      ["j", t("key_row_down"), () => this.focusRow(1)],
      ["k", t("key_row_up"), () => this.focusRow(-1)],
    ];
    const csv = csvButton(`${id}-iteration-${iteration}`, () => this.cells());
    this.element = h(
      "div",
      {},
      h("div", { class: "bar" }, this.filters.element, this.count, this.turns, csv, this.chooser()),
      h(
        "div",
        { class: "scroll tall", tabindex: "0", role: "region", "aria-label": t("look") },
        h("table", { class: "rows" }, this.head, this.body),
      ),
    );
    this.filter();
  }

  // Which columns are in the table; those of the data may be many.
  chooser() {
    const boxes = this.columns.map((column) => {
      const box = h("input", { type: "checkbox", on: { change: () => this.toggle(column, box.checked) } });
      box.checked = column.shown;
      return h("label", { class: "model-text" }, box, ` ${visible(column.words)}`);
    });
    return h("details", { class: "chooser" }, h("summary", {}, t("columns")), h("div", { class: "card" }, boxes));
  }

  toggle(column, on) {
    column.shown = on;
    this.show();
  }

  get shown() {
    return this.columns.filter(({ shown }) => shown);
  }

  filter() {
    this.found = this.filters.apply(this.rows);
    this.sort();
  }

  sort() {
    const { of } = this.columns.find(({ name }) => name === this.order);
    this.found.sort((a, b) => compare(of(a), of(b), this.falling) || a.row - b.row);
    this.first = 0;
    this.show();
  }

  by(column) {
    this.falling = this.order === column.name ? !this.falling : column.isNumber && column.name !== "row";
    this.order = column.name;
    this.sort();
    this.head.querySelector("[aria-sort] button").focus();
  }

  show() {
    const last = Math.min(this.first + PAGE, this.found.length);
    this.head.replaceChildren(h("tr", {}, this.shown.map((column) => this.heading(column))));
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
    const { name, words, isNumber } = column;
    const sorted = name === this.order;
    const arrow = sorted ? (this.falling ? " ▾" : " ▴") : "";
    const direction = sorted ? (this.falling ? "descending" : "ascending") : null;
    const title = name === "kl" ? t("kl_help") : t("sort_by", { name: words });
    return h(
      "th",
      { scope: "col", "aria-sort": direction, class: isNumber ? "num" : null },
      button(visible(words) + arrow, () => this.by(column), { title }),
    );
  }

  line(row) {
    const href = link("run", this.id, "iteration", this.iteration, "row", row.row);
    const cells = this.shown.map(({ name, isNumber, of }) => {
      const value = of(row);
      if (name === "row") return h("td", { class: "num" }, h("a", { href }, String(value)));
      if (isNumber) return h("td", { class: "num", title: fullValue(value) }, number(value));
      return h("td", { class: `model-text ${name.split(".")[0]}` }, visible(clipped(plain(value))));
    });
    // The whole line opens the row, unless text in it is being marked.
    const open = (event) => {
      if (!event.target.closest("a") && getSelection().isCollapsed) location.hash = href;
    };
    return h("tr", { class: row.usable === false ? "open unusable" : "open", on: { click: open } }, cells);
  }

  move(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    this.focusRow(by);
  }

  focusRow(by) {
    const links = [...this.body.querySelectorAll("a")];
    const at = links.indexOf(document.activeElement);
    links[Math.min(Math.max(at + by, 0), links.length - 1)]?.focus();
  }

  cells() {
    const heads = this.columns.map(({ words }) => words);
    return [heads, ...this.found.map((row) => this.columns.map(({ of }) => of(row)))];
  }
}

function clipped(text) {
  return text.length > CELL_CHARACTERS ? `${text.slice(0, CELL_CHARACTERS)} …` : text;
}

// Missing values come last, whichever way the others run.
export function compare(a, b, falling) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return (a < b ? -1 : 1) * (falling ? -1 : 1);
}
