// What changed from one text to the next, word by word: del and ins, as elements of text.

import { h } from "./dom.js";
import { visibleLines } from "./text.js";

const WORDS = /\p{Script=Han}|[\p{L}\p{N}_]+|\s+|./gsu; // Chinese has no spaces between words
const MAX_CELLS = 1_000_000; // of the table of the longest common subsequence

// [{kind: "same" | "gone" | "new", text}]
export function difference(before, after) {
  const a = String(before ?? "").match(WORDS) ?? [];
  const b = String(after ?? "").match(WORDS) ?? [];
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end)) end += 1;
  const middle = between(a.slice(start, a.length - end), b.slice(start, b.length - end));
  return joined([
    ...a.slice(0, start).map((text) => ({ kind: "same", text })),
    ...middle,
    ...(end ? a.slice(-end) : []).map((text) => ({ kind: "same", text })),
  ]);
}

function between(a, b) {
  const gone = (text) => ({ kind: "gone", text });
  const fresh = (text) => ({ kind: "new", text });
  if (a.length * b.length > MAX_CELLS) return [...a.map(gone), ...b.map(fresh)];
  const table = Array.from({ length: a.length + 1 }, () => new Uint32Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      table[i][j] = a[i] === b[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  const made = [];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      made.push({ kind: "same", text: a[i] });
      i += 1;
      j += 1;
    } else if (j === b.length || (i < a.length && table[i + 1][j] >= table[i][j + 1])) made.push(gone(a[i++]));
    else made.push(fresh(b[j++]));
  }
  return made;
}

function joined(parts) {
  const made = [];
  for (const part of parts) {
    if (made.at(-1)?.kind === part.kind) made.at(-1).text += part.text;
    else made.push({ ...part });
  }
  return made;
}

const TAGS = { same: "span", gone: "del", new: "ins" };

export function differenceText(before, after) {
  const parts = difference(before, after);
  return h("span", { class: "model-text" }, parts.map(({ kind, text }) => h(TAGS[kind], {}, visibleLines(text))));
}
