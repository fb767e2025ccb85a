// One prompt over the iterations: how the answers to it changed, with what is new and what is gone.

import { exported, get, runPath } from "./api.js";
import { button, h, link } from "./dom.js";
import { differenceText } from "./diff.js";
import { csvButton } from "./download.js";
import { dataFacts } from "./groups.js";
import { currentPlace } from "./place.js";
import { runTabs } from "./run.js";
import { number, visibleLines } from "./text.js";
import { t } from "./words.js";

// A prompt of the training data: its rows in every iteration that wrote them.
export async function promptView(page, id, which) {
  const line = Number(which);
  const file = currentPlace().choices.get("file");
  const about = await get(runPath(id));
  const list = new AnswerList(id, about.problems, page);
  const ask = exported() ? fromLists(id, about, file, line) : fromServer(id, file, line);
  return {
    element: h(
      "div",
      {},
      runTabs(id, "look"),
      h("h1", {}, t("over_time")),
      h("p", { class: "muted model-text" }, [file, t("data_line", { n: which })].filter(Boolean).join(", ")),
      list.element,
    ),
    async start() {
      for await (const answer of ask) {
        if (!list.element.isConnected) return; // the reader went elsewhere
        list.add(answer.rows.map(trained(id)), answer.problems);
      }
      list.finish();
    },
  };
}

function trained(id) {
  return (row) => ({
    iteration: row.iteration,
    kind: t("row_n", { n: row.row }),
    href: link("run", id, "iteration", row.iteration, "row", row.row),
    ...row,
  });
}

async function* fromServer(id, file, line) {
  let since = 0;
  while (since !== null) {
    const query = new URLSearchParams({ line, since, ...(file === null ? {} : { file }) });
    const answer = await get(`${runPath(id, "history")}?${query}`);
    yield answer;
    since = answer.next;
  }
}

// A saved copy has no server to search for it, but every list of rows.
async function* fromLists(id, about, file, line) {
  for (const iteration of about.rollouts) {
    const { rows, problems } = await get(runPath(id, "rollouts", iteration));
    const found = rows.filter((row) => row.data_line === line && (file === null || row.data_file === file));
    yield { rows: found.map((row) => ({ ...row, iteration })), problems };
  }
}

// A held-out prompt: its greedy and sampled response after every evaluation.
export async function heldoutPromptView(page, id, which) {
  const about = await get(runPath(id));
  const list = new AnswerList(id, about.problems, page);
  return {
    element: h("div", {}, runTabs(id, "heldout_tab"), h("h1", {}, t("over_time")), list.element),
    async start() {
      for (const iteration of about.heldout) {
        if (!list.element.isConnected) return;
        const { rows, problems } = await get(runPath(id, "heldout", iteration));
        const found = rows.filter((row) => row.row === Number(which));
        list.add(found.flatMap((row) => answers(iteration, row)), problems);
      }
      list.finish();
    },
  };
}

function answers(iteration, row) {
  return ["greedy", "sampled"].map((decoding) => ({
    iteration,
    kind: t(decoding),
    prompt: row.prompt,
    columns: row.columns,
    response: row[decoding].response,
    score: row[decoding].score,
    finish_reason: row[decoding].finish_reason,
  }));
}

class AnswerList {
  constructor(id, problems, page) {
    Object.assign(this, { id, page, problems, made: [], compared: true });
    this.prompt = h("div");
    this.state = h("p", { class: "muted", role: "status" }, t("searching"));
    this.body = h("div", { class: "history" });
    this.toggle = button(t("plain_text"), () => this.switch());
    const csv = csvButton(`${id}-prompt`, () => this.cells());
    this.element = h("div", {}, this.prompt, h("div", { class: "bar" }, this.toggle, csv), this.state, this.body);
    page.problems(problems);
  }

  add(entries, problems) {
    if (problems.length) this.page.problems((this.problems = [...this.problems, ...problems]));
    if (entries.length && !this.made.length) this.introduce(entries[0]);
    for (const entry of entries) {
      // Samples of one iteration are compared with those of the one before, in their order.
      const nth = this.made.filter((other) => other.iteration === entry.iteration).length;
      const earlier = this.made.findLast((other) => other.iteration < entry.iteration)?.iteration;
      const before = this.made.filter((other) => other.iteration === earlier)[nth] ?? null;
      this.made.push({ ...entry, before });
      this.body.append(this.entry(this.made.at(-1)));
    }
  }

  introduce({ prompt, columns }) {
    const said = h("p", { class: "model-text said" }, visibleLines(prompt));
    this.prompt.replaceChildren(h("section", { class: "card texts" }, h("h2", {}, t("prompt")), said, dataFacts(columns)));
  }

  entry({ iteration, kind, href, response, score, before }) {
    const text = this.compared && before ? differenceText(before.response, response) : h("span", { class: "model-text" }, visibleLines(response));
    return h(
      "article",
      { class: "card answer" },
      h(
        "p",
        { class: "facts" },
        h("b", {}, t("iteration_n", { n: iteration })),
        href ? h("a", { href }, kind) : h("span", {}, kind),
        h("span", {}, `${t("score")} `, h("b", { class: "num" }, number(score))),
      ),
      h("p", { class: "said" }, text),
    );
  }

  switch() {
    this.compared = !this.compared;
    this.toggle.textContent = t(this.compared ? "plain_text" : "show_diff");
    this.body.replaceChildren(...this.made.map((entry) => this.entry(entry)));
  }

  finish() {
    const iterations = new Set(this.made.map(({ iteration }) => iteration)).size;
    this.state.textContent = iterations > 1 ? t("diff_help") : t(iterations ? "seen_once" : "never_seen");
  }

  cells() {
    const rows = this.made.map(({ iteration, kind, prompt, response, score }) => [iteration, kind, prompt, response, score]);
    return [["iteration", "kind", "prompt", "response", "score"], ...rows];
  }
}
