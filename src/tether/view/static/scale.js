// From a number to a colour: blue above the centre, orange below, paler towards it.

import { h } from "./dom.js";
import { fullValue, number } from "./text.js";
import { t } from "./words.js";

export const CLIP = "clip";
const CLIP_STATES = ["", "high", "low", "dual", "capped"];

// A ratio of one is "no change"; everything else is read against zero.
export function centreOf(column) {
  return column === "ratio" ? 1 : 0;
}

export class Scale {
  constructor(column, values) {
    this.column = column;
    this.centre = centreOf(column);
    const distances = values.filter((x) => typeof x === "number").map((x) => Math.abs(x - this.centre));
    this.reach = Math.max(0, ...distances);
  }

  // The style sheet mixes the colour from a side and a share, so it follows the theme.
  paint(element, value) {
    if (typeof value !== "number") return;
    const share = this.reach ? Math.abs(value - this.centre) / this.reach : 0;
    element.classList.add(value < this.centre ? "below" : "above");
    element.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
  }

  legend() {
    const [low, high] = [this.centre - this.reach, this.centre + this.reach];
    const end = (x) => h("span", { class: "num", title: fullValue(x) }, number(x));
    return h(
      "div",
      { class: "legend" },
      h("strong", {}, this.column),
      end(low),
      h("span", { class: "ramp", role: "img", "aria-label": this.words() }),
      end(high),
      h("span", { class: "muted" }, this.words()),
    );
  }

  words() {
    const centre = this.centre;
    return `${t("below", { centre })} / ${t("above", { centre })}`;
  }
}

export class ClipScale {
  paint(element, state) {
    element.classList.add("state-chip");
    element.dataset.clip = CLIP_STATES.includes(state) ? state || "none" : "none";
  }

  legend() {
    const items = CLIP_STATES.map((state) => {
      const name = state || "none";
      return h("span", {}, h("span", { class: "box state-chip", "data-clip": name }), t(`clip_${name}`));
    });
    return h("div", { class: "legend" }, h("strong", {}, CLIP), items);
  }
}
