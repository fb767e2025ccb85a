// The turns of an episode: what each was given, and the credit that flows back through them.

import { h, scrollTable } from "./dom.js";
import { number, visibleLines } from "./text.js";
import { t } from "./words.js";

// Runs of tokens that the policy wrote, as [first, last].
function policyTurns(mask) {
  const turns = [];
  mask.forEach((own, at) => {
    if (!own) return;
    if (at && mask[at - 1]) turns.at(-1)[1] = at;
    else turns.push([at, at]);
  });
  return turns;
}

// A row of one turn has no such table: its tokens say it all.
export function turnTable(row) {
  const turns = policyTurns(row.mask);
  if (turns.length < 2) return null;
  const cells = (name, [first, last]) =>
    (row.columns[name] ?? []).slice(first, last + 1).filter((x) => typeof x === "number");
  const sum = (name, turn) => {
    const found = cells(name, turn);
    return found.length ? found.reduce((a, b) => a + b, 0) : null;
  };
  const mean = (name, turn) => {
    const total = sum(name, turn);
    return total === null ? null : total / cells(name, turn).length;
  };
  const num = (x) => h("td", { class: "num" }, number(x));
  const lines = turns.map((turn, at) => {
    const text = row.tokens.slice(turn[0], turn[1] + 1).map((token) => token ?? "").join("");
    return h(
      "tr",
      {},
      num(at + 1),
      h("td", { class: "model-text" }, visibleLines(text)),
      num(sum("token_level_scores", turn)),
      num(sum("token_level_rewards", turn)),
      num(cells("values", turn)[0] ?? null),
      num(sum("deltas", turn)),
      num(mean("advantages", turn)),
    );
  });
  const heads = [
    [t("call_turn"), "num"],
    [t("response")],
    [t("score"), "num"],
    [t("reward"), "num"],
    [t("turn_value"), "num"],
    [t("turn_td"), "num"],
    [t("turn_advantage"), "num"],
  ];
  return h(
    "section",
    { class: "card turns" },
    h("h2", {}, t("turns")),
    h("p", { class: "muted" }, t("turns_help")),
    scrollTable(t("turns"), "scroll", "fit", heads, lines),
  );
}
