// Search and filter by any column: a text over all of them, and conditions on single ones.

import { button, debounce, h, labelled, select } from "./dom.js";
import { currentPlace, noteChoice } from "./place.js";
import { t } from "./words.js";

// A column: {name, words, isNumber, of: row => value}.
export class Filters {
  constructor(columns, onChange) {
    this.columns = columns;
    this.conditions = [];
    this.later = debounce(120, () => {
      this.note();
      onChange();
    });
    this.text = h("input", { type: "search", on: { input: this.later } });
    this.list = h("span", { class: "conditions" });
    this.adder = h("span");
    this.element = h("span", { class: "filters" }, labelled(t("filter_text"), this.text), this.list, this.adder);
    this.restore();
    this.build();
  }

  restore() {
    const { choices } = currentPlace();
    this.text.value = choices.get("text") ?? "";
    for (const part of choices.getAll("where")) {
      const [name, low, high, text] = part.split("|");
      if (this.column(name)) this.conditions.push({ name, low, high, text });
    }
    if (!this.conditions.length && this.column("score")) this.conditions.push({ name: "score" });
  }

  note() {
    noteChoice("text", this.text.value);
    const given = this.conditions.filter(({ low, high, text }) => low || high || text);
    noteChoice("where", given.map(({ name, low, high, text }) => [name, low, high, text].map((x) => x ?? "").join("|")));
  }

  column(name) {
    return this.columns.find((column) => column.name === name);
  }

  build() {
    this.list.replaceChildren(...this.conditions.map((condition) => this.field(condition)));
    const free = this.columns.filter(({ name }) => !this.conditions.some((one) => one.name === name));
    const options = [["", t("add_filter")], ...free.map(({ name, words }) => [name, words])];
    const add = (name) => {
      if (!name) return;
      this.conditions.push({ name });
      this.build();
      this.list.lastElementChild.querySelector("input").focus();
    };
    const control = select(options, "", add);
    control.setAttribute("aria-label", t("add_filter"));
    this.adder.replaceChildren(control);
  }

  field(condition) {
    const { words, isNumber } = this.column(condition.name);
    const input = (part, attributes) => {
      const control = h("input", { ...attributes, value: condition[part] ?? "" });
      control.addEventListener("input", () => {
        condition[part] = control.value;
        this.later();
      });
      return control;
    };
    const drop = () => {
      this.conditions = this.conditions.filter((other) => other !== condition);
      this.build();
      this.later();
    };
    const short = { type: "number", step: "any", class: "short" };
    const controls = isNumber
      ? [labelled(t("column_from", { name: words }), input("low", short)), labelled(t("score_to"), input("high", short))]
      : [labelled(t("column_contains", { name: words }), input("text", { type: "search" }))];
    return h("span", { class: "field" }, controls, button("×", drop, { class: "quiet", "aria-label": t("remove") }));
  }

  // The rows that fulfil every condition.
  apply(rows) {
    const sought = this.text.value.toLowerCase();
    const tests = this.conditions.map((condition) => testOf(condition, this.column(condition.name))).filter(Boolean);
    const anywhere = (row) => this.columns.some(({ isNumber, of }) => !isNumber && textOf(of(row)).includes(sought));
    return rows.filter((row) => tests.every((test) => test(row)) && (!sought || anywhere(row)));
  }
}

function testOf({ low, high, text }, { isNumber, of }) {
  if (isNumber && (low || high)) {
    const [from, to] = [low ? Number(low) : -Infinity, high ? Number(high) : Infinity];
    return (row) => typeof of(row) === "number" && of(row) >= from && of(row) <= to;
  }
  return !isNumber && text ? (row) => textOf(of(row)).includes(text.toLowerCase()) : null;
}

function textOf(value) {
  return plain(value).toLowerCase();
}

// A value of a data file in one line: it may be a list or a mapping.
export function plain(value) {
  if (value === null || value === undefined) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
