// Every run as a line of a table: sorted by any column, filtered, seeds folded into their mean.

import { get } from "./api.js";
import { button, debounce, h, labelled, link } from "./dom.js";
import { csvButton } from "./download.js";
import { currentPlace, noteChoice } from "./place.js";
import { compare } from "./rows.js";
import { meanOf } from "./smooth.js";
import { fullValue, number, visible } from "./text.js";
import { t } from "./words.js";

// name, heading, whether it is a number, value of a run
const METRICS = ["score/mean", "kl/sequence_mean", "actor/entropy", "response/length_mean"];
const COLUMNS = [
  ["id", "run", false, (run) => run.id],
  ["state", "state", false, (run) => t(run.state)],
  ["reason", "reason", false, (run) => run.reason ?? run.problem ?? ""],
  ["stage", "stage", false, (run) => run.stage],
  ["seed", "seed", true, (run) => run.seed],
  ["iterations", "iteration", true, (run) => run.iterations],
  ["heldout", "heldout", true, (run) => run.heldout],
  ...METRICS.map((name) => [name, name, true, (run) => run.last?.[name] ?? null]),
  ["modified", "modified", true, (run) => run.modified],
];

export function tableView(page) {
  return new RunTable(page);
}

class RunTable {
  constructor(page) {
    Object.assign(this, { page, runs: [], order: "modified", falling: true, ticked: new Set() });
    this.open = new Set(); // folded lines whose seeds are shown
    const { choices } = currentPlace();
    this.text = h("input", { type: "search", on: { input: debounce(120, () => this.find()) } });
    this.text.value = choices.get("find") ?? "";
    this.folding = h("input", { type: "checkbox", on: { change: () => this.show() } });
    this.folding.checked = choices.get("seeds") !== "apart";
    this.head = h("thead");
    this.body = h("tbody");
    this.chosen = h("span", { class: "field" });
    this.keys = [["/", t("key_find"), () => this.text.focus()]];
    this.element = h(
      "div",
      {},
      h("h1", {}, t("table_of_runs")),
      h(
        "div",
        { class: "bar" },
        labelled(t("find_run"), this.text),
        labelled(t("fold_seeds"), this.folding),
        csvButton("runs", () => this.cells()),
        this.chosen,
      ),
      h(
        "div",
        { class: "scroll tall", tabindex: "0", role: "region", "aria-label": t("table_of_runs") },
        h("table", { class: "run-table" }, this.head, this.body),
      ),
    );
  }

  start() {
    return this.tick();
  }

  async tick() {
    const answer = await get("/api/runs");
    const state = JSON.stringify(answer.runs);
    this.page.problems(answer.problems);
    if (state === this.seen) return;
    this.seen = state;
    this.runs = answer.runs;
    this.show();
  }

  find() {
    noteChoice("find", this.text.value);
    this.show();
  }

  // Every line: {runs, key}; several runs where seeds are folded.
  lines() {
    const sought = this.text.value.toLowerCase();
    const matches = (run) => COLUMNS.some(([, , , of]) => String(of(run) ?? "").toLowerCase().includes(sought));
    const lines = new Map();
    for (const run of this.runs.filter(matches)) {
      const key = this.folding.checked ? run.twins : run.id;
      if (!lines.has(key)) lines.set(key, { key, runs: [] });
      lines.get(key).runs.push(run);
    }
    const [, , , of] = COLUMNS.find(([name]) => name === this.order);
    const value = ({ runs }) => (runs.length > 1 && typeof of(runs[0]) === "number" ? meanOf(runs.map(of)) : of(runs[0]));
    return [...lines.values()].sort((a, b) => compare(value(a), value(b), this.falling));
  }

  show() {
    noteChoice("seeds", this.folding.checked ? null : "apart");
    const focused = document.activeElement?.dataset?.key;
    const headings = COLUMNS.map(([name, words, isNumber]) => this.heading(name, words, isNumber));
    this.head.replaceChildren(h("tr", {}, h("th", { scope: "col" }, ""), headings));
    this.body.replaceChildren(...this.lines().flatMap((line) => this.rows(line)));
    if (!this.runs.length) this.body.replaceChildren(h("tr", {}, h("td", { colspan: COLUMNS.length + 1 }, t("no_runs"))));
    if (focused) [...this.element.querySelectorAll("[data-key]")].find((e) => e.dataset.key === focused)?.focus();
    this.offer();
  }

