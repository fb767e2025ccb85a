// The settings of a what-if as sliders and choices. Which there are, and within which bounds, the
// server says: each is a field of the config. What is changed goes into the address.

import { Refused, get } from "./api.js";
import { button, debounce, h, labelled, select } from "./dom.js";
import { currentPlace, noteChoice } from "./place.js";
import { t } from "./words.js";

const NONE = "none"; // no such bound

export class Controls {
  // path: where to ask; onAnswer: what to do with an answer.
  constructor(path, onAnswer) {
    Object.assign(this, { path, onAnswer, asked: 0, changed: new Map(), settings: [] });
    this.later = debounce(150, () => this.ask());
    this.fields = h("div", { class: "controls" });
    this.said = h("p", { class: "muted", role: "status" }, t("computing"));
    this.element = h("div", {}, this.fields, h("p", {}, button(t("reset"), () => this.reset())), this.said);
  }

  // They come with the answer: a controller may have moved the run's own from iteration to iteration.
  async begin() {
    try {
      this.settings = (await get(`${this.path}/whatif`)).controls;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      this.said.textContent = error.message;
      return;
    }
    for (const { name } of this.settings) {
      const value = currentPlace().choices.get(name);
      if (value !== null) this.changed.set(name, value);
    }
    this.build();
    await this.ask();
  }

  build() {
    this.fields.replaceChildren(...this.settings.map((setting) => this.field(setting)));
  }

  at({ name, value }) {
    return this.changed.get(name) ?? value;
  }

  field(setting) {
    const field = setting.options
      ? this.choice(setting)
      : setting.optional
        ? this.switched(setting)
        : this.slider(setting);
    field.title = setting.doc;
    return field;
  }

  choice(setting) {
    const options = setting.options.map((option) => [option, option]);
    const change = (value) => this.set(setting, value);
    return labelled(setting.name, select(options, String(this.at(setting)), change));
  }

  slider(setting) {
    const { name, low, high, step } = setting;
    const at = this.at(setting) ?? "";
    const follow = (from, to) => () => {
      to.value = from.value;
      this.set(setting, from.value);
    };
    const exact = h("input", { type: "number", step: "any", class: "short", value: at });
    const range = h("input", { type: "range", min: low, max: high, step, "aria-label": name });
    range.value = at;
    range.addEventListener("input", follow(range, exact));
    exact.addEventListener("input", follow(exact, range));
    const field = labelled(name, exact);
    field.classList.add("slider");
    field.append(range);
    return field;
  }

  // A bound that may be absent: a box to tick, and its number.
  switched(setting) {
    const at = this.at(setting);
    const on = at !== null && at !== NONE;
    const box = h("input", { type: "checkbox", "aria-label": t("use", { name: setting.name }) });
    box.checked = on;
    const value = on ? at : setting.usual;
    const exact = h("input", { type: "number", step: "any", class: "short", value });
    const follow = () => this.set(setting, box.checked ? exact.value : NONE);
    box.addEventListener("change", follow);
    exact.addEventListener("input", () => box.checked && follow());
    const field = labelled(setting.name, exact);
    field.append(h("span", { class: "field" }, box, exact));
    return field;
  }

  set({ name, value: own }, value) {
    if (value === "" || value === String(own ?? NONE)) this.changed.delete(name);
    else this.changed.set(name, value);
    noteChoice(name, this.changed.get(name));
    this.later();
  }

  reset() {
    this.changed.clear();
    for (const { name } of this.settings) noteChoice(name, null);
    this.build();
    this.ask();
  }

  // Answers may overtake one another; only the one to the last question is shown.
  async ask() {
    const question = ++this.asked;
    const query = new URLSearchParams([...this.changed]).toString();
    try {
      const answer = await get(`${this.path}/whatif${query ? `?${query}` : ""}`);
      if (question === this.asked) await this.onAnswer(answer);
    } catch (error) {
      const sentence = error instanceof Refused ? error.message : t("gone");
      if (question === this.asked) this.said.textContent = sentence;
    }
  }
}
