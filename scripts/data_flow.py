"""The picture of one iteration, as SVG text in English and Chinese."""

from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT = 960, 446
SANS = "'Noto Sans CJK SC', 'PingFang SC', 'Microsoft YaHei', 'DejaVu Sans', Arial, sans-serif"

# Okabe and Ito's colours: a role's is the same wherever it works. (stroke, fill)
ACTOR = ("#0072B2", "#e3f0f8")
CRITIC = ("#009E73", "#e0f4ee")
REFERENCE = ("#8a6d00", "#faf3d8")
REWARD = ("#D55E00", "#fbe9de")
PLAIN = ("#555555", "#f6f6f6")


class Box(NamedTuple):
    """A stage: its title, then what comes out of it. Words that WORDS knows are translated."""

    x: int
    y: int
    width: int
    height: int
    colours: tuple[str, str]
    lines: tuple[str, ...]


BOXES = [
    Box(20, 50, 120, 84, PLAIN, ("prompts", "prompt_ids")),
    Box(200, 50, 200, 84, ACTOR, ("actor answers", "response_ids", "rollout_log_probs")),
    Box(490, 50, 200, 84, REWARD, ("reward judges", "token_level_scores")),
    Box(200, 200, 200, 62, ACTOR, ("actor reads again", "old_log_probs")),
    Box(200, 282, 200, 62, REFERENCE, ("reference reads", "ref_log_probs")),
    Box(200, 364, 200, 62, CRITIC, ("critic reads", "values")),
    Box(490, 200, 200, 84, PLAIN, ("score − β·KL", "token_level_rewards")),
    Box(490, 346, 200, 80, PLAIN, ("GAE, backwards", "advantages", "returns")),
    Box(770, 200, 170, 84, ACTOR, ("update the actor", "ratio, clip, advantage")),
    Box(770, 346, 170, 80, CRITIC, ("update the critic", "(value − return)²")),
]
READINGS = (186, 190, 228, 244)  # the dashed frame around the three that only read

TITLE = "One iteration of PPO, in the order in which the data flows"
AGAIN = "new weights for the next iteration; these rows are dropped"

WORDS = {
    "en": {},
    "zh": {
        "prompts": "提示词",
        "actor answers": "Actor 作答",
        "reward judges": "Reward 打分",
        "actor reads again": "Actor 重读一遍",
        "reference reads": "Reference 读一遍",
        "critic reads": "Critic 读一遍",
        "score − β·KL": "得分 − β·KL",
        "GAE, backwards": "GAE，从后往前",
        "update the actor": "更新 Actor",
        "update the critic": "更新 Critic",
        "ratio, clip, advantage": "比率、裁剪、优势",
        "(value − return)²": "(价值 − 回报)²",
        AGAIN: "带着新权重进入下一轮迭代；这批数据用完即弃",
        TITLE: "PPO 的一轮迭代：按数据流动的顺序",
    },
}

# Polylines with an arrowhead at the end.
ARROWS = [
    [(140, 92), (196, 92)],  # prompts to rollout
    [(400, 92), (486, 92)],  # rollout to scores
    [(300, 134), (300, 196)],  # rollout to the three readings
    [(590, 134), (590, 196)],  # scores to the shaped rewards
    [(400, 231), (486, 231)],  # old log-probs
    [(400, 313), (445, 313), (445, 258), (486, 258)],  # reference log-probs
    [(400, 395), (486, 395)],  # values
    [(590, 284), (590, 342)],  # shaped rewards to advantages
    [(690, 370), (730, 370), (730, 242), (766, 242)],  # advantages to the actor
    [(690, 400), (766, 400)],  # returns to the critic
]
BACK = [(855, 200), (855, 30), (300, 30), (300, 46)]  # the updated actor answers next


def draw_data_flow(folder: Path) -> None:
    for language, name in (("en", "data-flow.svg"), ("zh", "data-flow.zh.svg")):
        (folder / name).write_text(data_flow(language), encoding="utf-8")


def data_flow(language: str) -> str:
    words = WORDS[language]
    x, y, width, height = READINGS
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="{SANS}">',
            f"<title>{escape(words.get(TITLE, TITLE))}</title>",
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0 10 5 0 10z" fill="#333"/>'
            "</marker></defs>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="white"/>',
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" '
            'fill="none" stroke="#999" stroke-dasharray="5 5"/>',
            *(_box(box, words) for box in BOXES),
            *(_arrow(points) for points in ARROWS),
            _arrow(BACK, "6 5"),
            _text(578, 22, words.get(AGAIN, AGAIN), size=15, colour="#444"),
            "</svg>",
            "",
        ]
    )


def _box(box: Box, words: dict[str, str]) -> str:
    stroke, fill = box.colours
    pitch, middle = 21, box.x + box.width / 2
    top = box.y + (box.height - pitch * len(box.lines)) / 2 + 16
    title, *lines = (words.get(line, line) for line in box.lines)
    return "\n".join(
        [
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="8" '
            f'fill="{fill}" stroke="{stroke}" stroke-width="2"/>',
            _text(middle, top, title, weight="bold"),
            *(
                _text(middle, top + pitch * (i + 1), line, size=14.5, colour="#333")
                for i, line in enumerate(lines)
            ),
        ]
    )


def _text(
    x: float, y: float, words: str, size: float = 16, weight: str = "normal", colour: str = "#111"
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="middle">{escape(words)}</text>'
    )


def _arrow(points: list[tuple[int, int]], dashes: str = "none") -> str:
    path = " ".join(f"{x},{y}" for x, y in points)
    return (
        f'<polyline points="{path}" fill="none" stroke="#333" stroke-width="1.8" '
        f'stroke-dasharray="{dashes}" marker-end="url(#head)"/>'
    )