  heading(name, words, isNumber) {
    const sorted = name === this.order;
    const arrow = sorted ? (this.falling ? " ▾" : " ▴") : "";
    const by = () => {
      this.falling = sorted ? !this.falling : isNumber;
      this.order = name;
      this.show();
    };
    const direction = sorted ? (this.falling ? "descending" : "ascending") : null;
    const control = button(t(words) + arrow, by, { title: t("sort_by", { name: t(words) }), "data-key": `sort ${name}` });
    return h("th", { scope: "col", "aria-sort": direction, class: isNumber ? "num" : null }, control);
  }

  rows({ key, runs }) {
    if (runs.length === 1) return [this.row(runs[0])];
    const open = this.open.has(key);
    const toggle = () => {
      if (open) this.open.delete(key);
      else this.open.add(key);
      this.show();
    };
    const control = button(`${open ? "▾" : "▸"} ${t("seeds_n", { n: runs.length })}`, toggle, {
      class: "quiet",
      "aria-expanded": String(open),
      "data-key": `fold ${key}`,
    });
    const cells = COLUMNS.map(([name, , isNumber, of]) => {
      if (name === "id") return h("td", { class: "model-text" }, visible(shared(runs)), " ", control);
      const values = runs.map(of);
      if (name === "modified") return h("td", { class: "num" }, when(Math.max(...values)));
      if (isNumber) return bandCell(name === "seed" ? [] : values);
      const words = [...new Set(values)].join(", ");
      return h("td", { class: "model-text" }, visible(words));
    });
    const boxes = h("td", {}, this.box(runs.map((run) => run.id), `box ${key}`, shared(runs)));
    return [h("tr", { class: "folded" }, boxes, cells), ...(open ? runs.map((run) => this.row(run, "seed-row")) : [])];
  }

  row(run, kind = null) {
    const cells = COLUMNS.map(([name, , isNumber, of]) => {
      const value = of(run);
      if (name === "id") return h("td", {}, h("a", { href: link("run", run.id), class: "model-text" }, run.id));
      if (name === "state") return h("td", {}, h("span", { class: `state ${run.state}` }, value));
      if (name === "modified") return h("td", { class: "num", title: fullValue(value) }, when(value));
      if (isNumber) return h("td", { class: "num", title: fullValue(value) }, number(value));
      return h("td", { class: "model-text" }, visible(value));
    });
    return h("tr", { class: kind }, h("td", {}, this.box([run.id], `box ${run.id}`, run.id)), cells);
  }

  box(ids, key, name) {
    const box = h("input", { type: "checkbox", "data-key": key, "aria-label": t("choose_for_diff", { run: name }) });
    box.checked = ids.every((id) => this.ticked.has(id));
    box.addEventListener("change", () => {
      for (const id of ids) {
        if (box.checked) this.ticked.add(id);
        else this.ticked.delete(id);
      }
      this.show();
    });
    return box;
  }

  offer() {
    const ids = [...this.ticked];
    const parts = [];
    if (ids.length) parts.push(h("a", { href: `#/?runs=${ids.map((id) => encodeURIComponent(encodeURIComponent(id))).join("/")}` }, t("draw_chosen")));
    if (ids.length === 2) parts.push(h("a", { href: link("diff", ...ids) }, t("diff_chosen")));
    else parts.push(h("span", { class: "muted" }, t("diff_hint")));
    this.chosen.replaceChildren(...parts);
  }

  cells() {
    const runs = this.lines().flatMap((line) => line.runs);
    return [COLUMNS.map(([name]) => name), ...runs.map((run) => COLUMNS.map(([, , , of]) => of(run)))];
  }
}

function bandCell(values) {
  const known = values.filter((value) => typeof value === "number");
  if (!known.length) return h("td", { class: "num" }, number(null));
  const [mean, low, high] = [meanOf(known), Math.min(...known), Math.max(...known)];
  const spread = low === high ? "" : ` (${number(low)} – ${number(high)})`;
  return h("td", { class: "num", title: fullValue(mean) }, number(mean), h("span", { class: "muted" }, spread));
}

// What the names begin with: run-001 and run-002 are "run-00".
function shared(runs) {
  const [first, ...others] = runs.map((run) => run.id);
  let length = first.length;
  for (const other of others) while (!other.startsWith(first.slice(0, length))) length -= 1;
  return length ? `${first.slice(0, length)}…` : first;
}

function when(seconds) {
  return seconds ? new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") : "–";
}
