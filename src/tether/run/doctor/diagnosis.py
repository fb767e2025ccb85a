"""All rules in one table, gravest first: what each needs, what it says and what to change."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tether.run.doctor import rules
from tether.run.doctor.evidence import Evidence, read_evidence
from tether.run.doctor.findings import PAGE, Diagnosis, Finding, Words
from tether.run.doctor.rules import Found

FEWEST = 5  # iterations, before which a run has only begun


@dataclass(frozen=True)
class Rule:
    """One trouble. `find` is called only if the run has `needs` in `iterations` iterations."""

    find: Callable[[Evidence], Found]
    what: Words
    change: Words
    fields: tuple[str, ...]
    section: str  # of docs/troubleshooting.md
    needs: tuple[str, ...] = ()  # metrics
    iterations: int = FEWEST
    needs_rows: bool = False
    needs_evals: bool = False

    @property
    def name(self) -> str:
        return self.find.__name__

    @property
    def link(self) -> str:
        return f"{PAGE}#{self.section.lower().replace(' ', '-')}"

    def lacks(self, e: Evidence) -> str | None:
        """Return what the run would have to have for this rule to judge it."""
        if e.iterations < self.iterations:
            return f"needs {self.iterations} iterations, the run has {e.iterations}"
        short = [name for name in self.needs if len(e.series(name)) < self.iterations]
        if short:
            return f"needs {', '.join(short)}, which the run does not have"
        if self.needs_rows and not e.rows:
            return "needs rows in rollouts/, see run.rollouts_every"
        if self.needs_evals and len(e.evals) < 2:
            return "needs two evaluations, see data.heldout and train.eval_every"
        return None


RULES = (
    Rule(
        rules.stopped,
        Words("The run ended before its time.", "训练提前结束了。"),
        Words(
            "Do what the message says, then resume the run.",
            "按提示修改，然后用 tether resume 继续。",
        ),
        (),
        "The run stopped itself",
        iterations=0,
    ),
    Rule(
        rules.not_finite,
        Words(
            "Numbers became infinite or not a number; those rows or steps were left out.",
            "出现了无穷大或非数，相应的行或步被跳过。",
        ),
        Words(
            "Lower the learning rates; if it is one row, look at its score.",
            "降低学习率；若只是某一行，看它的分数。",
        ),
        ("actor.lr", "critic.lr"),
        "The run stopped itself",
        iterations=0,
    ),
    Rule(
        rules.policy_jumped,
        Words(
            "One iteration moved the policy so far that what it knew is likely lost.",
            "一次迭代就把策略推得太远，原来学会的很可能丢了。",
        ),
        Words(
            "Stop it and start again from the weights before, with smaller steps and no entropy "
            "bonus.",
            "停下来，从之前的权重重新开始：步子小一些，不加熵奖励。",
        ),
        ("actor.lr", "actor.entropy_coef", "actor.epochs", "actor.stop_kl"),
        "The run became noise",
        needs=("actor/approx_kl", "score/mean"),
        iterations=1,
    ),
    Rule(
        rules.kl_explodes,
        Words(
            "The KL to the reference explodes: the policy leaves it faster and faster.",
            "到参考模型的 KL 爆炸：策略越跑越远。",
        ),
        Words(
            "If the score falls too, make the steps smaller; if it rises, read the best rows and "
            "raise beta, or steer it.",
            "分数也在降：把步子调小；分数在升：读一读最高分的行，再提高 beta 或让它自适应。",
        ),
        ("actor.lr", "kl.in_reward.coef", "kl.in_reward.controller", "actor.stop_kl"),
        "KL explodes",
        needs=("kl/token_mean", "score/mean"),
    ),
    Rule(
        rules.score_never_varies,
        Words(
            "Every response scores the same: there is nothing to learn from.",
            "所有回答得分相同：没有可学的东西。",
        ),
        Words(
            "Mend the reward: `tether trace PROMPT` shows the score of one response; check the "
            "answer's column and format, or begin with easier prompts.",
            "先改奖励：`tether trace PROMPT` 显示一个回答的得分；检查答案的列和格式，"
            "或换更容易的题。",
        ),
        ("reward.kind", "reward.arguments", "data.train"),
        "Score stuck",
        needs=("score/std", "score/mean"),
    ),
    Rule(
        rules.zero_spread,
        Words(
            "In nearly every group all responses score the same: a group teaches nothing.",
            "几乎每一组的回答得分都相同：整组学不到东西。",
        ),
        Words(
            "Use prompts that the model gets right now and then, or more samples of each.",
            "换成模型时对时错的题，或每题多采样几个回答。",
        ),
        ("data.train", "rollout.samples_per_prompt", "rollout.temperature"),
        "Groups without spread",
        needs=("advantage/zero_spread_share", "score/std", "score/mean"),
    ),
    Rule(
        rules.sampler_mismatch,
        Words(
            "The sampler's log-probs are not the trainer's: another policy wrote the responses.",
            "采样器的对数概率与训练端不一致：写回答的是另一个策略。",
        ),
        Words(
            "See that the engine takes the newest weights in the trainer's number format; weigh "
            "the loss by rollout.correction meanwhile.",
            "确认推理引擎用的是最新权重和相同的数值格式；在此之前用 rollout.correction 加权。",
        ),
        ("rollout.sampler", "rollout.correction", "model.dtype"),
        "Sampler and trainer disagree",
        needs=("rollout/log_prob_diff_max",),
        iterations=3,
    ),
    Rule(
        rules.learning_rate_too_low,
        Words(
            "The weights do not move: an iteration changes no probability to speak of.",
            "权重几乎没动：一次迭代没有改变任何概率。",
        ),
        Words(
            "Raise the learning rate by ten: 1e-6 is for large models, the starter needs 4e-4, "
            "LoRA ten times what full weights need.",
            "把学习率提高十倍：1e-6 适合大模型，自带的小模型要 4e-4，LoRA 要全量的十倍。",
        ),
        ("actor.lr", "actor.epochs", "model.dtype"),
        "The weights do not move",
        needs=("score/std", "score/mean"),
    ),
    Rule(
        rules.kl_stuck,
        Words(
            "Beta is so large that the policy may not leave the reference: the KL is stuck.",
            "beta 太大，策略几乎不能离开参考模型：KL 不动。",
        ),
        Words(
            "Lower beta, or scale the reward up: they are weighed against each other.",
            "降低 beta，或放大奖励：两者是相对的。",
        ),
        ("kl.in_reward.coef", "kl.in_reward.target"),
        "KL stuck",
        needs=("kl/coef", "kl/sequence_mean", "score/std", "score/mean"),
    ),
    Rule(
        rules.clip_fraction,
        Words(
            "The clip takes the gradient of many tokens away: the steps are too large.",
            "大量 token 的梯度被裁剪掉：步子太大。",
        ),
        Words(
            "Lower the learning rate first; then fewer epochs, or larger minibatches.",
            "先降低学习率；再减少 epochs，或增大 minibatch。",
        ),
        ("actor.lr", "actor.epochs", "actor.minibatch_rows", "actor.stop_kl"),
        "Clip fraction near 1",
        needs=("actor/pg_clipfrac",),
    ),
    Rule(
        rules.stale_rows,
        Words(
            "Rows are stale before an iteration is over: its later steps learn from another "
            "policy's responses.",
            "一次迭代还没结束，样本就已过时：后面的步子是在学另一个策略的回答。",
        ),
        Words(
            "Take fewer steps on each batch, or stop them by the KL.",
            "每批样本少更新几步，或用 KL 提前停止。",
        ),
        ("actor.epochs", "actor.minibatch_rows", "actor.stop_kl", "actor.lr"),
        "Rows too old",
        needs=("actor/approx_kl",),
        iterations=4,
    ),
    Rule(
        rules.entropy_collapse,
        Words(
            "Entropy collapsed: the policy tries nothing new any more.",
            "熵塌缩：策略不再尝试新的回答。",
        ),
        Words(
            "Keep the reference's spread by a larger beta, take smaller steps, let rare tokens "
            "rise further.",
            "提高 beta 以保住参考模型的多样性，步子小一些，让少见的 token 升得更多。",
        ),
        ("kl.in_reward.coef", "actor.lr", "actor.update.eps_high", "actor.entropy_coef"),
        "Entropy collapses",
        needs=("actor/entropy", "score/mean"),
    ),
    Rule(
        rules.one_length,
        Words(
            "Responses all ran to one length: to nothing, or to the limit.",
            "回答都跑到同一个长度：接近零，或顶到上限。",
        ),
        Words(
            "The reward pays for it: score only finished responses, or add a part `length`.",
            "是奖励在鼓励它：只给写完的回答打分，或加一个 `length` 部分。",
        ),
        ("reward.parts", "rollout.max_response_tokens", "kl.in_reward.coef"),
        "Everything one length",
        needs=("response/length_mean", "response/eos_rate"),
    ),
    Rule(
        rules.repetition,
        Words("Responses repeat themselves.", "回答在重复自己。"),
        Words(
            "Read the best rows: the reward pays for it, or the policy left the reference; raise "
            "beta.",
            "读最高分的行：要么奖励在鼓励重复，要么策略离参考模型太远；提高 beta。",
        ),
        ("reward.kind", "kl.in_reward.coef", "actor.lr"),
        "Responses repeat themselves",
        needs_rows=True,
        iterations=2,
    ),
    Rule(
        rules.truncation,
        Words(
            "Many responses are cut off at the limit before they end.",
            "很多回答没写完就被截断。",
        ),
        Words(
            "Raise the limit; if they never end, teach the model to by `tether sft` first.",
            "提高上限；如果总写不完，先用 `tether sft` 教它结束。",
        ),
        ("rollout.max_response_tokens", "advantage.truncation"),
        "Responses cut off",
        needs=("response/eos_rate", "response/length_mean"),
        iterations=3,
    ),
    Rule(
        rules.critic_explains_nothing,
        Words(
            "The critic explains nothing: its values are far from the returns.",
            "Critic 什么也没解释：它的值离回报很远。",
        ),
        Words(
            "Scale the reward to about 1; else raise the critic's learning rate or give it a "
            "warm-up.",
            "把奖励缩放到 1 左右；否则提高 critic 的学习率，或让它先预热。",
        ),
        ("reward.parts", "critic.lr", "critic.clip", "critic.warmup_iterations"),
        "Value loss large",
        needs=("critic/explained_variance", "value/mean", "reward/mean", "score/std"),
        iterations=8,
    ),
    Rule(
        rules.heldout_falls,
        Words(
            "Held-out scores fall while training scores rise: the prompts are learnt by heart, or "
            "their reward pays for something else.",
            "训练分数升而留出集分数降：模型在背题，或奖励在鼓励别的东西。",
        ),
        Words(
            "Use more prompts, fewer iterations, a larger beta; go back to the best checkpoint.",
            "用更多的题、更少的迭代、更大的 beta；回到最好的检查点。",
        ),
        ("data.train", "train.iterations", "kl.in_reward.coef", "train.keep_best"),
        "Held-out falls",
        needs=("score/mean",),
        needs_evals=True,
    ),
    Rule(
        rules.unscorable_rows,
        Words(
            "Some rows cannot be scored, so that the rest is a biased sample.",
            "有些行无法打分，剩下的就成了有偏的样本。",
        ),
        Words(
            "Mend the function where events.jsonl says; for a wrong answer return 0, do not raise.",
            "按 events.jsonl 里的位置改函数；答错应返回 0，不要抛异常。",
        ),
        ("reward.kind", "reward.timeout_seconds"),
        "Rows unscorable",
        iterations=1,
    ),
    Rule(
        rules.tools_not_called,
        Words(
            "No response calls a tool, so that nothing is learnt about using it.",
            "没有回答调用工具，所以学不会用它。",
        ),
        Words(
            "Describe the marks in the prompt, and begin with a model that writes them now and "
            "then.",
            "在提示里说明标记的写法，并从偶尔会写它们的模型开始。",
        ),
        ("data.system_prompt", "model.actor"),
        "Tools not called",
        needs=("tools/calls_mean",),
        iterations=3,
    ),
)


def examine(run: Path) -> Diagnosis:
    """Read a run directory and judge it."""
    return diagnose(read_evidence(run))


def diagnose(e: Evidence) -> Diagnosis:
    """Judge a run by every rule that has what it needs."""
    findings, judged, not_judged = [], [], {}
    for rule in RULES:
        lack = rule.lacks(e)
        if lack is not None:
            not_judged[rule.name] = lack
            continue
        judged.append(rule.name)
        readings = tuple(rule.find(e))
        if readings:
            findings.append(
                Finding(
                    rule=rule.name,
                    what=rule.what,
                    change=rule.change,
                    fields=rule.fields,
                    readings=readings,
                    link=rule.link,
                    message=_message(rule.name, e),
                )
            )
    return Diagnosis(findings, judged, not_judged, e.notes)


EVENTS_OF = {"stopped": ("stopped", "failed"), "unscorable_rows": ("unscorable",),
             "not_finite": ("non_finite",)}  # fmt: skip


def _message(rule: str, e: Evidence) -> str | None:
    """Return what the last event behind a finding says."""
    kinds = EVENTS_OF.get(rule, ())
    events = [event for event in e.events if str(event.get("kind")).startswith(kinds or "\0")]
    return str(events[-1].get("message")) if events else None
