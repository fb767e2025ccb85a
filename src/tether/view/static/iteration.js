// One iteration: its rows in a table, in groups, as pictures, and under other settings.

import { get, runPath } from "./api.js";
import { batchPanel } from "./batch.js";
import { button, h, labelled, link } from "./dom.js";
import { groupList } from "./groups.js";
import { currentPlace } from "./place.js";
import { pictureBoard } from "./pictures.js";
import { rowTable } from "./rows.js";
import { runTabs } from "./run.js";
import { t } from "./words.js";

const PARTS = { rows: rowTable, groups: groupList, pictures: pictureBoard, batch: batchPanel };

export async function iterationView(page, id, which) {
  const about = await get(runPath(id));
  const iterations = about.rollouts;
  if (!iterations.length) {
    page.problems(about.problems);
    const note = h("p", { class: "muted" }, t("no_rollouts"));
    return { element: h("div", {}, runTabs(id, "look"), h("h1", {}, t("look")), note) };
  }
  const iteration = which === "last" ? iterations.at(-1) : Number(which);
  const answer = await get(runPath(id, "rollouts", iteration));
  page.problems([...about.problems, ...answer.problems]);
  const asked = currentPlace().choices.get("show");
  const part = Object.hasOwn(PARTS, asked ?? "") ? asked : "rows";
  const made = PARTS[part]({ page, id, iteration, about, rows: answer.rows });
  const go = (index) => {
    if (iterations[index] !== undefined) location.hash = address(id, iterations[index], part);
  };
  const at = iterations.indexOf(iteration);
  return {
    element: h(
      "div",
      {},
      runTabs(id, "look"),
      h("h1", {}, t("iteration_n", { n: iteration })),
      picker(iteration, iterations, go),
      parts(id, iteration, part),
      made.element,
    ),
    keys: [
      ["[", t("key_previous"), () => go(at - 1)],
      ["]", t("key_next"), () => go(at + 1)],
      ...(made.keys ?? []),
    ],
    start: () => made.start?.(),
  };
}

function address(id, iteration, part) {
  return link("run", id, "iteration", iteration) + (part === "rows" ? "" : `?show=${part}`);
}

function parts(id, iteration, active) {
  const links = Object.keys(PARTS).map((part) =>
    h("a", { href: address(id, iteration, part), "aria-current": part === active ? "page" : null }, t(`part_${part}`)),
  );
  return h("nav", { class: "tabs parts", "aria-label": t("iteration_n", { n: iteration }) }, links);
}

function picker(iteration, iterations, go) {
  const at = iterations.indexOf(iteration);
  const slider = h("input", {
    type: "range",
    min: 0,
    max: iterations.length - 1,
    value: at,
    "aria-label": t("iteration"),
    "aria-valuetext": String(iteration),
    on: {
      input: () => (exact.value = iterations[slider.value]),
      change: () => go(slider.value),
    },
  });
  const exact = h("input", {
    type: "number",
    min: 0,
    value: iteration,
    on: { change: () => go(nearest(iterations, Number(exact.value))) },
  });
  return h(
    "div",
    { class: "bar" },
    button(t("previous"), () => go(at - 1), { disabled: at <= 0 }),
    slider,
    button(t("next"), () => go(at + 1), { disabled: at >= iterations.length - 1 }),
    labelled(t("iteration"), exact),
  );
}

function nearest(iterations, wanted) {
  const distance = (i) => Math.abs(iterations[i] - wanted);
  return iterations.reduce((best, _, i) => (distance(i) < distance(best) ? i : best), 0);
}
