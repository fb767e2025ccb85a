// One row: the journey of its tokens through every stage, and what other settings would have made
// of it.

import { get, runPath } from "./api.js";
import { draw, line, markAt } from "./charts.js";
import { h, labelled, link, select } from "./dom.js";
import { explainToken } from "./explain.js";
import { currentPlace, noteChoice } from "./place.js";
import { runTabs } from "./run.js";
import { CLIP, ClipScale, Scale } from "./scale.js";
import { fullValue, number, setting, term, visible, visibleLines, visibleToken } from "./text.js";
import { whatIfPanel } from "./whatif.js";
import { t } from "./words.js";

const LINES = [
  ["values", "value_line", { variable: "--c0" }],
  ["returns", "return_line", { variable: "--c1", dash: "dash" }],
  ["advantages", "advantage_line", { variable: "--c2", dash: "dot" }],
];

export async function rowView(page, id, iteration, number_) {
  const path = runPath(id, "rollouts", iteration, number_);
  const [about, row] = await Promise.all([get(runPath(id)), get(path)]);
  page.problems([...about.problems, ...row.problems]);
  const journey = new Journey(row, about.whatif);
  const panel = whatIfPanel(path, row, about.whatif);
  const up = link("run", id, "iteration", iteration);
  return {
    element: h(
      "div",
      {},
      runTabs(id, "look"),
      h("h1", {}, h("a", { href: up }, t("iteration_n", { n: iteration })), ` · ${t("row_n", { n: number_ })}`),
      texts(row.row),
      journey.element,
      panel.element,
      h("details", { class: "card" }, h("summary", {}, t("all_columns")), everyNumber(row, journey)),
    ),
    async start() {
      await Promise.all([journey.chart(), panel.start()]);
    },
  };
}

function texts(row) {
  const fact = (name, value) => h("span", {}, `${t(name)} `, h("b", { class: "num", title: fullValue(value) }, setting(value)));
  const { mean, variance, count } = row.whitening ?? {};
  const moments = mean === undefined ? null : `(x − ${term(mean)}) / √${number(variance)}, n = ${number(count)}`;
  return h(
    "section",
    { class: "card texts" },
    h("h2", {}, t("prompt")),
    h("p", { class: "model-text said" }, visibleLines(row.prompt)),
    h("h2", {}, t("response")),
    h("p", { class: "model-text said" }, visibleLines(row.response)),
    h(
      "p",
      { class: "facts" },
      fact("score", row.score),
      h("span", {}, `${t("finish_reason")} `, h("b", { class: "model-text" }, visible(row.finish_reason))),
      fact("beta", row.beta),
      fact("final_value", row.final_value),
      moments && h("span", {}, `${t("whitening")} `, h("b", { class: "num" }, moments)),
    ),
    row.usable === false ? h("p", { class: "warn" }, t("unusable")) : null,
  );
}

class Journey {
  constructor(row, settings) {
    Object.assign(this, { row, settings, at: firstSampled(row.mask) });
    this.columns = Object.keys(row.columns).filter((name) => row.columns[name]?.some((x) => x !== null));
    if (row.clip?.length) this.columns.push(CLIP);
    const asked = currentPlace().choices.get("colour");
    this.column = [asked, "advantages", ...this.columns].find((name) => this.columns.includes(name));
    this.chips = row.tokens.map((token, at) => this.chip(token, at));
    this.legend = h("div", { role: "status" });
    this.detail = h("div", { class: "detail", "aria-live": "polite" });
    this.plot = h("div", { class: "plot", role: "img", "aria-label": t("along") });
    const options = this.columns.map((name) => [name, name]);
    this.element = h(
      "section",
      { class: "card" },
      h("h2", {}, t("journey")),
      h("div", { class: "bar" }, labelled(t("colour_by"), select(options, this.column, (name) => this.colour(name))), this.legend),
      h("div", { class: "chips", role: "group", "aria-label": t("token_help"), on: { keydown: (e) => this.walk(e) } }, this.chips),
      row.mask.includes(false) ? h("p", { class: "muted" }, h("span", { class: "box hatched" }), `${t("masked")}: ${t("masked_help")}`) : null,
      h("p", { class: "muted" }, t("token_help")),
      h("div", { class: "halves" }, this.detail, h("div", {}, h("h3", {}, t("along")), lineLegend(), this.plot)),
    );
    this.colour(this.column);
    this.select(this.at);
  }

