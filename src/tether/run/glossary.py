"""Define every number in a run's files and how to read it, in data-flow order.

Imports nothing: the docs, the web page and the tests all take their words from here.
"""

from typing import NamedTuple


class Entry(NamedTuple):
    """What a number is, and how to read it."""

    meaning: str
    reading: str  # what is good, what is bad, what to do about it


METRICS: dict[str, Entry] = {
    "score/mean": Entry(
        "mean score that the reward gave, over the rows that could be scored",
        "Should rise. Flat from the start: every score may be the same, see `score/std`.",
    ),
    "score/std": Entry(
        "spread of the scores over rows",
        "0 means that all rows have the same score: only the KL is left to learn from.",
    ),
    "score/part/NAME": Entry(
        "mean of what the part NAME of `reward.parts` gave, before its weight, over the same rows",
        "Which part earns the score. One that rises while another falls: look at their weights.",
    ),
    "response/length_mean": Entry(
        "tokens per response that the policy wrote, EOS included",
        "Watch for drift. A rise towards `rollout.max_response_tokens` often means rambling, a "
        "fall towards 1 a policy that gives up.",
    ),
    "response/eos_rate": Entry(
        "share of responses that the model ended itself; the others were truncated",
        "Near 1 is healthy. Low: raise `rollout.max_response_tokens`, or the model never learnt "
        "to stop.",
    ),
    "tools/calls_mean": Entry(
        "tool calls per response, those that failed included (only with tools)",
        "Rises as the policy learns to ask. 0: it never does, see the prompt; at "
        "`rollout.max_turns` - 1: it may ask too much.",
    ),
    "tools/invalid_mean": Entry(
        "calls per response that could not be made: unreadable marks, wrong arguments, no turn "
        "left (only with tools)",
        "Should fall. The reasons are in `rollouts/`, under `calls`.",
    ),
    "tools/observed_tokens_mean": Entry(
        "tokens per response that the policy read and did not write (only with tools)",
        "They count towards `rollout.max_response_tokens`, and in no loss.",
    ),
    "rollout/lag": Entry(
        "iterations between the weights that sampled the rows and those that learn from them (only "
        "with `rollout.lag`)",
        "`rollout.lag` from iteration `rollout.lag` on, and 0, 1, 2 … before. Of every row the "
        "same.",
    ),
    "rollout/log_prob_diff_max": Entry(
        "largest gap between the sampler's log-prob of a token and the training forward's",
        "Rounding only: below 1e-4 in float32, a few tenths in bfloat16. More means that sampler "
        "and trainer disagree.",
    ),
    "rollout/log_prob_diff_mean": Entry(
        "mean per token of |log pi_old - log pi_rollout| (only with another engine as the sampler, "
        "with `model.compute: bfloat16`, `rollout.lag` or `rollout.correction`)",
        "Rounding: about 1e-7 in float32, 1e-3 to 3e-2 in bfloat16; with `rollout.lag` also what "
        "the weights have learnt since. A jump: the engine has not "
        "taken the newest weights.",
    ),
    "rollout/mismatch_kl": Entry(
        "KL(rollout || old) per token in nats, from the sampler's own draws (as above)",
        "How far the policy that sampled is from the one that learns. Far below "
        "`actor/approx_kl` is harmless.",
    ),
    "rollout/effective_share": Entry(
        "effective sample size of the correction's weights before they are capped, as a share of "
        "the tokens, or of the rows where `rollout.correction.kind` is sequence (as above)",
        "1: nothing is lost. 0.5: half of the samples are worth nothing; use the trainer's number "
        "format in the engine, or correct by token.",
    ),
    "kl/token_mean": Entry(
        "KL from the reference per token, in nats: mean of log pi_old - log pi_ref",
        "Starts at 0 and grows as the policy moves. Slightly below 0 is sampling noise.",
    ),
    "kl/sequence_mean": Entry(
        "KL from the reference per response, in nats: the sum of a row, mean over rows",
        "The distance paid for the score so far. Fast growth without a rising score: raise "
        "`kl.in_reward.coef` or lower `actor.lr`.",
    ),
    "kl/coef": Entry(
        "beta, the weight of the KL in this iteration's rewards",
        "Constant, or steered by `kl.in_reward.controller: adaptive`.",
    ),
    "reward/mean": Entry(
        "mean over rows of score - beta x KL: what PPO maximises",
        "Should rise. Falling while `score/mean` rises: the KL costs more than it earns.",
    ),
    "advantage/mean": Entry(
        "mean advantage per token, before whitening",
        "Near 0 once the critic knows what to expect. Far from 0: the critic is behind.",
    ),
    "advantage/std": Entry(
        "spread of the advantages, before whitening",
        "Shrinks as the critic learns. Near 0 with whitening on: noise is blown up to size 1.",
    ),
    "advantage/zero_spread_share": Entry(
        "share of groups whose responses all scored the same, among those with a usable row "
        "(group estimators only)",
        "They teach nothing but the KL in the reward (`grpo`: nothing at all). Near 1: the prompts "
        "are too easy or too hard.",
    ),
    "value/mean": Entry(
        "mean of the critic's values per token",
        "Starts at 0, as the value head does, and should approach `reward/mean`.",
    ),
    "critic/explained_variance": Entry(
        "share of the variance of the returns that the critic explained, before its update",
        "1 is perfect, 0 as good as a constant, below 0 worse than one. Should rise from 0.",
    ),
    "rollout/rounds": Entry(
        "rounds of sampling that filled the batch (`rollout.dynamic_sampling` only)",
        "At `max_rounds` the batch may be smaller than `rollout.prompts`: see the events.",
    ),
    "rollout/prompts_drawn": Entry(
        "prompts that were sampled for this batch (`rollout.dynamic_sampling` only)",
        "Over `rollout.prompts`: how many times as much was sampled as is trained on.",
    ),
    "rollout/no_spread_share": Entry(
        "share of these prompts whose responses all scored the same (`rollout.dynamic_sampling` "
        "only)",
        "They are not trained on. Near 1: the prompts are too easy or too hard.",
    ),
    "curriculum/drawn_share": Entry(
        "share of the training prompts that have been drawn so far (`data.curriculum` only)",
        "Below 1 for long: there are more prompts than the run can see.",
    ),
    "curriculum/retired_share": Entry(
        "share of the training prompts that are solved and drawn no more (`data.curriculum` only)",
        "At 1 the run ends: there is nothing left to learn from these prompts.",
    ),
    "actor/penalty_coef": Entry(
        "weight of the KL from the old policy in this iteration's loss (`penalty` only)",
        "Halved and doubled so that the KL stays near `actor.update.target`. Doubling without end: "
        "lower `actor.lr`.",
    ),
    "actor/shared_tokens": Entry(
        "share of the tokens of the actor's updates that were not computed, as another row of the "
        "microbatch has the same prompt (only where prompts are shared; `critic/shared_tokens` is "
        "the critic's)",
        "Higher is faster, and nothing else changes. Low with several samples per prompt: write "
        "`actor.shuffle: prompts`, or raise `actor.microbatch_tokens`.",
    ),
    "critic/shared_tokens": Entry(
        "the same of the critic's updates",
        "See `actor/shared_tokens`.",
    ),
    "critic/vf_clipfrac": Entry(
        "share of tokens whose value loss the clip determined",
        "Small. Large for long: `critic.clip` is tight for the scale of the returns.",
    ),
    "critic/grad_norm": Entry(
        "norm of the critic's gradient before clipping, mean over optimizer steps",
        "Steady. Always far above `critic.max_grad_norm`: every step is scaled down.",
    ),
    "critic/vf_loss": Entry(
        "the value loss that was minimised: half the clipped squared error, mean over optimizer "
        "steps",
        "Should fall, then follow the spread of the scores.",
    ),
    "critic/lr": Entry(
        "the critic's learning rate in this iteration",
        "Follows `actor.schedule`.",
    ),
    "critic/steps": Entry(
        "optimizer steps of the critic in this iteration",
        "Epochs x minibatches, less those without a token that counts.",
    ),
    "actor/entropy": Entry(
        "exact entropy of the next-token distribution in nats, mean over tokens",
        "Falls slowly. A sudden fall to 0 is collapse: raise `kl.in_reward.coef` or lower "
        "`actor.lr`.",
    ),
    "actor/approx_kl": Entry(
        "KL(old || new) per token, from the old policy's samples, mean over the update",
        "How far one iteration moves the policy. 0.01 to 0.1 is usual, more in the first "
        "iterations; spikes mean steps too large.",
    ),
    "actor/pg_clipfrac": Entry(
        "share of tokens where the clip took the gradient away",
        "Below 0.1 is usual. High: the steps are large; lower `actor.lr` or `actor.epochs`.",
    ),
    "actor/pg_clipfrac_high": Entry(
        "the part of it where the ratio was too high",
        "Good tokens that have risen enough, and bad ones that the dual clip holds.",
    ),
    "actor/pg_clipfrac_low": Entry(
        "the part of it where the ratio was too low",
        "Bad tokens that have fallen enough.",
    ),
    "actor/ratio_max": Entry(
        "largest ratio new / old of any token in the update",
        "A few is usual. Hundreds: the policy jumped; lower `actor.lr`.",
    ),
    "actor/ratio_min": Entry(
        "smallest ratio new / old of any token in the update",
        "Above 0.1 is usual. Near 0: a token was all but forbidden; lower `actor.lr`.",
    ),
    "actor/grad_norm": Entry(
        "norm of the actor's gradient before clipping, mean over optimizer steps",
        "Steady. 0: there was nothing to learn from. Growing without end: lower `actor.lr`.",
    ),
    "actor/pg_loss": Entry(
        "the policy loss that was minimised, without the terms below, mean over optimizer steps",
        "Near 0 and noisy; its level says little. Judge a run by score and KL instead.",
    ),
    "actor/entropy_loss": Entry(
        "minus the entropy, as the loss has it before `actor.entropy_coef`, mean over steps",
        "The mirror of `actor/entropy`.",
    ),
    "actor/kl_loss": Entry(
        "the KL to the reference, as the loss has it before `kl.in_loss.coef`, mean over steps",
        "What the estimator gives, which for k2 is not a KL; `kl/token_mean` is the distance.",
    ),
    "actor/stopped_at_step": Entry(
        "optimizer steps taken when the KL from the old policy exceeded `actor.stop_kl`",
        "Written only when it did. Low for long: lower `actor.lr`, or allow more KL.",
    ),
    "actor/lr": Entry(
        "the actor's learning rate in this iteration",
        "Follows `actor.schedule`.",
    ),
    "actor/steps": Entry(
        "optimizer steps of the actor in this iteration",
        "Epochs x minibatches, unless `actor.stop_kl` ended it.",
    ),
    "actor/exact_kl": Entry(
        "KL(old || new) per token over the whole vocabulary, after the step (`trpo` only)",
        "At most `actor.update.max_kl`, and near it. 0: the step was refused, see events.jsonl.",
    ),
    "actor/line_search_tries": Entry(
        "step lengths that the line search tried (`trpo` only)",
        "1 or 2 is usual. Often all of them: lower `actor.update.max_kl` or raise "
        "`actor.update.damping`.",
    ),
    "actor/step_share": Entry(
        "share of the longest step that was taken (`trpo` only)",
        "1 is the full step, 0 none.",
    ),
    "critic/pretrain_explained_variance": Entry(
        "share of the variance of held-back returns that the critic explained after value "
        "pretraining (`critic.pretrain`, first iteration only)",
        "Below `critic.pretrain.explained_variance`: the epochs ran out. Raise `critic.lr` or "
        "`critic.pretrain.prompts`.",
    ),
    "critic/pretrain_epochs": Entry(
        "epochs of value pretraining (`critic.pretrain`, first iteration only)",
        "At `critic.pretrain.max_epochs` the bound was not reached.",
    ),
}

