// An iteration in time: what each sampler, the rewards and the trainer did, and what waited.

import { get, runPath } from "./api.js";
import { button, h, labelled, link, scrollTable } from "./dom.js";
import { csvButton } from "./download.js";
import { runTabs } from "./run.js";
import { fullValue, number, visible } from "./text.js";
import { t } from "./words.js";

const TICKS = 8;
const HUES = 4; // iterations next to each other have different ones

export async function timelineView(page, id, which) {
  const view = new Timeline(page, id, which);
  await view.load();
  return view;
}

class Timeline {
  constructor(page, id, which) {
    Object.assign(this, { page, id, newest: which === undefined || which === "last" });
    this.iteration = this.newest ? null : Number(which);
    this.body = h("div");
    this.element = h("div", {}, runTabs(id, "timeline"), this.body);
    this.keys = [
      ["[", t("key_previous"), () => this.go(-1)],
      ["]", t("key_next"), () => this.go(1)],
    ];
  }

  async load() {
    const listed = await get(runPath(this.id, "timeline"));
    this.iterations = listed.iterations;
    const shown = this.newest ? this.iterations.at(-1) : this.iteration;
    if (shown === undefined) {
      this.page.problems(listed.problems);
      this.body.replaceChildren(h("h1", {}, t("timeline")), h("p", { class: "muted" }, t("no_timeline")));
      return;
    }
    this.iteration = shown;
    const found = await get(runPath(this.id, "timeline", shown));
    this.page.problems([...listed.problems, ...found.problems]);
    this.body.replaceChildren(...this.parts(found));
  }

  // The newest iteration is replaced by the next one as it comes.
  async tick() {
    if (!this.newest || this.body.contains(document.activeElement)) return;
    const { iterations } = await get(runPath(this.id, "timeline"));
    if (iterations.at(-1) !== this.iteration) await this.load();
  }

  go(by) {
    const at = this.iterations.indexOf(this.iteration) + by;
    if (this.iterations[at] !== undefined) location.hash = link("run", this.id, "timeline", this.iterations[at]);
  }

  parts(found) {
    const lanes = found.lanes.flatMap((lane) => laneRow(lane, found));
    const waiting = found.apart ? queueRow(found) : [];
    const label = t("timeline_of", { n: found.iteration, seconds: number(found.seconds) });
    return [
      h("h1", {}, t("iteration_n", { n: found.iteration })),
      this.picker(),
      h(
        "section",
        { class: "card timeline", role: "img", "aria-label": label },
        facts(found),
        h("div", { class: "lanes" }, lanes, waiting, axis(found.seconds)),
        legend(found),
      ),
      h("p", { class: "muted" }, t(found.apart ? "timeline_help" : "timeline_alone")),
      ...(found.apart ? [this.table(found)] : []),
    ];
  }

  picker() {
    const at = this.iterations.indexOf(this.iteration);
    const exact = h("input", {
      type: "number",
      min: 0,
      class: "short",
      value: this.iteration,
      on: { change: () => (location.hash = link("run", this.id, "timeline", Number(exact.value))) },
    });
    return h(
      "div",
      { class: "bar" },
      button(t("previous"), () => this.go(-1), { disabled: at <= 0 }),
      button(t("next"), () => this.go(1), { disabled: at < 0 || at >= this.iterations.length - 1 }),
      labelled(t("iteration"), exact),
      this.newest ? null : h("a", { href: link("run", this.id, "timeline") }, t("newest")),
    );
  }

  table(found) {
    const spans = found.lanes.flatMap((lane) => (lane.kind === "sampler" ? lane.spans : []));
    spans.sort((a, b) => a.from - b.from);
    const names = ["chunk_sampler", "chunk_rows", "chunk_for", "chunk_version", "chunk_stale", "chunk_asked", "chunk_began", "chunk_ended", "chunk_lost"];
    const heads = names.map((name, i) => [t(name), i ? "num" : null]);
    const cells = (span) => [span.sampler, rowsOf(span), forWhom(span), span.version, staleness(span), span.asked, span.from, span.to, span.lost];
    const cell = (value, i) =>
      typeof value === "number"
        ? h("td", { class: "num", title: fullValue(value) }, i > 4 && i < 8 ? seconds(value) : number(value))
        : h("td", { class: i ? "num" : "model-text" }, value === null ? "–" : visible(value));
    const rows = spans.map((span) => h("tr", {}, cells(span).map(cell)));
    const csv = csvButton(`${this.id}-timeline-${this.iteration}`, () => [names.map((name) => t(name)), ...spans.map(cells)]);
    return h("details", {}, h("summary", {}, t("chunks_of", { n: spans.length })), h("p", {}, csv), scrollTable(t("timeline"), "scroll tall", null, heads, rows));
  }
}

function facts(found) {
  const fact = (words, value) => h("span", {}, `${t(words)} `, h("b", {}, value));
  const trainer = found.lanes.find((lane) => lane.kind === "trainer");
  const samplers = found.lanes.filter((lane) => lane.kind === "sampler");
  const idle = samplers.reduce((sum, lane) => sum + lane.idle, 0) / samplers.length;
  const old = found.staleness.map(([versions, rows]) => t("rows_stale", { rows, n: versions })).join(", ");
  return h(
    "p",
    { class: "facts" },
    fact("whole", `${seconds(found.seconds)} s`),
    found.apart ? fact("trainer_waits", share(trainer.idle)) : null,
    samplers.length ? fact("samplers_idle", share(idle)) : null,
    old ? fact("staleness", old) : null,
  );
}

