// The columns of a row in a table: what tether wrote, and what the row of data held beside the
// prompt, such as the right answer.

import { t } from "./words.js";

const NUMBERS = ["score", "kl", "reward", "advantage", "length"];
const FIRST_OF_DATA = ["answer", "ground_truth", "solution", "target"];
const SHOWN_OF_DATA = 2; // columns of data in the table at first

// [{name, words, isNumber, of, shown}], in the order of the table.
export function rowColumns(rows) {
  const own = (name, isNumber) => ({ name, words: t(name), isNumber, of: (row) => row[name], shown: true });
  const data = keysOf(rows, "columns").sort((a, b) => rank(a) - rank(b));
  const parts = keysOf(rows, "score_parts");
  return [
    own("row", true),
    own("prompt", false),
    own("response", false),
    ...data.map((key, at) => inner("columns", key, key, rows, at < SHOWN_OF_DATA)),
    ...NUMBERS.map((name) => own(name, true)),
    ...parts.map((key) => inner("score_parts", key, `${t("score")}: ${key}`, rows, parts.length > 1)),
    own("finish_reason", false),
  ];
}

function inner(field, key, words, rows, shown) {
  const of = (row) => (Object.hasOwn(row[field] ?? {}, key) ? row[field][key] : null);
  const known = rows.map(of).filter((value) => value !== null);
  const isNumber = known.length > 0 && known.every((value) => typeof value === "number");
  return { name: `${field}.${key}`, words, isNumber, of, shown };
}

function keysOf(rows, field) {
  return [...new Set(rows.flatMap((row) => Object.keys(row[field] ?? {})))];
}

function rank(name) {
  const at = FIRST_OF_DATA.indexOf(name);
  return at === -1 ? FIRST_OF_DATA.length : at;
}
