// What if beta were twice as large? Sliders and choices; the server computes the row again with
// the functions that trained it, and both answers stand side by side. Which settings there are,
// and within which bounds, the server says: each is a field of the config.

import { Refused, exported, get } from "./api.js";
import { button, debounce, h, labelled, select } from "./dom.js";
import { currentPlace, noteChoice } from "./place.js";
import { fullValue, number, visibleToken } from "./text.js";
import { t } from "./words.js";

const NONE = "none"; // no such bound

export function whatIfPanel(path, row) {
  if (exported()) return { element: closed(t("whatif_export")), start() {} };
  const panel = new WhatIf(path, row);
  return { element: panel.element, start: () => panel.begin() };
}

function closed(sentence) {
  return h("section", { class: "card" }, h("h2", {}, t("whatif")), h("p", { class: "muted" }, sentence));
}

class WhatIf {
  constructor(path, row) {
    Object.assign(this, { path, row, asked: 0, changed: new Map(), settings: [] });
    this.later = debounce(150, () => this.ask());
    this.controls = h("div", { class: "controls" });
    this.said = h("p", { class: "muted", role: "status" });
    this.totals = h("div");
    this.cells = h("div", { class: "scroll tall", tabindex: "0", role: "region", "aria-label": t("whatif") });
    this.element = h(
      "section",
      { class: "card whatif" },
      h("h2", {}, t("whatif")),
      h("p", { class: "muted" }, t("whatif_help")),
      this.controls,
      h("p", {}, button(t("reset"), () => this.reset())),
      this.said,
      this.totals,
      this.cells,
    );
  }

  // They come with the row: a controller may have moved the run's own from iteration to iteration.
  async begin() {
    try {
      this.settings = (await get(`${this.path}/whatif`)).controls;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.said.textContent = error.message;
      return;
    }
    for (const { name } of this.settings) {
      const value = currentPlace().choices.get(name);
      if (value !== null) this.changed.set(name, value);
    }
    this.build();
    await this.ask();
  }

  build() {
    this.controls.replaceChildren(...this.settings.map((setting) => this.field(setting)));
  }

  at({ name, value }) {
    return this.changed.get(name) ?? value;
  }

  field(setting) {
    const field = setting.options
      ? this.choice(setting)
      : setting.optional
        ? this.switched(setting)
        : this.slider(setting);
    field.title = setting.doc;
    return field;
  }

  choice(setting) {
    const options = setting.options.map((option) => [option, option]);
    const change = (value) => this.set(setting, value);
    return labelled(setting.name, select(options, String(this.at(setting)), change));
  }

  slider(setting) {
    const { name, low, high, step } = setting;
    const at = this.at(setting) ?? "";
    const follow = (from, to) => () => {
      to.value = from.value;
      this.set(setting, from.value);
    };
    const exact = h("input", { type: "number", step: "any", class: "short", value: at });
    const range = h("input", { type: "range", min: low, max: high, step, "aria-label": name });
    range.value = at;
    range.addEventListener("input", follow(range, exact));
    exact.addEventListener("input", follow(exact, range));
    const field = labelled(name, exact);
    field.classList.add("slider");
    field.append(range);
    return field;
  }

  // A bound that may be absent: a box to tick, and its number.
  switched(setting) {
    const at = this.at(setting);
    const on = at !== null && at !== NONE;
    const box = h("input", { type: "checkbox", "aria-label": t("use", { name: setting.name }) });
    box.checked = on;
    const value = on ? at : setting.usual;
    const exact = h("input", { type: "number", step: "any", class: "short", value });
    const follow = () => this.set(setting, box.checked ? exact.value : NONE);
    box.addEventListener("change", follow);
    exact.addEventListener("input", () => box.checked && follow());
    const field = labelled(setting.name, exact);
    field.append(h("span", { class: "field" }, box, exact));
    return field;
  }

  set({ name, value: own }, value) {
    if (value === "" || value === String(own ?? NONE)) this.changed.delete(name);
    else this.changed.set(name, value);
    noteChoice(name, this.changed.get(name));
    this.later();
  }

  reset() {
    this.changed.clear();
    for (const { name } of this.settings) noteChoice(name, null);
    this.build();
    this.ask();
  }

  // Answers may overtake one another; only the one to the last question is shown.
  async ask() {
    const question = ++this.asked;
    const query = new URLSearchParams([...this.changed]).toString();
    try {
      const answer = await get(`${this.path}/whatif${query ? `?${query}` : ""}`);
      if (question === this.asked) this.show(answer);
    } catch (error) {
      const sentence = error instanceof Refused ? error.message : t("gone");
      if (question === this.asked) this.said.textContent = sentence;
    }
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
    this.said.textContent = [own, answer.note, ...answer.problems].filter(Boolean).join(" ");
    this.totals.replaceChildren(totalsTable(totals));
    const head = heads([...names, "clip"]);
    this.cells.replaceChildren(h("table", { class: "numbers" }, head, h("tbody", {}, lines)));
  }
}

function pair(before, after) {
  return { before: before ?? null, after: after ?? null, differs: (before ?? null) !== (after ?? null) };
}

function numberCells({ before, after, differs }) {
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