TIMINGS: dict[str, Entry] = {
    "time/rollout": Entry(
        "seconds spent sampling responses",
        "Grows with `rollout.max_response_tokens` and the number of rows.",
    ),
    "time/reward": Entry(
        "seconds spent scoring",
        "Small for a rule. Large: the reward itself is slow.",
    ),
    "time/forward": Entry(
        "seconds spent on old log-probs, reference log-probs and values",
        "Three forward passes over every row.",
    ),
    "time/update": Entry(
        "seconds spent on the updates of critic and actor",
        "Grows with `actor.epochs` and `critic.epochs`.",
    ),
    "time/iteration": Entry(
        "seconds of the whole iteration: the four above",
        "Evaluations and checkpoints are not in it.",
    ),
    "time/tools": Entry(
        "seconds of all tool calls together (only with tools)",
        "Up to 16 run at the same time, so it may exceed `time/rollout`, which contains it.",
    ),
    "throughput/tokens_per_second": Entry(
        "response tokens per second: those of the iteration over `time/iteration`",
        "The number by which to compare machines and settings.",
    ),
    "throughput/tokens_per_second_per_process": Entry(
        "the same, divided by the processes of the run",
        "Should stay as it is where processes are added. Falling: see `time/collectives`.",
    ),
    "throughput/mfu": Entry(
        "model FLOP utilisation: operations that the model needs for the tokens of the iteration, "
        "2 per parameter forward and 4 backward, over what the devices could do in that time (only "
        "with `launch.teraflops`, or with the data sheet of `launch.device_kind`)",
        "Layers that are recomputed do not count. Sampling is in the time, and waits for memory, "
        "so a few per cent are usual for long responses.",
    ),
    "memory/peak_gigabytes": Entry(
        "most memory that a process has had so far, of those of the run the largest: of its GPU, "
        "or on a CPU in all; in 1e9 bytes",
        "Near what there is: lower `actor.microbatch_tokens` or `rollout.cache_tokens`.",
    ),
    "time/collectives": Entry(
        "seconds that a process spent on sending to the others and on waiting for them, mean over "
        "the processes (only with several)",
        "Large beside `time/iteration`: one of them has more to do. What FSDP gathers, and NCCL "
        "beside the host, is not in it.",
    ),
    "samplers/ready": Entry(
        "samplers apart that are at work or wait for some (only with `launch.samplers`, as the "
        "four below)",
        "Fewer than `launch.samplers`: the cluster has no room for more, or some have just been "
        "lost. The others do their rows.",
    ),
    "samplers/chunks": Entry(
        "chunks of rows that samplers have brought since the iteration before",
        "With `rollout.lag` also such of later iterations; `samplers.jsonl` has each of them.",
    ),
    "samplers/queued": Entry(
        "chunks that wait for a sampler when the iteration ends",
        "0 with idle samplers: training is the slower side. Many: sampling is.",
    ),
    "samplers/lost": Entry(
        "samplers that died or were given up since the iteration before",
        "Their rows were sampled again, to the same bits; `events.jsonl` says why.",
    ),
    "samplers/idle_share": Entry(
        "share of the samplers' time since the iteration before in which they had nothing to do",
        "At lag 0 they wait for the updates. The trainer's own share is `time/rollout` over "
        "`time/iteration`.",
    ),
}

