"""Every sentence of trace and examples, in English and Chinese: one table, key → (en, zh).

Keys of one kind share a prefix: `title_` heads a section, `what_` tells a twelve-year-old what a
number is, `verdict_` and `why_` say what a bound did to a token, `note_` says what to keep in mind
about a trace, `mistake_` is what people get wrong in a worked example. The sentences of the
examples are in `example_words.py`.
Chinese terms: token, nat, 比特, Actor, Critic, 参考模型; tests/test_chinese.py holds them.
"""

from typing import Literal

from tether.explain.example_words import EXAMPLE_WORDS
from tether.run.columns import COLUMNS

Language = Literal["en", "zh"]

WORDS: dict[str, tuple[str, str]] = {
    # Headings of a trace, in the order of the data flow.
    "title_trace": ("One prompt through one iteration of PPO", "一条提示词走完一轮 PPO"),
    "title_actor": ("1 Actor: writes the response", "1 Actor（策略模型）：生成回答"),
    "title_turns": ("Turns and calls of tools", "各轮对话与工具调用"),
    "title_reference": (
        "2 Reference: the frozen copy reads it",
        "2 参考模型：冻结的副本再读一遍",
    ),
    "title_critic": (
        "3 Critic: expects so much reward from here on",
        "3 Critic（价值模型）：预计从此处起还能得多少奖励",
    ),
    "title_reward": ("4 Reward: scores the response", "4 奖励函数：给整个回答打分"),
    "title_shaping": (
        "5 Rewards: score − β·KL, token by token",
        "5 逐 token 奖励：得分 − β·KL",
    ),
    "title_advantage": (
        "6 Advantages: better or worse than expected?",
        "6 优势：比预期好还是差？",
    ),
    "title_tokens": ("7 Every number of every token", "7 每个 token 的每个数"),
    "title_group": ("All rows of this update", "本次更新的所有回答"),
    "title_before": (
        "8 The objective before the update: every ratio is 1",
        "8 更新前的目标函数：所有比率都是 1",
    ),
    "title_after": (
        "9 After one critic and one actor update",
        "9 Critic 和 Actor 各更新一步之后",
    ),
    "title_after_actor": ("9 After one actor update", "9 Actor 更新一步之后"),
    "title_notes": ("Notes", "说明"),
    # Labels.
    "model": ("model", "模型"),
    "prompt": ("prompt", "提示词"),
    "response": ("response", "回答"),
    "finish": ("ended by", "结束原因"),
    "finish_eos": ("EOS, by the model itself", "模型自己输出了结束符"),
    "finish_stop": ("the episode: it was over", "对话已经完成"),
    "given": ("EOS, put after the given text", "给定文本之后补上的结束符"),
    "finish_truncated": ("the environment: truncated", "环境中途截断"),
    "finish_length": ("the length limit: truncated", "达到长度上限：被截断"),
    "reward_given": ("reward given", "奖励函数得到"),
    "estimator": ("estimator", "优势估计方法"),
    "update": ("update", "更新方式"),
    "name": ("name", "名称"),
    "shape": ("shape", "形状"),
    "values_of": ("values", "数值"),
    "token": ("token", "token"),
    "id": ("id", "id"),
    "old": ("old", "old"),
    "ref": ("ref", "ref"),
    "kl": ("KL", "KL"),
    "score": ("score", "得分"),
    "reward": ("reward", "奖励"),
    "value": ("value", "价值"),
    "new_value": ("new value", "新价值"),
    "delta": ("δ", "δ"),
    "advantage": ("advantage", "优势"),
    "return": ("return", "回报"),
    "ratio": ("ratio r", "比率 r"),
    "sequence_ratio": ("ratio s", "整句比率 s"),
    "term": ("term", "该项"),
    "clipped": ("clipped?", "是否裁剪"),
    "row": ("row", "行"),
    "sum_reward": ("Σ reward", "奖励之和"),
    "said": ("what the reward said", "奖励给出的说明"),
    "turn": ("turn", "轮次"),
    "turn_of": ("who", "谁"),
    "text": ("text", "文本"),
    "by_policy": ("policy", "策略"),
    "by_tool": ("tool (read only)", "工具（只读）"),
    "tool": ("tool", "工具"),
    "arguments": ("asked", "参数"),
    "result": ("answered", "返回"),
    "error": ("error", "错误"),
    "cut": ("cut", "已截断"),
    "in_words": ("In plain words", "用大白话说"),
    "at_token": (" (numbers of {token}): ", "（{token} 处的数）："),
    "colon": (": ", "："),
    "more_terms": ("{count} more terms", "另有 {count} 项"),
    # What a number is, short enough for a twelve-year-old; those of columns are in run/columns.py.
    "what_prompt_ids": (
        "the question, cut into numbered pieces",
        "问题切成小块，每块一个编号",
    ),
    "what_response_ids": ("the answer, in the same pieces", "回答，也是这样的小块"),
    "what_response_mask": ("1 = the model chose this piece", "1 表示这一块是模型自己选的"),
    "what_final_values": ("its guess after the last piece", "最后一块之后的猜测"),
    "what_scores": ("points for the whole answer", "整个回答得了几分"),
    "what_new_values": ("the critic's guess after one lesson", "学一步之后的猜测"),
    "what_id": ("the number of the piece", "小块的编号"),
    "what_cpi": ("ratio × advantage: gain without a limit", "比率 × 优势：不设上限的收益"),
    "what_clipped_term": (
        "the same with the ratio held near 1",
        "把比率限制在 1 附近再算一次",
    ),
    "what_term": ("what counts: the smaller of the two", "算数的是两者中较小的"),
    # Which objective a recipe maximises.
    "goal_weights": (
        "w = the token's weight in the mean ({aggregation})",
        "w 是该 token 在平均中的权重（{aggregation}）",
    ),
    "goal_share": (
        "The sums are this row's share of the {rows} rows that are updated on together.",
        "下面的和只是这一行的份额；一起更新的共有 {rows} 行。",
    ),
    "goal_extra": (
        "The loss also holds an entropy bonus of weight {entropy} and a KL term of weight {kl}.",
        "损失里还有权重 {entropy} 的熵奖励和权重 {kl} 的 KL 项。",
    ),
    "step": (
        "Step: actor lr {actor_lr}, gradient norm {norm}{critic}.",
        "步长：Actor 学习率 {actor_lr}，梯度范数 {norm}{critic}。",
    ),
    "step_critic": (
        "; critic lr {lr}, loss {loss}, gradient norm {norm}",
        "；Critic 学习率 {lr}，损失 {loss}，梯度范数 {norm}",
    ),
    # What a bound did to a token, and why.
    "verdict_inside": ("no", "否"),
    "verdict_clipped_high": ("yes, high", "是，上界"),
    "verdict_clipped_dual": ("yes, dual", "是，双重裁剪"),
    "verdict_clipped_low": ("yes, low", "是，下界"),
    "verdict_capped": ("yes, capped", "是，封顶"),
    "verdict_kept_high": ("no, kept", "否，保留"),
    "verdict_kept_low": ("no, kept", "否，保留"),
    "verdict_no_advantage": ("A = 0", "A = 0"),
    "verdict_masked": ("masked", "被遮罩"),
    "why_inside": (
        "no: inside the bound ({bound}), which changes nothing here.",
        "否：在界内（{bound}），裁剪不起作用。",
    ),
    "why_clipped_high": (
        "yes, high: A > 0 and the ratio rose past the bound ({bound}); a further rise earns "
        "nothing and the gradient is 0.",
        "是，上界：A > 0 且比率升到界外（{bound}）；再升也没有收益，梯度为 0。",
    ),
    "why_clipped_dual": (
        "yes, dual: A < 0 and the ratio rose past the dual clip; the loss is held there and the "
        "gradient is 0.",
        "是，双重裁剪：A < 0 且比率超过双重裁剪的界；损失到此为止，梯度为 0。",
    ),
    "why_clipped_low": (
        "yes, low: A < 0 and the ratio fell past the bound ({bound}); it is rare enough, the "
        "gradient is 0.",
        "是，下界：A < 0 且比率降到界外（{bound}）；压得够低了，梯度为 0。",
    ),
    "why_capped": (
        "yes, capped: the ratio left the bound ({bound}), so it weighs no more than that; the "
        "token keeps its gradient.",
        "是，封顶：比率超出界限（{bound}），权重以界限为准；该 token 仍保留梯度。",
    ),
    "why_kept_high": (
        "no, kept: the ratio rose past the bound ({bound}) though A < 0; the gradient stays, so "
        "it is pushed back.",
        "否，保留：A < 0 而比率升到界外（{bound}）；梯度保留，仍会被压回去。",
    ),
    "why_kept_low": (
        "no, kept: the ratio fell past the bound ({bound}) though A > 0; the gradient stays, so "
        "it is pulled back.",
        "否，保留：A > 0 而比率降到界外（{bound}）；梯度保留，仍会被拉回来。",
    ),
    "why_no_advantage": (
        "A = 0: nothing to gain or lose at any ratio.",
        "A = 0：不论比率多少，都没有得失。",
    ),
    # Notes.
    "note_given": (
        "The response was given, not sampled: the log-probs say how likely the actor finds it.",
        "回答是给定的，不是采样的：对数概率表示 Actor 认为它有多可能。",
    ),
    "note_sampled": (
        "Sampled as in training, at temperature {temperature} with seed {seed}; another --seed "
        "gives another response.",
        "与训练时一样采样：温度 {temperature}，种子 {seed}；换 --seed 会得到别的回答。",
    ),
    "note_masked": (
        "Tokens with – instead of numbers are a tool's. The policy read them and did not write "
        "them, so they have no loss, no reward, no KL and no advantage.",
        "数字处为 – 的 token 来自工具：策略只是读到它们，并没有写出它们，因此没有损失、奖励、KL，"
        "也没有优势。",
    ),
    "note_truncated": (
        "Truncated, and scored as it is; nothing is expected to follow (advantage.truncation "
        "zero).",
        "回答被截断，按现状打分；其后的价值按 0 计（advantage.truncation zero）。",
    ),
    "note_bootstrap": (
        "Truncated, so not scored: the critic's value after the last token stands for what "
        "would follow (advantage.truncation bootstrap).",
        "回答被截断，不打分：用最后一个 token 之后的价值代替后续奖励（advantage.truncation "
        "bootstrap）。",
    ),
    "note_no_reference": (
        "This recipe has no tether: no reference is loaded and the KL is 0.",
        "此配方不约束 KL：没有加载参考模型，KL 为 0。",
    ),
    "note_same_reference": (
        "Actor and reference are the same weights, so every KL is 0; trace a run (--model "
        "runs/…) to see it move.",
        "Actor 与参考模型权重相同，所以 KL 全为 0；用 --model runs/… "
        "追踪一次训练，就能看到它变化。",
    ),
    "note_no_critic": (
        "{estimator} needs no critic: values are 0, and δ is just the reward.",
        "{estimator} 不需要 Critic：价值全为 0，δ 就是奖励。",
    ),
    "note_zero_head": (
        "The critic is fresh and its head starts at zero, so every value is 0; a run's critic "
        "has learnt.",
        "Critic 是新建的，输出头从零开始，所以价值全为 0；训练过的才会猜。",
    ),
    "note_group": (
        "{rows} responses were sampled and updated on together; the first one is shown.",
        "共采样 {rows} 个回答并一起更新；这里展示第一个。",
    ),
    "note_no_signal": (
        "Every advantage is 0, so the actor has nothing to learn here; try another --seed or "
        "--response TEXT.",
        "优势全为 0，Actor 在这里学不到东西；可换 --seed，或用 --response TEXT 给出回答。",
    ),
    "note_whitening": (
        "Training whitens advantages over the whole batch (subtract its mean, divide by its "
        "spread). One row is not a batch, so the update here uses them raw.",
        "训练时优势会在整个批次上做白化（减均值、除以标准差）。只有一行不成批次，"
        "所以这里的更新用原始优势。",
    ),
    "note_fresh_adam": (
        "Adam starts afresh, so each weight moves by about the learning rate, as in a run's "
        "very first step.",
        "Adam 从头开始，每个权重大约移动一个学习率，和训练的第一步一样。",
    ),
    "note_restored_adam": (
        "Adam goes on from the run's moments, but one row pulls harder than a batch, and the "
        "learning rate is the recipe's first, before any schedule.",
        "Adam 接着该次训练的动量走；但只用一行数据比整批更新得更猛，学习率也是配方的初始值，"
        "没有按计划衰减。",
    ),
    "note_not_saved": (
        "The update was made on copies in memory; nothing was saved.",
        "更新只发生在内存里的副本上，没有保存任何东西。",
    ),
    "source_typed": ("typed", "由命令行给出"),
    "source_sum": ("worked out from the prompt", "由提示词算出"),
    **{f"what_{column.name}": (column.english, column.chinese) for column in COLUMNS},
    **EXAMPLE_WORDS,
}


def say(key: str, language: Language, **numbers: object) -> str:
    english, chinese = WORDS[key]
    return (chinese if language == "zh" else english).format(**numbers)
