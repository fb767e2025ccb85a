// What the page holds of a run: its description, its curves and its evaluations. Each refresh asks
// only for lines that are new; after a resume cut the file back, it starts afresh.

import { get, runPath } from "./api.js";

export class RunSeries {
  constructor(id) {
    this.id = id;
    this.about = null;
    this.problems = [];
    this.evals = [];
    this.turn = Promise.resolve();
    this.seen = null; // what the listing said when this was last refreshed
    this.restart([]);
  }

  restart(names) {
    this.names = names;
    this.iteration = [];
    this.values = new Map(names.map((name) => [name, []])); // a metric may be named "__proto__"
    this.next = 0;
    this.generation = null; // of the file: another one means that it was begun anew
  }

  // True when there is something new to draw. One at a time: two views may ask for the same lines.
  refresh(listed, wanted) {
    this.turn = this.turn.catch(() => {}).then(() => this.ask(listed, wanted));
    return this.turn;
  }

  async ask(listed, wanted) {
    const state = `${listed.modified} ${listed.iterations} ${listed.state} ${wanted.join()}`;
    if (state === this.seen) return false;
    if (wanted.join() !== this.names.join()) this.restart(wanted);
    const [about, series, evals] = await Promise.all([
      this.describe(listed),
      get(this.question()),
      get(runPath(this.id, "evals")),
    ]);
    this.about = about;
    this.take(series);
    this.evals = evals.evals;
    this.problems = [...this.about.problems, ...series.problems, ...evals.problems];
    this.seen = state;
    return true;
  }

  question() {
    const query = new URLSearchParams({ names: this.names.join(), since: this.next });
    if (this.generation !== null) query.set("generation", this.generation);
    return `${runPath(this.id, "series")}?${query}`;
  }

  // Names and rollouts change while a run goes on, the first ones above all.
  describe(listed) {
    return this.seen && listed.state !== "running" ? this.about : get(runPath(this.id));
  }

  take(answer) {
    if (answer.reset || this.next === 0) this.restart(this.names);
    this.iteration = this.iteration.concat(answer.iteration);
    for (const name of this.names) {
      const more = answer.values[name] ?? answer.iteration.map(() => null);
      this.values.set(name, this.values.get(name).concat(more));
    }
    this.next = answer.next;
    this.generation = answer.generation ?? null;
  }

  last(name) {
    return this.values.get(name)?.findLast((value) => value !== null) ?? null;
  }
}

const cache = new Map(); // so that coming back to a run asks only for what is new

export function seriesOf(id) {
  if (!cache.has(id)) cache.set(id, new RunSeries(id));
  return cache.get(id);
}