EVALS: dict[str, Entry] = {
    "iteration": Entry(
        "iterations done when it was measured; 0 = before training",
        "The first and the last line are before and after.",
    ),
    "greedy.mean": Entry(
        "mean score on held-out prompts, always taking the likeliest token",
        "What the model does when asked for its best. Should rise.",
    ),
    "sampled.mean": Entry(
        "mean score on held-out prompts, over `train.eval_samples` sampled responses to each",
        "What training improves. Compare it with `score/mean`: much lower is overfitting.",
    ),
    "greedy.low, greedy.high, sampled.low, sampled.high": Entry(
        "95% interval of the mean: Wilson's for scores of 0 and 1, else the normal one",
        "A change inside the interval may be chance; evaluate on more prompts.",
    ),
    "greedy.count, sampled.count": Entry(
        "prompts that could be scored",
        "Fewer than the prompts evaluated: the reward failed on the rest.",
    ),
    "greedy.binary, sampled.binary": Entry(
        "whether every score was 0 or 1",
        "If so, the mean is a share and is shown as a percentage.",
    ),
    "kl": Entry(
        "mean KL from the reference of a sampled response, in nats",
        "What the score has cost so far. 0 before training, if the reference is the actor.",
    ),
    "calls": Entry(
        "tool calls per sampled response; null without tools",
        "How often it asks before it answers.",
    ),
}

