// Held-out responses before and after: which prompts got better, which worse, and how.

import { get, runPath } from "./api.js";
import { button, debounce, h, labelled, link, scrollTable, select } from "./dom.js";
import { differenceText } from "./diff.js";
import { csvButton } from "./download.js";
import { plain } from "./filters.js";
import { currentPlace, noteChoice } from "./place.js";
import { compare } from "./rows.js";
import { runTabs } from "./run.js";
import { fullValue, number, visible, visibleLines } from "./text.js";
import { t } from "./words.js";

const PAGE = 100;
const KINDS = ["all", "better", "worse", "same"];

export async function heldoutView(page, id) {
  const about = await get(runPath(id));
  const head = [runTabs(id, "heldout_tab"), h("h1", {}, t("heldout_title"))];
  if (!about.heldout.length) {
    page.problems(about.problems);
    return { element: h("div", {}, head, h("p", { class: "muted" }, t("no_heldout"))) };
  }
  const view = new Heldout(page, id, about.heldout, about.problems);
  return { element: h("div", {}, head, view.element), start: () => view.load(), keys: view.keys };
}

class Heldout {
  constructor(page, id, iterations, problems) {
    Object.assign(this, { page, id, iterations, problems, first: 0, pairs: [] });
    const { choices } = currentPlace();
    const asked = (name, otherwise) => {
      const at = Number(choices.get(name) ?? NaN);
      return iterations.includes(at) ? at : otherwise;
    };
    this.before = asked("before", iterations[0]);
    this.after = asked("after", iterations.at(-1));
    this.decoding = choices.get("decoding") === "sampled" ? "sampled" : "greedy";
    this.kind = KINDS.includes(choices.get("kind")) ? choices.get("kind") : "all";
    this.text = h("input", { type: "search", on: { input: debounce(120, () => this.show()) } });
    this.keys = [["/", t("key_find"), () => this.text.focus()]];
    this.summary = h("p", { role: "status" });
    this.body = h("div");
    const chooser = (name, options) =>
      select(options, String(this[name]), (value) => this.choose(name, name === "before" || name === "after" ? Number(value) : value));
    const numbers = iterations.map((n) => [String(n), t("iteration_n", { n })]);
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "bar" },
        labelled(t("before"), chooser("before", numbers)),
        labelled(t("after"), chooser("after", numbers)),
        labelled(t("eval_kind"), chooser("decoding", [["greedy", t("greedy")], ["sampled", t("sampled")]])),
        labelled(t("change"), chooser("kind", KINDS.map((kind) => [kind, t(`change_${kind}`)]))),
        labelled(t("filter_text"), this.text),
        csvButton(`${id}-heldout`, () => this.cells()),
      ),
      this.summary,
      this.body,
    );
  }

  choose(name, value) {
    this[name] = value;
    noteChoice(name, value);
    this.page.run(() => (name === "kind" ? this.show() : this.load()));
  }

  async load() {
    const [before, after] = await Promise.all(
      [this.before, this.after].map((iteration) => get(runPath(this.id, "heldout", iteration))),
    );
    this.page.problems([...this.problems, ...before.problems, ...after.problems]);
    const earlier = new Map(before.rows.map((row) => [row.row, row]));
    this.pairs = after.rows.map((row) => pairOf(earlier.get(row.row), row, this.decoding));
    this.show();
  }

  show() {
    const sought = this.text.value.toLowerCase();
    const said = (pair) => [pair.prompt, pair.before.response, pair.after.response, plain(pair.columns)];
    const found = this.pairs
      .filter((pair) => this.kind === "all" || pair.change === this.kind)
      .filter((pair) => !sought || said(pair).some((text) => plain(text).toLowerCase().includes(sought)))
      .sort((a, b) => compare(Math.abs(b.delta ?? 0), Math.abs(a.delta ?? 0), false) || a.row - b.row);
    this.found = found;
    const count = (kind) => this.pairs.filter((pair) => pair.change === kind).length;
    const counts = { better: count("better"), worse: count("worse"), same: count("same"), total: this.pairs.length };
    this.summary.textContent = t("heldout_summary", counts);
    this.first = Math.min(this.first, Math.max(0, found.length - 1));
    const last = Math.min(this.first + PAGE, found.length);
    const turn = (by) => () => {
      this.first += by;
      this.show();
    };
    this.body.replaceChildren(
      this.table(found.slice(this.first, last)),
      h(
        "p",
        { class: "bar" },
        h("span", { class: "muted" }, found.length ? t("rows_shown", { from: this.first + 1, to: last, total: found.length }) : t("no_match")),
        this.first > 0 ? button(t("previous"), turn(-PAGE)) : "",
        last < found.length ? button(t("next"), turn(PAGE)) : "",
      ),
    );
  }

  table(pairs) {
    const names = [...new Set(this.pairs.flatMap((pair) => Object.keys(pair.columns)))].slice(0, 2);
    const heads = [
      [t("row"), "num"],
      [t("prompt")],
      ...names.map((name) => [visible(name)]),
      [`${t("before")} · ${t("iteration_n", { n: this.before })}`],
      [t("score"), "num"],
      [`${t("after")} · ${t("iteration_n", { n: this.after })}`],
      [t("score"), "num"],
    ];
    const score = (value) => h("td", { class: "num", title: fullValue(value) }, number(value));
    const text = (value) => h("td", { class: "model-text wide" }, visibleLines(plain(value)));
    const rows = pairs.map((pair) =>
      h(
        "tr",
        { class: `change-${pair.change}` },
        h("td", { class: "num" }, h("a", { href: link("run", this.id, "heldout", pair.row) }, String(pair.row))),
        text(pair.prompt),
        names.map((name) => h("td", { class: "model-text" }, visibleLines(plain(pair.columns[name])))),
        text(pair.before.response),
        score(pair.before.score),
        h("td", { class: "model-text wide" }, differenceText(pair.before.response, pair.after.response)),
        score(pair.after.score),
      ),
    );
    return scrollTable(t("heldout_title"), "scroll tall", "rows", heads, rows);
  }

  cells() {
    const heads = ["row", "prompt", "before", "score before", "after", "score after", "columns"];
    const rows = (this.found ?? []).map((pair) => [
      pair.row,
      pair.prompt,
      pair.before.response,
      pair.before.score,
      pair.after.response,
      pair.after.score,
      pair.columns,
    ]);
    return [heads, ...rows];
  }
}

function pairOf(earlier, later, decoding) {
  const [before, after] = [earlier?.[decoding] ?? {}, later[decoding]];
  const known = typeof before.score === "number" && typeof after.score === "number";
  const delta = known ? after.score - before.score : null;
  const change = delta > 0 ? "better" : delta < 0 ? "worse" : "same";
  return { row: later.row, prompt: later.prompt, columns: later.columns, before, after, delta, change };
}
