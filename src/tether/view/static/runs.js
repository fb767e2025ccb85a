// The first view: every run with its state, and the curves of those that are ticked.

import { Refused, get } from "./api.js";
import { Board } from "./board.js";
import { wakeCharts } from "./charts.js";
import { h, labelled, link } from "./dom.js";
import { currentPlace, noteChoice } from "./place.js";
import { seriesOf } from "./series.js";
import { number, visible } from "./text.js";
import { t } from "./words.js";

export function runsView(page) {
  return new RunsView(page);
}

class RunsView {
  constructor(page) {
    this.page = page;
    this.colours = new Map(); // run -> index of its colour, while it is ticked
    this.listed = [];
    this.chosen = new Set();
    this.touched = false; // whether a run has been ticked by hand
    this.stale = true; // what is ticked differs from what is drawn
    this.find = h("input", { type: "search", on: { input: () => this.list() } });
    this.items = h("ul", { class: "runs" });
    this.note = h("p", { class: "muted" });
    this.board = new Board(() => page.soon());
    this.finder = labelled(t("find_run"), this.find);
    this.folding = h("input", { type: "checkbox", on: { change: () => this.fold() } });
    this.folding.checked = currentPlace().choices.get("seeds") === "folded";
    this.folder = labelled(t("fold_seeds"), this.folding);
    this.keys = [["/", t("key_find"), () => this.find.focus()]];
    this.element = h(
      "div",
      { class: "split" },
      h(
        "aside",
        {},
        h("h1", {}, t("runs")),
        h("p", { class: "bar" }, h("a", { href: "#/table" }, t("table_of_runs")), this.folder),
        this.finder,
        this.items,
      ),
      h("section", { "aria-label": t("curves") }, this.note, this.board.element),
    );
  }

  start() {
    return this.tick();
  }

  async tick() {
    const answer = await get("/api/runs");
    this.listed = [...answer.runs].sort((a, b) => b.modified - a.modified);
    if (!this.touched && !this.chosen.size) this.chosen = this.firstChoice();
    this.list();
    this.note.textContent = this.sentence(answer.demo);
    const shown = this.listed.filter((run) => this.chosen.has(run.id));
    const questions = shown.map((run) =>
      seriesOf(run.id).refresh(run, this.board.wanted).catch((error) => this.lost(run, error)),
    );
    wakeCharts();
    const fresh = await Promise.all(questions);
    this.page.problems([...answer.problems, ...this.problemsOf(shown)]);
    if (fresh.some(Boolean) || this.stale) await this.draw(shown);
  }

  // A run may vanish between the listing and the question; the others are shown all the same.
  lost(run, error) {
    if (!(error instanceof Refused)) throw error;
    seriesOf(run.id).problems = [error.message];
    return false;
  }

  firstChoice() {
    const named = currentPlace().choices.get("runs");
    if (named) return new Set(named.split("/").map(decodeURIComponent));
    const running = this.listed.filter((run) => run.state === "running");
    const first = running.length ? running.slice(0, 4) : this.listed.slice(0, 1);
    return new Set(first.map((run) => run.id));
  }

  async draw(shown) {
    this.stale = false;
    const ready = shown.filter((run) => seriesOf(run.id).about);
    await this.board.show(this.folded(ready));
  }

  // One entry per curve: a run, or all ticked runs that differ in their seed alone.
  folded(runs) {
    const entries = new Map();
    for (const run of runs) {
      const key = this.folding.checked ? run.twins : run.id;
      if (!entries.has(key)) entries.set(key, { members: [], index: this.curveColour(run) });
      entries.get(key).members.push(seriesOf(run.id));
    }
    return [...entries.values()];
  }

  // The colour of a run's curve: folded seeds share that of the first.
  curveColour(run) {
    const first = this.folding.checked && this.listed.find((other) => other.twins === run.twins && this.chosen.has(other.id));
    return this.colourOf((first || run).id);
  }

  fold() {
    noteChoice("seeds", this.folding.checked ? "folded" : null);
    this.stale = true;
    this.list();
    this.page.soon();
  }

  colourOf(id) {
    if (!this.colours.has(id)) {
      const taken = new Set(this.colours.values());
      let index = 0;
      while (taken.has(index)) index += 1;
      this.colours.set(id, index);
    }
    return this.colours.get(id);
  }

  toggle(id, on) {
    this.touched = true;
    if (on) this.chosen.add(id);
    else {
      this.chosen.delete(id);
      this.colours.delete(id);
    }
    noteChoice("runs", [...this.chosen].map(encodeURIComponent).join("/"));
    this.stale = true;
    this.list();
    this.page.soon();
  }

  sentence(demo) {
    if (!this.listed.length) return t("no_runs");
    if (demo) return t("demo");
    if (!this.chosen.size) return t("choose_run");
    const empty = this.listed.every((run) => !this.chosen.has(run.id) || run.iterations === 0);
    return empty ? t("waiting") : "";
  }

  problemsOf(shown) {
    const own = this.listed.filter((run) => run.problem).map((run) => `${run.id}: ${run.problem}`);
    return [...own, ...shown.flatMap((run) => seriesOf(run.id).problems.map((p) => `${run.id}: ${p}`))];
  }

  // Rewritten as a whole, with the focus put back where it was.
  list() {
    const active = document.activeElement;
    const focused = this.items.contains(active) ? active.dataset.key : null;
    this.finder.hidden = this.listed.length < 8;
    this.folder.hidden = new Set(this.listed.map((run) => run.twins)).size === this.listed.length;
    const sought = this.find.value.toLowerCase();
    const found = this.listed.filter((run) => run.id.toLowerCase().includes(sought));
    this.items.replaceChildren(...found.map((run) => this.item(run)));
    const keyed = [...this.items.querySelectorAll("[data-key]")];
    if (focused) keyed.find((element) => element.dataset.key === focused)?.focus();
  }

  item(run) {
    const on = this.chosen.has(run.id);
    const box = h("input", {
      type: "checkbox",
      "data-key": `box ${run.id}`,
      "aria-label": t("draw", { run: run.id }),
      on: { change: () => this.toggle(run.id, box.checked) },
    });
    box.checked = on;
    const colour = on ? `c${this.curveColour(run) % 6}` : "off";
    const swatch = h("span", { class: `swatch ${colour}`, "aria-hidden": "true" });
    const place = { href: link("run", run.id), "data-key": `link ${run.id}`, class: "model-text" };
    const head = h("div", { class: "run-head" }, box, swatch, h("a", place, run.id));
    return h("li", { class: "run" }, head, facts(run));
  }
}

export function facts(run) {
  const progress =
    run.planned && run.state === "running"
      ? h("progress", { max: run.planned, value: run.iterations, "aria-label": t("iteration") })
      : null;
  const done = run.planned
    ? t("iterations_of", { done: run.iterations, planned: run.planned })
    : t("iterations_done", { done: run.iterations });
  return h(
    "p",
    { class: "facts" },
    h("span", { class: `state ${run.state}` }, t(run.state)),
    run.stage && run.stage !== "ppo" ? h("span", { class: "model-text" }, visible(run.stage)) : null,
    h("span", {}, done),
    h("span", {}, `${t("score")} ${number(run.score)}`),
    run.heldout === null ? null : h("span", {}, `${t("heldout")} ${number(run.heldout)}`),
    progress,
    run.reason ? h("span", { class: "model-text reason" }, visible(run.reason)) : null,
  );
}
