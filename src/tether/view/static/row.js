// One row: the journey of its tokens through every stage, and what other settings would have made
// of it.

import { get, runPath } from "./api.js";
import { draw, line, markAt } from "./charts.js";
import { button, h, labelled, link, scrollTable, select } from "./dom.js";
import { csvButton, pngButton, tableCells } from "./download.js";
import { explainToken } from "./explain.js";
import { columnMeaning } from "./glossary.js";
import { dataFacts, promptAddress } from "./groups.js";
import { currentPlace, noteChoice } from "./place.js";
import { runTabs } from "./run.js";
import { CLIP, ClipScale, Scale } from "./scale.js";
import { fullValue, number, setting, term, visible, visibleLines, visibleToken } from "./text.js";
import { turnTable } from "./turns.js";
import { whatIfPanel } from "./whatif.js";
import { t } from "./words.js";

const LINES = [
  ["values", "value_line", { variable: "--c0" }],
  ["returns", "return_line", { variable: "--c1", dash: "dash" }],
  ["advantages", "advantage_line", { variable: "--c2", dash: "dot" }],
];

export async function rowView(page, id, iteration, which) {
  const path = runPath(id, "rollouts", iteration, which);
  const [about, row] = await Promise.all([get(runPath(id)), get(path)]);
  page.problems([...about.problems, ...row.problems]);
  const journey = new Journey(row, row.settings, about.columns);
  const panel = whatIfPanel(path, row, (answer) => journey.suppose(answer));
  const href = link("run", id, "iteration", iteration);
  const up = h("a", { href }, t("iteration_n", { n: iteration }));
  const step = (by) => page.run(() => neighbour(id, iteration, Number(which), by));
  return {
    keys: [
      ["j", t("key_row_down"), () => step(1)],
      ["k", t("key_row_up"), () => step(-1)],
      ["u", t("key_up"), () => (location.hash = href)],
    ],
    element: h(
      "div",
      {},
      runTabs(id, "look"),
      h("h1", {}, up, ` · ${t("row_n", { n: which })}`),
      h("p", { class: "bar" }, button(t("previous_row"), () => step(-1)), button(t("next_row"), () => step(1)), overTime(id, row.row)),
      texts(row.row),
      turnTable(row),
      journey.element,
      panel.element,
      h("details", { class: "card" }, h("summary", {}, t("all_columns")), everyNumber(row, journey, about.columns)),
    ),
    async start() {
      await Promise.all([journey.chart(), panel.start()]);
    },
  };
}

// To the next or the previous row of the iteration, with the colours that are shown.
async function neighbour(id, iteration, which, by) {
  const { rows } = await get(runPath(id, "rollouts", iteration));
  const numbers = rows.map((row) => row.row);
  const to = numbers[numbers.indexOf(which) + by];
  const query = location.hash.split("?")[1];
  if (to !== undefined) location.hash = link("run", id, "iteration", iteration, "row", to) + (query ? `?${query}` : "");
}

function overTime(id, { data_file: file, data_line: line }) {
  return typeof line === "number" ? h("a", { href: promptAddress(id, file, line) }, t("over_time")) : null;
}

// The score's parts and what else the reward returned.
function scoreFacts(row) {
  const numbers = Object.entries(row.score_parts ?? {}).map(([name, value]) => [`${t("score")}: ${name}`, value]);
  const extras = Object.entries(row.score_extras ?? {});
  return numbers.length + extras.length ? dataFacts(Object.fromEntries([...numbers, ...extras])) : null;
}

function texts(row) {
  const said = (name, value) => h("span", {}, `${t(name)} `, value);
  const fact = (name, value) =>
    said(name, h("b", { class: "num", title: fullValue(value) }, setting(value)));
  const { mean, variance, count } = row.whitening ?? {};
  const moments = `(x − ${term(mean)}) / √${number(variance)}, n = ${number(count)}`;
  return h(
    "section",
    { class: "card texts" },
    h(
      "div",
      { class: "beside" },
      h(
        "div",
        {},
        h("h2", {}, t("prompt")),
        h("p", { class: "model-text said" }, visibleLines(row.prompt)),
        h("h2", {}, t("response")),
        response(row),
      ),
      h("div", {}, Object.keys(row.columns ?? {}).length ? h("h2", {}, t("of_the_data")) : null, dataFacts(row.columns), scoreFacts(row)),
    ),
    callTable(row.calls),
    h(
      "p",
      { class: "facts" },
      fact("score", row.score),
      said("finish_reason", h("b", { class: "model-text" }, visible(row.finish_reason))),
      fact("beta", row.beta),
      fact("final_value", row.final_value),
      row.whitening ? said("whitening", h("b", { class: "num" }, moments)) : null,
    ),
    row.usable === false ? h("p", { class: "warn" }, t("unusable")) : null,
  );
}

// What the policy wrote, and dimmed between it what it was told.
function response(row) {
  const turns = Array.isArray(row.turns) ? row.turns : [{ policy: true, text: row.response }];
  const spans = turns.map((turn) =>
    turn?.policy
      ? h("span", {}, visibleLines(turn.text))
      : h("span", { class: "hatched", title: t("masked") }, visibleLines(turn?.text)),
  );
  return h("p", { class: "model-text said" }, spans);
}

function callTable(calls) {
  const made = Array.isArray(calls) ? calls.filter((call) => call !== null && typeof call === "object") : [];
  if (!made.length) return null;
  const text = (value) => h("td", { class: "model-text" }, visibleLines(value));
  const outcome = (call) =>
    call.error
      ? h("td", { class: "model-text warn" }, `${t("call_error")} `, visibleLines(call.error))
      : h("td", { class: "model-text" }, visibleLines(call.result), call.cut ? ` (${t("call_cut")})` : null);
  const lines = made.map((call) =>
    h(
      "tr",
      {},
      h("td", { class: "num" }, number(call.turn)),
      text(call.name),
      text(call.arguments),
      outcome(call),
    ),
  );
  const heads = [[t("call_turn"), "num"], [t("call_tool")], [t("call_arguments")], [t("call_result")]];
  return [h("h2", {}, t("calls")), scrollTable(t("calls"), "scroll", "fit", heads, lines)];
}

