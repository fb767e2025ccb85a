"""Rewards for policies that search: the answer as Search-R1 compares it, and two smaller parts.

They read what the policy itself wrote, turn by turn, or what it was told; never the prompt, and
never an answer that merely stands in a document. Imports no torch.
"""

import re
import string
from collections.abc import Mapping, Sequence

from tether.rewards.answers import Answers, spellings

ANSWERS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
TAGS = re.compile(r"</?\w+>")
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)

GroundTruth = Answers | Mapping[str, Answers]  # Search-R1 nests it: {"target": [...]}


def search_answer(policy_turns: Sequence[str], ground_truth: GroundTruth) -> float:
    """1 if the policy's last `<answer>` is the target, or one of several, but for case, ASCII
    punctuation, articles and white space; else 0."""
    given = last_answer(policy_turns)
    return float(given is not None and plain(given) in {plain(t) for t in targets(ground_truth)})


def search_format(policy_turns: Sequence[str]) -> float:
    """1 if the policy wrote exactly one `<answer>…</answer>`, and nothing but white space after
    it; else 0."""
    whole = "".join(policy_turns)
    marks = whole.count("<answer>") == whole.count("</answer>") == 1
    closed = last_answer(policy_turns) is not None
    return float(marks and closed and not whole.rpartition("</answer>")[2].strip())


def search_retrieval(observations: Sequence[str], ground_truth: GroundTruth) -> float:
    """1 if a target stands in what the tools told the policy, compared as `search_answer` does;
    else 0."""
    told = f" {plain(TAGS.sub(' ', ' '.join(observations)))} "
    wanted = [plain(target) for target in targets(ground_truth)]
    return float(any(_stands_in(target, told) for target in wanted if target))


def last_answer(policy_turns: Sequence[str]) -> str | None:
    """No tag spans two turns: each is read by itself."""
    found = [answer for turn in policy_turns for answer in ANSWERS.findall(turn)]
    return found[-1] if found else None


def targets(ground_truth: GroundTruth) -> list[str]:
    if isinstance(ground_truth, Mapping):
        if "target" not in ground_truth:
            raise ValueError(f"the ground truth has no target, only {', '.join(ground_truth)}")
        ground_truth = ground_truth["target"]
    return sorted(spellings(ground_truth))


def plain(text: str) -> str:
    """Lower case, no ASCII punctuation, no articles, single spaces, in this order. Of an answer
    that is nothing else, such as the letter A, the text itself: no answer is not a right one."""
    kept = ARTICLES.sub(" ", text.lower().translate(NO_PUNCTUATION))
    return " ".join(kept.split()) or text.strip().lower()


def _stands_in(target: str, told: str) -> bool:
    """Whole words of a script that has them, and characters of one that has not."""
    return f" {target} " in told if target.isascii() else target in told