  chip(token, at) {
    const masked = !this.row.mask[at];
    return h(
      "button",
      {
        type: "button",
        class: masked ? "chip hatched" : "chip",
        title: masked ? t("masked") : null,
        on: { focus: () => this.select(at), pointerenter: () => this.select(at), click: () => this.select(at) },
      },
      h("bdi", {}, visibleToken(token ?? `#${this.row.ids[at]}`)),
    );
  }

  colour(name) {
    this.column = name;
    noteChoice("colour", name === "advantages" ? null : name);
    const values = name === CLIP ? this.row.clip : (this.row.columns[name] ?? []);
    const scale = name === CLIP ? new ClipScale() : new Scale(name ?? "", values.filter((_, i) => this.row.mask[i]));
    this.chips.forEach((chip, at) => {
      chip.classList.remove("above", "below", "state-chip");
      chip.style.removeProperty("--share");
      delete chip.dataset.clip;
      if (this.row.mask[at]) scale.paint(chip, values[at]);
    });
    this.legend.replaceChildren(scale.legend());
  }

  // One stop for the tab key, arrows within: a response may have a thousand tokens.
  walk(event) {
    const last = this.chips.length - 1;
    const to = { ArrowRight: this.at + 1, ArrowLeft: this.at - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.chips[Math.min(Math.max(to, 0), last)].focus();
  }

  select(at) {
    if (!this.chips.length) return;
    this.at = at;
    this.chips.forEach((chip, i) => {
      chip.tabIndex = i === at ? 0 : -1;
      chip.setAttribute("aria-pressed", String(i === at));
    });
    this.detail.replaceChildren(...this.words(at));
    this.mark?.();
  }

  words(at) {
    const token = h("h3", {}, `${t("token")} ${at} `, h("code", { class: "model-text" }, visibleToken(this.row.tokens[at])), ` #${this.row.ids[at] ?? "–"}`);
    if (!this.row.mask[at]) return [token, h("p", {}, `${t("masked")}: ${t("masked_help")}`)];
    const steps = explainToken(this.row, this.settings, at).flatMap(({ name, formula, sentence }) => [
      h("dt", {}, name),
      h("dd", {}, h("code", {}, formula), sentence ? h("span", { class: "say" }, sentence) : null),
    ]);
    return [token, steps.length ? h("dl", { class: "steps" }, steps) : h("p", {}, t("no_columns"))];
  }

  chart() {
    const { columns, mask } = this.row;
    const lines = LINES.filter(([name]) => columns[name]);
    const traces = lines.map(([name, , style]) =>
      line(mask.map((_, i) => i), columns[name].map((x, i) => (mask[i] ? x : null)), style),
    );
    this.mark = () => markAt(this.plot, this.at);
    return draw(this.plot, traces, { height: 280, xaxis: { dtick: mask.length < 16 ? 1 : null } }).then(this.mark);
  }
}

function lineLegend() {
  const entry = ([, words, { variable }]) => h("span", {}, h("span", { class: `swatch ${variable.slice(2)}` }), t(words));
  return h("p", { class: "legend" }, LINES.map(entry));
}

function firstSampled(mask) {
  return Math.max(0, mask.indexOf(true));
}

function everyNumber(row, journey) {
  const names = Object.keys(row.columns).filter((name) => row.columns[name]);
  const cells = (at) => names.map((name) => h("td", { class: "num", title: fullValue(row.columns[name][at]) }, number(row.columns[name][at])));
  const lines = row.tokens.map((token, at) =>
    h(
      "tr",
      { class: row.mask[at] ? null : "hatched", on: { click: () => journey.select(at) } },
      h("th", { scope: "row", class: "model-text" }, visibleToken(token ?? `#${row.ids[at]}`)),
      cells(at),
      h("td", {}, row.mask[at] ? row.clip?.[at] ? t(`clip_${row.clip[at]}`) : "" : t("masked")),
    ),
  );
  return h(
    "div",
    { class: "scroll tall", tabindex: "0", role: "region", "aria-label": t("all_columns") },
    h(
      "table",
      { class: "numbers" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, t("token")), names.map((name) => h("th", { scope: "col", class: "num" }, name)), h("th", { scope: "col" }, CLIP))),
      h("tbody", {}, lines),
    ),
  );
}
