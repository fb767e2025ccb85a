// One run: its curves, its held-out evaluations and the meaning of its numbers.

import { Refused, get } from "./api.js";
import { Board } from "./board.js";
import { h, link, scrollTable } from "./dom.js";
import { csvButton, tableCells } from "./download.js";
import { meaningOf } from "./glossary.js";
import { Notices } from "./notices.js";
import { facts } from "./runs.js";
import { seriesOf } from "./series.js";
import { fullValue, number } from "./text.js";
import { t } from "./words.js";

export function runTabs(id, active) {
  const tabs = [
    ["curves", link("run", id)],
    ["look", link("run", id, "iteration", "last")],
    ["heldout_tab", link("run", id, "heldout")],
    ["timeline", link("run", id, "timeline")],
    ["events", link("run", id, "events")],
    ["config", link("run", id, "config")],
  ];
  const current = (name) => (name === active ? "page" : null);
  return h(
    "nav",
    { class: "tabs", "aria-label": id },
    tabs.map(([name, href]) => h("a", { href, "aria-current": current(name) }, t(name))),
  );
}

export function runView(page, id) {
  return new RunView(page, id);
}

class RunView {
  constructor(page, id) {
    Object.assign(this, { page, id });
    this.board = new Board(() => page.soon());
    this.summary = h("div");
    this.notices = new Notices(id);
    this.evals = h("section");
    this.meanings = h("details", { class: "card" });
    this.element = h(
      "div",
      {},
      runTabs(id, "curves"),
      h("h1", { class: "model-text" }, id),
      this.summary,
      this.notices.element,
      this.board.element,
      this.evals,
      this.meanings,
    );
  }

  start() {
    return this.tick();
  }

  async tick() {
    const listed = (await get("/api/runs")).runs.find((run) => run.id === this.id);
    if (!listed) throw new Refused(t("no_place"));
    this.summary.replaceChildren(facts(listed));
    const series = seriesOf(this.id);
    const fresh = await series.refresh(listed, this.board.wanted);
    this.page.problems([...(listed.problem ? [listed.problem] : []), ...series.problems]);
    if (fresh || !this.drawn) await this.draw(series);
  }

  async draw(series) {
    this.drawn = true;
    this.evals.replaceChildren(...evalTable(series.evals));
    this.explain(series.about);
    await this.board.show([{ members: [series], index: 0 }]);
    await this.notices.refresh();
  }

  explain({ names, glossary }) {
    const entries = names.flatMap((name) => [h("dt", {}, name), h("dd", {}, meaningOf(name, glossary))]);
    this.meanings.replaceChildren(h("summary", {}, t("glossary")), h("dl", { class: "glossary" }, entries));
  }
}

function evalTable(evals) {
  if (!evals.length) return [];
  const kinds = { eval_iteration: "num", eval_kind: null, mean: "num", interval: "num", prompts: "num" };
  const heads = Object.entries(kinds).map(([name, kind]) => [t(name), kind]);
  const rows = evals.flatMap((record) =>
    ["sampled", "greedy"]
      .filter((decoding) => record[decoding])
      .map((decoding) => evalRow(record, decoding)),
  );
  const table = scrollTable(t("evals"), "scroll fit", null, heads, rows);
  const csv = csvButton("evals", () => tableCells(table.querySelector("table")));
  return [h("h2", {}, t("evals"), " ", csv), table];
}

function evalRow(record, decoding) {
  const { mean, low, high, count } = record[decoding];
  return h(
    "tr",
    {},
    h("td", { class: "num" }, number(record.iteration)),
    h("td", {}, t(decoding)),
    h("td", { class: "num", title: fullValue(mean) }, number(mean)),
    h("td", { class: "num" }, `${number(low)} – ${number(high)}`),
    h("td", { class: "num" }, number(count)),
  );
}
