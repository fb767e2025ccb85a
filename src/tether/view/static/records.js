// What a run wrote down in words: its events and its config.

import { exported, get, runPath } from "./api.js";
import { button, h, scrollTable } from "./dom.js";
import { csvButton, tableCells } from "./download.js";
import { runTabs } from "./run.js";
import { number, visible, visibleLines } from "./text.js";
import { t } from "./words.js";

const PAGE = 200;

export async function eventsView(page, id) {
  const body = h("div");
  let offset = 0;

  async function show() {
    const answer = await get(`${runPath(id, "events")}?offset=${offset}&limit=${PAGE}`);
    page.problems(answer.problems);
    const events = exported() ? answer.events.slice(offset, offset + PAGE) : answer.events;
    const turn = (by) => {
      offset += by;
      page.run(show);
    };
    body.replaceChildren(
      h("p", { class: "muted" }, answer.total ? t("events_total", { total: answer.total }) : t("no_events")),
      answer.total ? eventTable(events) : "",
      h(
        "p",
        {},
        offset > 0 ? button(t("newer"), () => turn(-PAGE)) : "",
        " ",
        offset + PAGE < answer.total ? button(t("older"), () => turn(PAGE)) : "",
      ),
    );
  }

  await show();
  return {
    element: h("div", {}, runTabs(id, "events"), h("h1", {}, t("events")), body),
    tick: () => (offset === 0 ? show() : null),
  };
}

function eventTable(events) {
  const fields = ["iteration", "kind", "row", "message", "attempt"];
  const heads = fields.map((field) => [t(field)]);
  const rows = events.map((event) => h("tr", {}, fields.map((field) => eventCell(event, field))));
  const table = scrollTable(t("events"), "scroll", null, heads, rows);
  return h("div", {}, h("p", {}, csvButton("events", () => tableCells(table.querySelector("table")))), table);
}

function eventCell(event, field) {
  const value = event[field];
  if (typeof value === "number" || value === null) return h("td", { class: "num" }, number(value));
  return h("td", { class: field === "message" ? "model-text wide" : "model-text" }, visible(value));
}

export async function configView(page, id) {
  const about = await get(runPath(id));
  page.problems(about.problems);
  return {
    element: h(
      "div",
      {},
      runTabs(id, "config"),
      h("h1", {}, t("config")),
      h("p", { class: "muted" }, t("config_note"), " ", h("a", { href: "#/table" }, t("config_compare"))),
      h("pre", { class: "card scroll model-text", tabindex: "0" }, visibleLines(about.config_text)),
    ),
  };
}