function laneRow(lane, found) {
  const name = lane.kind === "sampler" ? visible(lane.name) : t(`lane_${lane.kind}`);
  const spans = lane.spans.map((span) => (lane.kind === "sampler" ? chunkBar(span, found) : stageBar(span, found)));
  return row(name, spans, lane.idle === null ? "" : t("idle", { share: share(lane.idle) }), lane.kind);
}

function row(name, bars, note, kind) {
  return [
    h("div", { class: `lane-name ${kind === "sampler" ? "model-text" : ""}` }, name),
    h("div", { class: `lane ${kind}` }, bars),
    h("div", { class: "lane-note num" }, note),
  ];
}

function bar(from, to, found, classes, text, title) {
  const [left, right] = [Math.max(0, from), Math.min(to, found.seconds)].map((at) => (100 * at) / found.seconds);
  const style = `left: ${left.toFixed(3)}%; width: ${Math.max(0, right - left).toFixed(3)}%`;
  return h("span", { class: `span ${classes}`, style, title }, h("span", { class: "span-text" }, text));
}

function chunkBar(span, found) {
  const known = span.trains && span.iteration !== null;
  const hue = known ? `for${span.iteration % HUES}` : "evaluates";
  const cut = [span.from < 0 ? "from-before" : "", span.to > found.seconds ? "goes-on" : ""].join(" ");
  const words = {
    name: visible(span.sampler),
    rows: rowsOf(span) ?? "–",
    who: forWhom(span),
    version: span.version ?? "–",
    from: seconds(span.from),
    to: seconds(span.to),
    wait: seconds(span.from - span.asked),
  };
  const lost = span.lost > 0 ? ` ${t("was_lost", { n: span.lost })}` : "";
  const text = known ? `${span.iteration} · v${span.version ?? "?"}` : t("evaluation");
  return bar(span.from, span.to, found, `${hue} ${cut} ${span.lost > 0 ? "lost" : ""}`, text, t("chunk_title", words) + lost);
}

function stageBar(span, found) {
  const stage = span.stage === "rollout" && !found.apart ? "samples" : span.stage;
  const words = { stage: t(`stage_${stage}`), from: seconds(span.from), to: seconds(span.to) };
  return bar(span.from, span.to, found, `stage ${stage}`, t(`stage_${stage}`), t("stage_title", words));
}

// Steps as bars: the more chunks wait, the higher.
function queueRow(found) {
  const most = Math.max(1, ...found.queue.map(([, waiting]) => waiting));
  const bars = found.queue.flatMap(([from, waiting], i) => {
    const to = found.queue[i + 1]?.[0] ?? found.seconds;
    if (!waiting || to <= from) return [];
    const one = bar(from, to, found, "waiting", "", t("queue_title", { n: waiting, from: seconds(from), to: seconds(to) }));
    one.style.height = `${(100 * waiting) / most}%`;
    return [one];
  });
  return row(t("lane_queue"), bars, t("at_most", { n: bars.length ? most : 0 }), "queue");
}

// Round numbers of seconds, about TICKS of them.
function axis(length) {
  const rough = length / TICKS;
  const size = 10 ** Math.floor(Math.log10(rough || 1));
  const step = [1, 2, 5, 10].map((x) => x * size).find((x) => x >= rough) ?? rough;
  const ticks = [];
  for (let i = 0; i * step <= length && i < 4 * TICKS; i += 1) {
    const left = (100 * i * step) / (length || 1);
    const side = left > 97 ? "last" : "";
    ticks.push(h("span", { class: `tick ${side}`, style: `left: ${left.toFixed(3)}%` }, String(Number((i * step).toPrecision(4)))));
  }
  return [h("div"), h("div", { class: "axis num" }, ticks), h("div", { class: "lane-note" }, "s")];
}

function legend(found) {
  const spans = found.lanes.flatMap((lane) => lane.spans);
  const trained = [...new Set(spans.filter((span) => span.trains && span.iteration !== null).map((span) => span.iteration))];
  const evaluates = spans.some((span) => span.sampler !== undefined && !(span.trains && span.iteration !== null));
  const stages = ["rollout", "reward", "forward", "update", "between"].filter((stage) => spans.some((span) => span.stage === stage));
  const named = stages.map((stage) => (stage === "rollout" && !found.apart ? "samples" : stage));
  const key = (classes, text) => h("span", { class: "key-of" }, h("span", { class: `span box ${classes}` }), text);
  return h(
    "div",
    { class: "legend" },
    trained.sort((a, b) => a - b).map((n) => key(`for${n % HUES}`, t("rows_for", { n }))),
    evaluates ? key("evaluates", t("evaluation")) : null,
    named.map((stage) => key(`stage ${stage}`, t(`stage_${stage}`))),
  );
}

function rowsOf(span) {
  return span.rows ? `${span.rows[0]}–${span.rows[1] - 1}` : null;
}

function forWhom(span) {
  return span.trains && span.iteration !== null ? t("iteration_n", { n: span.iteration }) : t("evaluation");
}

function staleness(span) {
  return span.trains && span.iteration !== null && span.version !== null ? span.iteration - span.version : null;
}

function seconds(x) {
  return x.toFixed(Math.abs(x) < 10 ? 2 : 1).replace("-", "\u2212");
}

function share(x) {
  return typeof x === "number" && Number.isFinite(x) ? `${Math.round(100 * x)}%` : "–";
}
