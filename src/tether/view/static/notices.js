// What the doctor finds in a run, also while it trains: the trouble, its numbers, what to change.

import { get, runPath } from "./api.js";
import { h } from "./dom.js";
import { number, visible } from "./text.js";
import { spoken, t } from "./words.js";

export class Notices {
  constructor(id) {
    this.path = runPath(id, "notices");
    this.element = h("section", { class: "notices", "aria-live": "polite" });
    this.opened = new Set(); // by rule, as it is drawn anew while the run goes on
  }

  async refresh() {
    const { findings, judged, rules, begun, fewest } = await get(this.path);
    const calm = begun ? t("doctor_begun", { n: fewest }) : t("doctor_calm", { judged, rules });
    this.element.replaceChildren(
      h("h2", {}, t("doctor")),
      ...(findings.length ? findings.map((finding) => this.card(finding)) : [h("p", { class: "muted" }, calm)]),
    );
  }

  card({ rule, what, change, fields, readings, message, link }) {
    const details = h(
      "details",
      { class: "card notice" },
      h("summary", { class: "warn" }, what[spoken()]),
      h("ul", {}, readings.map((reading) => h("li", { class: "num" }, said(reading)))),
      message === null ? null : h("p", { class: "model-text" }, visible(message)),
      h("p", {}, change[spoken()]),
      h("p", { class: "facts muted" }, [...fields, link].map((text) => h("code", {}, text))),
    );
    details.open = this.opened.has(rule);
    details.addEventListener("toggle", () => this.opened[details.open ? "add" : "delete"](rule));
    return details;
  }
}

function said({ name, first, last }) {
  const at = ({ iteration, value }) => t("doctor_at", { value: number(value), n: iteration });
  return `${name}: ${[first, last].filter(Boolean).map(at).join(" → ")}`;
}
