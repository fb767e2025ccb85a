// All samples of one prompt side by side, with their scores and advantages: what a group's
// baseline is made of.

import { button, h, labelled, link, select } from "./dom.js";
import { csvButton } from "./download.js";
import { plain } from "./filters.js";
import { compare } from "./rows.js";
import { meanOf } from "./smooth.js";
import { fullValue, number, visible, visibleLines } from "./text.js";
import { t } from "./words.js";

const PAGE = 20;
const TEXT_CHARACTERS = 1200;

export function groupList({ id, iteration, about, rows }) {
  const list = new Groups(id, iteration, about.samples, rows);
  return { element: list.element };
}

class Groups {
  constructor(id, iteration, samples, rows) {
    Object.assign(this, { id, iteration, first: 0, order: "group" });
    this.groups = grouped(rows, samples);
    this.reach = Math.max(...rows.map((row) => Math.abs(row.advantage ?? 0)), 0);
    this.body = h("div", { class: "groups" });
    this.turns = h("span");
    const options = ["group", "spread", "mean"].map((name) => [name, t(`group_by_${name}`)]);
    const sorter = select(options, this.order, (name) => {
      Object.assign(this, { order: name, first: 0 });
      this.show();
    });
    this.element = h(
      "div",
      {},
      h("p", { class: "muted" }, samples > 1 ? t("groups_help", { n: samples }) : t("groups_single")),
      h(
        "div",
        { class: "bar" },
        labelled(t("sort"), sorter),
        this.turns,
        csvButton(`${id}-groups-${iteration}`, () => this.cells()),
      ),
      this.body,
    );
    this.show();
  }

  sorted() {
    if (this.order === "group") return this.groups;
    return [...this.groups].sort((a, b) => compare(a[this.order], b[this.order], this.order === "spread"));
  }

  show() {
    const last = Math.min(this.first + PAGE, this.groups.length);
    this.body.replaceChildren(...this.sorted().slice(this.first, last).map((group) => this.card(group)));
    const turn = (by) => () => {
      this.first += by;
      this.show();
    };
    this.turns.replaceChildren(
      h("span", { class: "muted" }, t("groups_shown", { from: this.first + 1, to: last, total: this.groups.length })),
      this.first > 0 ? button(t("previous"), turn(-PAGE)) : "",
      last < this.groups.length ? button(t("next"), turn(PAGE)) : "",
    );
  }

  card({ number: at, rows, mean, spread }) {
    const [{ prompt, columns, data_line: line, data_file: file }] = rows;
    const fact = (words, value) => h("span", {}, `${words} `, h("b", { class: "num", title: fullValue(value) }, number(value)));
    const history = typeof line === "number" ? h("a", { href: promptAddress(this.id, file, line) }, t("over_time")) : null;
    return h(
      "section",
      { class: "card group" },
      h("h2", {}, t("group_n", { n: at })),
      h("p", { class: "model-text said" }, visibleLines(cut(prompt))),
      dataFacts(columns),
      h(
        "p",
        { class: "facts" },
        fact(t("mean"), mean),
        fact(t("spread"), spread),
        spread === 0 ? h("span", { class: "warn" }, t("no_spread")) : null,
        history,
      ),
      h("div", { class: "samples" }, rows.map((row) => this.sample(row))),
    );
  }

  sample(row) {
    const href = link("run", this.id, "iteration", this.iteration, "row", row.row);
    const share = this.reach ? (100 * Math.abs(row.advantage ?? 0)) / this.reach : 0;
    const bar = h("span", { class: row.advantage < 0 ? "amount below" : "amount above", "aria-hidden": "true" });
    bar.style.setProperty("--share", `${share.toFixed(1)}%`);
    return h(
      "article",
      { class: "sample" },
      h("p", { class: "facts" }, h("a", { href }, t("row_n", { n: row.row })), h("span", {}, `${t("score")} `, h("b", { class: "num" }, number(row.score)))),
      h("p", { class: "model-text said" }, visibleLines(cut(row.response))),
      h("p", { class: "facts" }, `${t("advantage")} `, h("b", { class: "num", title: fullValue(row.advantage) }, number(row.advantage))),
      bar,
    );
  }

  cells() {
    const rows = this.sorted().flatMap(({ number: at, rows: own }) =>
      own.map((row) => [at, row.row, row.prompt, row.response, row.score, row.advantage]),
    );
    return [["group", "row", "prompt", "response", "score", "advantage"], ...rows];
  }
}

function grouped(rows, samples) {
  const groups = new Map();
  for (const row of rows) {
    const at = Math.floor(row.row / samples);
    if (!groups.has(at)) groups.set(at, []);
    groups.get(at).push(row);
  }
  return [...groups].map(([at, own]) => {
    const scores = own.map((row) => row.score).filter((score) => typeof score === "number");
    const mean = meanOf(scores);
    const spread = scores.length > 1 ? Math.sqrt(meanOf(scores.map((x) => (x - mean) ** 2))) : null;
    return { number: at, rows: own, mean, spread };
  });
}

function cut(text) {
  const whole = String(text ?? "");
  return whole.length > TEXT_CHARACTERS ? `${whole.slice(0, TEXT_CHARACTERS)} …` : whole;
}

// The columns of a row of data, each with its name.
export function dataFacts(columns) {
  const entries = Object.entries(columns ?? {});
  if (!entries.length) return null;
  const item = ([name, value]) => [h("dt", { class: "model-text" }, visible(name)), h("dd", { class: "model-text" }, visibleLines(plain(value)))];
  return h("dl", { class: "data" }, entries.flatMap(item));
}

export function promptAddress(id, file, line) {
  const query = new URLSearchParams(typeof file === "string" ? { file } : {}).toString();
  return link("run", id, "prompt", line) + (query ? `?${query}` : "");
}
