// Two runs side by side: the fields in which their configs differ, and what they reached.

import { get, runPath } from "./api.js";
import { h, link, scrollTable } from "./dom.js";
import { csvButton, tableCells } from "./download.js";
import { fullValue, number, visible } from "./text.js";
import { t } from "./words.js";

const OWN = ["run.dir", "run.name"]; // every run has its own
const TASK = ["data", "reward"]; // sections that say what is learnt

export async function diffView(page, a, b) {
  const [left, right, listed] = await Promise.all([get(runPath(a)), get(runPath(b)), get("/api/runs")]);
  page.problems([...left.problems, ...right.problems]);
  const fields = changedFields(left.config, right.config);
  const sentence = fields.length ? t("diff_fields", { n: fields.length }) : t("diff_none");
  const otherTask = fields.some(([name]) => TASK.includes(name.split(".")[0]));
  const configs = fieldTable(a, b, fields);
  const reached = resultTable(a, b, listed.runs);
  const csv = (name, table) => csvButton(name, () => tableCells(table.querySelector("table")));
  return {
    element: h(
      "div",
      {},
      h("h1", { class: "model-text" }, h("a", { href: link("run", a) }, a), " · ", h("a", { href: link("run", b) }, b)),
      otherTask ? h("p", { class: "warn" }, t("diff_task")) : null,
      h("h2", {}, t("reached"), " ", csv("results", reached)),
      reached,
      h("h2", {}, t("config"), " ", csv("config-diff", configs)),
      h("p", { class: "muted" }, sentence),
      fields.length ? configs : null,
    ),
  };
}

// [[name, left, right]] of the fields that differ; a missing one is undefined.
function changedFields(left, right) {
  const [a, b] = [new Map(leaves(left)), new Map(leaves(right))];
  const names = [...new Set([...a.keys(), ...b.keys()])].filter((name) => !OWN.includes(name));
  return names.filter((name) => a.get(name) !== b.get(name)).map((name) => [name, a.get(name), b.get(name)]);
}

function leaves(value, path = "", depth = 0) {
  if (value === null || typeof value !== "object" || Array.isArray(value) || depth > 8) {
    return [[path, value === undefined ? undefined : JSON.stringify(value)]];
  }
  return Object.entries(value).flatMap(([name, inner]) => leaves(inner, path ? `${path}.${name}` : name, depth + 1));
}

function fieldTable(a, b, fields) {
  const cell = (value) => h("td", { class: "model-text" }, value === undefined ? t("absent") : visible(value));
  const rows = fields.map(([name, left, right]) =>
    h("tr", {}, h("th", { scope: "row", class: "model-text" }, visible(name)), cell(left), cell(right)),
  );
  return scrollTable(t("config"), "scroll fit", null, [[t("field")], [a, "model-text"], [b, "model-text"]], rows);
}

function resultTable(a, b, runs) {
  const pair = [a, b].map((id) => runs.find((run) => run.id === id));
  const names = [...new Set(pair.flatMap((run) => Object.keys(run?.last ?? {})))];
  const cell = (value) => h("td", { class: "num", title: fullValue(value) }, number(value ?? null));
  const line = (words, of) => h("tr", {}, h("th", { scope: "row" }, words), pair.map((run) => cell(run && of(run))));
  const state = h("tr", {}, h("th", { scope: "row" }, t("state")), pair.map((run) => h("td", { class: "num" }, run ? t(run.state) : "–")));
  const rows = [
    state,
    line(t("iteration"), (run) => run.iterations),
    line(t("heldout"), (run) => run.heldout),
    ...names.map((name) => line(name, (run) => run.last[name])),
  ];
  return scrollTable(t("reached"), "scroll fit", null, [[""], [a, "model-text"], [b, "model-text"]], rows);
}
