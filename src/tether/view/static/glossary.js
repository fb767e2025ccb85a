// What each metric means. English comes with the run, from the glossary that the docs are made
// of; Chinese is here. A metric without an entry is shown in English.

import { spoken } from "./words.js";

const CHINESE_MEANINGS = {
  "score/mean": "奖励函数给出的平均得分。应当上升；一开始就不动，可能是所有得分都相同。",
  "score/std": "各行得分的离散程度。为 0 表示得分全都一样，除了 KL 之外没有东西可学。",
  "response/length_mean": "每个回答的 token 数，含结束符。留意漂移：趋向上限多半是啰嗦，趋向 1 则是放弃作答。",
  "tools/calls_mean": "每个回答调用工具的次数，含失败的调用（仅在使用工具时）。",
  "tools/invalid_mean": "每个回答中无法执行的调用次数：标记有误、参数有误或轮次用尽。应当下降。",
  "tools/observed_tokens_mean": "每个回答中策略只读不写的 token 数：计入长度上限，不计入任何损失。",
  "response/eos_rate": "由模型自己结束的回答所占比例，其余被截断。接近 1 为好。",
  "rollout/log_prob_diff_max": "采样器与训练前向之间对数概率的最大差距。float32 下应低于 1e-4，只是舍入误差。",
  "kl/token_mean": "每个 token 相对参考模型的 KL（nat）。从 0 开始，随策略移动而增长。",
  "kl/sequence_mean": "每个回答相对参考模型的 KL（nat）。得分没涨它却猛涨时，应加大 KL 系数或降低学习率。",
  "kl/coef": "beta，即本轮奖励中 KL 的权重。",
  "reward/mean": "各行“得分 − beta × KL”的均值，也就是 PPO 所最大化的量。应当上升。",
  "advantage/mean": "白化之前每个 token 的平均优势。Critic 跟上之后应接近 0。",
  "advantage/std": "白化之前优势的离散程度。Critic 学得越好，它越小。",
  "advantage/zero_spread_share": "组内得分全部相同的组所占比例，这些组除了奖励中的 KL 之外学不到东西（grpo 则什么也学不到）。接近 1 说明题目太易或太难。",
  "value/mean": "Critic 给出的平均价值。从 0 开始，应逐渐接近平均奖励。",
  "critic/explained_variance": "Critic 更新前能解释的回报方差比例。1 为完美，0 相当于常数，负数比常数还差。",
  "actor/penalty_coef": "本轮损失中相对旧策略 KL 的权重（仅 penalty）。",
  "critic/vf_clipfrac": "价值损失由裁剪决定的 token 比例。应当较小。",
  "critic/grad_norm": "裁剪前 Critic 的梯度范数。应当平稳。",
  "critic/vf_loss": "被最小化的价值损失。先下降，之后随得分的离散程度变化。",
  "critic/lr": "Critic 本轮的学习率。",
  "critic/steps": "Critic 本轮的优化步数。",
  "actor/entropy": "下一个 token 分布的精确熵（nat）。应缓慢下降；突然降到 0 就是坍缩。",
  "actor/approx_kl": "一轮更新使策略移动了多远：KL(旧‖新)。通常低于 0.02，尖峰说明步子太大。",
  "actor/pg_clipfrac": "被裁剪去掉梯度的 token 比例。0 到 0.2 较常见；太高说明步子太大。",
  "actor/pg_clipfrac_high": "其中比率过高的部分。",
  "actor/pg_clipfrac_low": "其中比率过低的部分。",
  "actor/ratio_max": "更新中新旧概率之比的最大值。上百说明策略发生了跳跃。",
  "actor/ratio_min": "更新中新旧概率之比的最小值。接近 0 说明某个 token 几乎被禁止。",
  "actor/grad_norm": "裁剪前策略的梯度范数。应当平稳；为 0 说明没有东西可学。",
  "actor/pg_loss": "被最小化的策略损失。在 0 附近波动，高低意义不大，请看得分与 KL。",
  "actor/entropy_loss": "负的熵，即乘以系数之前的损失项。",
  "actor/kl_loss": "损失中相对参考模型的 KL，乘以系数之前。",
  "actor/stopped_at_step": "因相对旧策略的 KL 超过上限而提前停止时，已走的步数。",
  "actor/lr": "策略本轮的学习率。",
  "actor/steps": "策略本轮的优化步数。",
  "actor/exact_kl": "更新后在整个词表上的 KL(旧‖新)（仅 trpo）。",
  "actor/line_search_tries": "线搜索试过的步长数（仅 trpo）。通常一两次。",
  "actor/step_share": "实际步长占最大步长的比例（仅 trpo）。",
  "time/rollout": "采样回答所用的秒数。",
  "time/reward": "打分所用的秒数。",
  "time/forward": "计算旧对数概率、参考对数概率与价值所用的秒数。",
  "time/update": "更新 Critic 与策略所用的秒数。",
  "time/iteration": "整轮所用的秒数，不含评估与存档。",
  "throughput/tokens_per_second": "每秒处理的回答 token 数，用来比较机器与设置。",
};

export function meaningOf(name, glossary) {
  if (spoken() === "zh" && Object.hasOwn(CHINESE_MEANINGS, name)) return CHINESE_MEANINGS[name];
  const entry = Object.hasOwn(glossary ?? {}, name) ? glossary[name] : null; // "constructor" has none
  // The docs mark names by backticks; here they would show.
  return entry ? `${sentence(entry.meaning)} ${entry.reading}`.replaceAll("`", "") : "";
}

// One line about a per-token column, from the list that writer, trace and page share.
export function columnMeaning(name, columns) {
  return Object.hasOwn(columns ?? {}, name) ? (columns[name][spoken()] ?? "") : "";
}

function sentence(text) {
  return `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
}