# What a line of evals.jsonl has beside these where the config asks for it.
EVALS_ON_REQUEST: dict[str, Entry] = {
    "at_k": Entry(
        "by name, `pass@1`, `pass@2`, … `maj@1`, …: what k of `train.eval_samples` responses are "
        "worth, the best score of them and the score of the answer most agree on; objects as "
        "`sampled`, with `best@k` for scores other than 0 and 1",
        "pass@k far above pass@1: the model can, but not reliably, which training changes most "
        "easily. maj@k has no entry where no answer is known.",
    ),
    "sets": Entry(
        "by the names of `data.heldout`: `greedy`, `sampled`, `kl` and `at_k` of that set alone",
        "A set that falls while the whole rises is what the mean hides.",
    ),
    "price": Entry(
        "with `train.price_samples`, in the last line: `spent`, the KL of a sampled response, and "
        "`least`, what any policy needs for that mean score, in nats; `wasted`, 1 - least / spent; "
        "each with its 95% interval; `never_right`, the share of prompts whose reference samples "
        "all have the lowest score",
        "Much wasted: a higher `kl.in_reward.coef` buys the same score for less.",
    ),
    "probe": Entry(
        "what `train.probe` found: facts right, nats per text, answers",
        "Compare the first with the last line: what the run has cost beside its task.",
    ),
}