class Journey {
  constructor(row, settings, meanings) {
    Object.assign(this, { row, settings, meanings, at: firstSampled(row.mask) });
    this.columns = Object.keys(row.columns).filter((name) => row.columns[name]?.some((x) => x !== null));
    if (row.clip?.length) this.columns.push(CLIP);
    const asked = currentPlace().choices.get("colour");
    this.column = [asked, "advantages", ...this.columns].find((name) => this.columns.includes(name));
    this.chips = row.tokens.map((token, at) => this.chip(token, at));
    this.legend = h("div", { role: "status" });
    this.detail = h("div", { class: "detail", "aria-live": "polite" });
    this.plot = h("div", { class: "plot", role: "img", "aria-label": t("along") });
    const options = this.columns.map((name) => [name, name]);
    const colours = select(options, this.column, (name) => this.colour(name));
    const keys = { keydown: (event) => this.move(event) };
    const png = h("p", {}, pngButton(t("along"), () => this.plot));
    const along = h("div", {}, h("h3", {}, t("along")), lineLegend(), this.plot, png);
    this.element = h(
      "section",
      { class: "card" },
      h("h2", {}, t("journey")),
      h("div", { class: "bar" }, labelled(t("colour_by"), colours), this.legend),
      h("div", { class: "chips", role: "group", "aria-label": t("journey"), on: keys }, this.chips),
      row.mask.includes(false) ? maskedKey() : null,
      h("p", { class: "muted" }, t("token_help")),
      h("div", { class: "halves" }, this.detail, along),
    );
    this.colour(this.column);
    this.select(this.at);
  }

  chip(token, at) {
    const masked = !this.row.mask[at];
    const select = () => this.select(at);
    return h(
      "button",
      {
        type: "button",
        class: masked ? "chip hatched" : "chip",
        title: masked ? t("masked") : null,
        on: { focus: select, pointerenter: select, click: select },
      },
      h("bdi", {}, visibleToken(token ?? `#${this.row.ids[at]}`)),
    );
  }

  colour(name) {
    this.column = name;
    noteChoice("colour", name === "advantages" ? null : name);
    const logged = name === CLIP ? this.row.clip : (this.row.columns[name] ?? []);
    const supposed = name === CLIP ? this.supposed?.clip_after : this.supposed?.after[name];
    const values = supposed ?? logged;
    const counted = [logged, values].flatMap((all) => all.filter((_, at) => this.row.mask[at]));
    const scale = name === CLIP ? new ClipScale() : new Scale(name ?? "", counted);
    this.chips.forEach((chip, at) => {
      chip.classList.remove("above", "below", "state-chip");
      chip.style.removeProperty("--share");
      delete chip.dataset.clip;
      if (this.row.mask[at]) scale.paint(chip, values[at]);
    });
    const meaning = columnMeaning(name, this.meanings);
    const note = supposed ? h("p", { class: "warn" }, t("whatif_colours")) : null;
    this.legend.replaceChildren(...[scale.legend(), h("p", { class: "muted" }, meaning), note].filter(Boolean));
  }

  // The colours under other settings, on a scale that holds both.
  suppose(answer) {
    this.supposed = answer.own ? null : answer;
    this.colour(this.column);
  }

  // The tab key stops once, the arrow keys move within: a response may have a thousand tokens.
  move(event) {
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
    const text = h("code", { class: "model-text" }, visibleToken(this.row.tokens[at]));
    const token = h("h3", {}, `${t("token")} ${at} `, text, ` #${this.row.ids[at] ?? "–"}`);
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
    const xaxis = { dtick: mask.length < 16 ? 1 : null };
    return draw(this.plot, traces, { height: 280, xaxis }).then(this.mark);
  }
}

function maskedKey() {
  const words = `${t("masked")}: ${t("masked_help")}`;
  return h("p", { class: "muted" }, h("span", { class: "box hatched" }), words);
}

function lineLegend() {
  const swatch = (variable) => h("span", { class: `swatch ${variable.slice(2)}` });
  const entry = ([, words, { variable }]) => h("span", {}, swatch(variable), t(words));
  return h("p", { class: "legend" }, LINES.map(entry));
}

function firstSampled(mask) {
  return Math.max(0, mask.indexOf(true));
}

function everyNumber(row, journey, meanings) {
  const names = Object.keys(row.columns).filter((name) => row.columns[name]);
  const cell = (x) => h("td", { class: "num", title: fullValue(x) }, number(x));
  const state = (at) => (row.clip?.[at] ? t(`clip_${row.clip[at]}`) : "");
  const lines = row.tokens.map((token, at) =>
    h(
      "tr",
      { class: row.mask[at] ? null : "hatched", on: { click: () => journey.select(at) } },
      h("th", { scope: "row", class: "model-text" }, visibleToken(token ?? `#${row.ids[at]}`)),
      names.map((name) => cell(row.columns[name][at])),
      h("td", {}, row.mask[at] ? state(at) : t("masked")),
    ),
  );
  const heads = [[t("token")], ...names.map((name) => [name, "num", columnMeaning(name, meanings)]), [CLIP]];
  const table = scrollTable(t("all_columns"), "scroll tall", "numbers", heads, lines);
  return h("div", {}, h("p", {}, csvButton("tokens", () => tableCells(table.querySelector("table")))), table);
}
