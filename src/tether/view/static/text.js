// Numbers with four significant digits, and model text in which nothing hides.

const MISSING = "–";
const MINUS = "\u2212";

export function number(x) {
  if (typeof x !== "number") return MISSING;
  return decimal(x).replace("-", MINUS).replace("e-", `e${MINUS}`);
}

function decimal(x) {
  if (Number.isInteger(x) && Math.abs(x) < 1e6) return String(x);
  const size = Math.abs(x);
  return size >= 1e-4 && size < 1e6 ? x.toPrecision(4) : x.toExponential(3);
}

// A setting as it was written: 0.2, not 0.2000.
export function setting(x) {
  return typeof x === "number" ? String(Number(x.toPrecision(6))).replace("-", MINUS) : MISSING;
}

// In a formula a negative number after an operator wants brackets.
export function term(x) {
  return typeof x === "number" && x < 0 ? `(${number(x)})` : number(x);
}

export function percent(logProb) {
  if (typeof logProb !== "number") return MISSING;
  const share = 100 * Math.exp(logProb);
  return `${share >= 99.95 && share < 100 ? share.toFixed(3) : share.toPrecision(3)}%`;
}

export function fullValue(x) {
  return typeof x === "number" ? String(x) : "";
}

// Controls, direction marks, invisible and unassigned characters. The two joiners stay: scripts
// and emoji need them, and they reorder nothing.
const HIDDEN = /(?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}]/gu;

function symbolOf(character) {
  const code = character.codePointAt(0);
  if (character === "\n") return "↵"; // more fonts have it than ␊
  if (code < 0x20) return String.fromCodePoint(0x2400 + code); // ␀ … ␛ … ␟
  if (code === 0x7f) return "␡";
  return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
}

// On one line: a line break becomes a sign too.
export function visible(text) {
  return String(text ?? "").replace(HIDDEN, symbolOf);
}

// Over several lines, as it was written.
export function visibleLines(text) {
  return String(text ?? "").replace(HIDDEN, (c) => (c === "\n" || c === "\t" ? c : symbolOf(c)));
}

// A token: its spaces count, so they are seen.
export function visibleToken(text) {
  return visible(text).replaceAll(" ", "·") || "∅";
}
