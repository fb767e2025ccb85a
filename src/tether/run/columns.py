"""The per-token columns of a row, in data-flow order: the one list of them.

`ppo/rollout_log.py` writes them into rollouts/NNNNNN.jsonl, the page and `tether trace` show them.
A new column is a line here and, unless it is a field of `Experience`, a line in the writer.
Imports nothing, so that the page opens without torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """One number per response token, as a list of a row's length."""

    name: str
    english: str
    chinese: str
    since: int = 1
    """schema version of the first files that hold it"""
    only_with: str | None = None
    """property of the config under which it is written; None = always"""
    computed: bool = False
    """not in the file: it follows from the other columns and the run's settings"""
    for_what_if: bool = True
    """what-if computes with it"""
    if_absent: float | None = None
    """what a row without it means; None = such a row has no what-if"""
    moves: bool = False
    """other settings change it, so what-if shows it before and after"""

    def __post_init__(self) -> None:
        later = self.since > 1 or self.only_with is not None
        if later and self.for_what_if and not self.computed and self.if_absent is None:
            raise ValueError(f"{self.name}: say by if_absent what a row without it means")


COLUMNS = (
    Column(
        "rollout_log_probs",
        "how sure it was: 0 is certain, −5 a long shot",
        "选它时有多大把握：0 是肯定，−5 是碰运气",
        for_what_if=False,
    ),
    Column(
        "old_log_probs",
        "how sure it was, read again before learning",
        "学习之前再读一遍，有多大把握",
    ),
    Column(
        "ref_log_probs",
        "how sure its untouched copy would be",
        "没学过的副本会有多大把握",
    ),
    Column(
        "new_log_probs",
        "how sure it was when it last learnt from this",
        "最后一次从中学习时有多大把握",
    ),
    Column("kl", "how far it strayed from the copy here", "在这一块上偏离副本多远", moves=True),
    Column("values", "the critic's guess of points to come", "Critic 猜还能得多少分"),
    Column("token_level_scores", "the points sit on the last piece", "分数放在最后一块上"),
    Column(
        "token_level_rewards",
        "points, minus a small fee for straying",
        "得分减去一点“跑偏费”",
        moves=True,
    ),
    Column(
        "deltas",
        "the surprise at this piece alone",
        "单看这一块有多意外",
        computed=True,
        moves=True,
    ),
    Column(
        "advantages",
        "was it a good choice? surprises from here on",
        "选得好吗？把此后的意外加起来",
        moves=True,
    ),
    Column("returns", "what the critic should have guessed", "Critic 本该猜的数", moves=True),
    Column("policy_advantages", "what the actor learns from", "Actor 据此学习", moves=True),
    Column(
        "ratio",
        "how much likelier than before: 1 = as likely",
        "比原来更可能多少：1 表示一样",
        computed=True,
        moves=True,
    ),
    Column(
        "correction_weights",
        "how much it counts, as another program drew it",
        "由另一个程序采样，所以要乘上多少权重",
        only_with="may_mismatch",
        if_absent=1.0,
    ),
    Column(
        "objective",
        "what this piece adds to the goal",
        "这一块对目标的贡献",
        computed=True,
        moves=True,
    ),
)
WRITTEN = tuple(column for column in COLUMNS if not column.computed)
