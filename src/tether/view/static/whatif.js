// What if beta were twice as large? Sliders and choices; the server computes the row again with
// the functions that trained it, and both answers stand side by side.

import { Refused, exported, get } from "./api.js";
import { button, debounce, h, labelled, select } from "./dom.js";
import { currentPlace, noteChoice } from "./place.js";
import { fullValue, number, visibleToken } from "./text.js";
import { t } from "./words.js";

// How far a slider reaches; the number beside it may go further.
const SLIDERS = {
  beta: { min: 0, max: (own) => Math.max(0.2, 5 * own), step: 0.001 },
  gamma: { min: 0, max: () => 1, step: 0.01 },
  lam: { min: 0, max: () => 1, step: 0.01 },
  eps_low: { min: 0.01, max: () => 1, step: 0.01 },
  eps_high: { min: 0.01, max: () => 1, step: 0.01 },
};
const CHOICES = { estimator: "estimators", kl_estimator: "kl_estimators" };
const SETTINGS = ["beta", "kl_estimator", "gamma", "lam", "estimator", "eps_low", "eps_high", "dual_clip"];
const USUAL_DUAL_CLIP = 3;

export function whatIfPanel(path, row, allowed) {
  if (exported()) return { element: closed(t("whatif_export")), start() {} };
  const panel = new WhatIf(path, row, allowed);
  return { element: panel.element, start: () => panel.begin() };
}

function closed(sentence) {
  return h("section", { class: "card" }, h("h2", {}, t("whatif")), h("p", { class: "muted" }, sentence));
}

class WhatIf {
  constructor(path, row, allowed) {
    Object.assign(this, { path, row, allowed, asked: 0, changed: new Map(), own: {} });
    for (const name of SETTINGS) {
      const value = currentPlace().choices.get(name);
      if (value !== null) this.changed.set(name, value);
    }
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

  // The run's own settings come from the server: beta may have been steered from row to row.
  async begin() {
    try {
      this.own = (await get(`${this.path}/whatif`)).settings;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.said.textContent = error.message;
      return;
    }
    this.build();
    await this.ask();
  }

  build() {
    const fields = SETTINGS.filter((name) => name in this.own).map((name) => this.field(name));
    this.controls.replaceChildren(...fields);
  }

  value(name) {
    return this.changed.get(name) ?? this.own[name];
  }

  field(name) {
    if (name in CHOICES) {
      const options = this.allowed[CHOICES[name]].map((choice) => [choice, choice]);
      return labelled(t(name), select(options, this.value(name), (value) => this.set(name, value)));
    }
    return name === "dual_clip" ? this.dualClip() : this.slider(name);
  }

  slider(name) {
    const { min, max, step } = SLIDERS[name];
    const at = this.value(name) ?? "";
    const follow = (from, to) => () => {
      to.value = from.value;
      this.set(name, from.value);
    };
    const exact = h("input", { type: "number", min, step: "any", class: "short", value: at });
    const reach = max(Number(this.own[name]) || 0);
    const range = h("input", { type: "range", min, max: reach, step, "aria-label": t(name) });
    range.value = at;
    range.addEventListener("input", follow(range, exact));
    exact.addEventListener("input", follow(exact, range));
    const field = labelled(t(name), exact);
    field.classList.add("slider");
    field.append(range);
    return field;
  }

  dualClip() {
    const at = this.value("dual_clip");
    const on = at !== null && at !== undefined && at !== "none";
    const box = h("input", { type: "checkbox", "aria-label": t("dual_clip_on") });
    box.checked = on;
    const value = on ? at : USUAL_DUAL_CLIP;
    const exact = h("input", { type: "number", min: 1, step: "any", class: "short", value });
    const follow = () => this.set("dual_clip", box.checked ? exact.value : "none");
    box.addEventListener("change", follow);
    exact.addEventListener("input", () => box.checked && follow());
    const field = labelled(t("dual_clip"), exact);
    field.append(h("span", { class: "field" }, box, exact));
    return field;
  }

  set(name, value) {
    if (value === "" || value === String(this.own[name] ?? "none")) this.changed.delete(name);
    else this.changed.set(name, value);
    noteChoice(name, this.changed.get(name));
    this.later();
  }

  reset() {
    this.changed.clear();
    for (const name of SETTINGS) noteChoice(name, null);
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
