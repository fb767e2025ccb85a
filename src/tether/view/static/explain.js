// One token in words, in the order of the data flow: each step is a formula with its numbers and
// a sentence that says what they mean.

import { number, percent, setting, term } from "./text.js";
import { t } from "./words.js";

// One {name, formula, sentence} per step; a step whose numbers an older run lacks is left out.
export function explainToken(row, settings, at) {
  const cell = (column) => row.columns[column]?.[at] ?? null;
  const next = nextSampled(row.mask, at);
  return [
    chance(cell),
    divergence(cell, settings),
    reward(cell, row),
    surprise(cell, row, settings, next),
    advantage(cell, row, settings, next),
    whitened(cell, row, settings),
    ratio(cell, row, settings, at),
    objective(cell, settings),
  ].filter(Boolean);
}

function has(...values) {
  return values.every((value) => typeof value === "number");
}

// Tool output is stepped over: value and advantage pass it unchanged.
function nextSampled(mask, at) {
  const next = mask.indexOf(true, at + 1);
  return next === -1 ? null : next;
}

function chance(cell) {
  const [old, ref, now] = [cell("old_log_probs"), cell("ref_log_probs"), cell("new_log_probs")];
  if (!has(old, ref)) return null;
  return {
    name: t("step_chance"),
    formula: `log π_old = ${number(old)}, log π_ref = ${number(ref)}`,
    sentence: t("say_chance", { old: percent(old), ref: percent(ref), new: percent(now) }),
  };
}

function divergence(cell, { kl_estimator: estimator }) {
  const [kl, old, ref] = [cell("kl"), cell("old_log_probs"), cell("ref_log_probs")];
  if (!has(kl, old, ref)) return null;
  const difference = `log π_old − log π_ref = ${number(old)} − ${term(ref)}`;
  const formula = estimator === "k1" ? difference : estimator;
  const words = Math.abs(kl) < 1e-6 ? "say_kl_same" : kl > 0 ? "say_kl_more" : "say_kl_less";
  return { name: t("step_kl"), formula: `${formula} = ${number(kl)}`, sentence: t(words) };
}

function reward(cell, row) {
  const [r, score] = [cell("token_level_rewards"), cell("token_level_scores")];
  const [kl, beta] = [cell("kl"), row.row.beta];
  if (!has(r, score, kl, beta)) return null;
  return {
    name: t("step_reward"),
    formula: `r = score − β·KL = ${number(score)} − ${setting(beta)} × ${term(kl)} = ${number(r)}`,
    sentence: score !== 0 ? t("say_score_here") : "",
  };
}

function valueAfter(row, next) {
  return next === null ? row.row.final_value ?? 0 : row.columns.values?.[next];
}

function surprise(cell, row, { gamma, needs_critic: needsCritic }, next) {
  const [delta, r, value] = [cell("deltas"), cell("token_level_rewards"), cell("values")];
  const after = valueAfter(row, next);
  if (!needsCritic || !has(delta, r, value, after)) return null;
  const numbers = `${number(r)} + ${setting(gamma)} × ${term(after)} − ${term(value)}`;
  const words = [t(delta < 0 ? "say_delta_down" : "say_delta_up")];
  if (next === null) words.push(t(after === 0 ? "say_last" : "say_truncated"));
  const formula = `δ = r + γ·V_next − V = ${numbers} = ${number(delta)}`;
  return { name: t("step_delta"), formula, sentence: words.join(" ") };
}

function advantage(cell, row, settings, next) {
  const { gamma, estimator, needs_critic: needsCritic } = settings;
  const lam = rowLambda(row, settings);
  const [a, delta] = [cell("advantages"), cell("deltas")];
  if (!has(a)) return null;
  if (!needsCritic) {
    const formula = `${settings.advantage_formula} = ${number(a)}`;
    return { name: t("step_advantage"), formula, sentence: t("say_group", { estimator }) };
  }
  const later = next === null ? 0 : row.columns.advantages[next];
  if (!has(delta, later)) return null;
  const numbers = `${number(delta)} + ${setting(gamma)} × ${setting(lam)} × ${term(later)}`;
  return {
    name: t("step_advantage"),
    formula: `Â = δ + γλ·Â_next = ${numbers} = ${number(a)}`,
    sentence: t(balance(delta, later, a)),
  };
}

// The lambda of one row: by its sampled tokens where advantage.lam_alpha is set.
function rowLambda(row, { lam, lam_alpha: alpha }) {
  if (typeof alpha !== "number") return lam;
  const tokens = (row.row.response_mask ?? []).filter(Boolean).length;
  return 1 - 1 / Math.max(1, alpha * tokens);
}

// Why the advantage has its sign: this token, or what came after it?
function balance(delta, later, a) {
  if (later === 0) return "say_alone";
  if (delta < 0 === later < 0) return a < 0 ? "say_both_down" : "say_both_up";
  if (a < 0) return delta < 0 ? "say_kept_down" : "say_carried_down";
  return delta < 0 ? "say_carried_up" : "say_kept_up";
}

function whitened(cell, row, { whitens }) {
  const [a, policy] = [cell("advantages"), cell("policy_advantages")];
  const { mean, variance } = row.row.whitening ?? {};
  if (!whitens || !has(a, policy, mean, variance)) return null;
  const numbers = `(${number(a)} − ${term(mean)}) / √${number(variance)}`;
  return { name: t("step_whiten"), formula: `${numbers} = ${number(policy)}`, sentence: t("say_whiten") };
}

function ratio(cell, row, { bound }, at) {
  const rho = cell("ratio");
  if (!has(rho)) return null;
  const formula = `ρ = exp(log π_new − log π_old) = ${number(rho)}`;
  if (!row.outside) return { name: t("step_ratio"), formula, sentence: "" };
  const state = row.clip[at];
  const words = state ? `say_clip_${state}` : row.outside[at] ? "say_outside" : "say_inside";
  return { name: t("step_ratio"), formula, sentence: t(words, { bound }) };
}

function objective(cell, { objective_formula: formula }) {
  const [value, weight] = [cell("objective"), cell("correction_weights")];
  if (!formula || !has(value)) return null;
  const corrected = has(weight);
  return {
    name: t("step_objective"),
    formula: `${number(value)} = ${corrected ? `${number(weight)} × (${formula})` : formula}`,
    sentence: corrected ? t("say_corrected") : "",
  };
}
