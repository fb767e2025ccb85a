"""What k responses to a prompt are worth, estimated without bias from n >= k of them: the best
score of k (pass@k where scores are 0 and 1), and the score of the answer most of k agree on."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np


def best_of_k(scores: Sequence[float], k: int) -> float:
    """Return the mean over all sets of k of the scores of the best score in the set.

    For scores of 0 and 1, c of them 1, that is 1 - C(n - c, k) / C(n, k). The plug-in
    1 - (1 - c/n)^k is too small.

    Chen et al. 2021, arXiv 2107.03374, section 2.1; here for any scores, by their order.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, of {n} scores")
    sets = math.comb(n, k)
    # The i-th smallest is the best where the other k - 1 are among the i below it.
    return math.fsum(score * (math.comb(i, k - 1) / sets) for i, score in enumerate(sorted(scores)))


@dataclass(frozen=True)
class _Answer:
    votes: int
    score: float  # mean over those who gave it


def majority_of_k(scores: Sequence[float], answers: Sequence[Hashable | None], k: int) -> float:
    """Return the mean over all sets of k of the score of the answer that most of the set gave.

    A tie counts as the mean of the tied answers' scores, as if one were drawn. A response without
    an answer (None) has no vote; a set without any vote has the mean score of such responses.
    Responses with one answer have one score, else their mean. As a mean over sets of k it is
    unbiased for k responses sampled anew, like `best_of_k`; the vote of all n is not, for k < n.

    Majority voting: Wang et al. 2023, arXiv 2203.11171.
    """
    n = len(scores)
    if not 1 <= k <= n:
        raise ValueError(f"k is {k}, of {n} scores")
    given: dict[Hashable | None, list[float]] = {}
    for score, answer in zip(scores, answers, strict=True):
        given.setdefault(answer, []).append(score)
    silent = given.pop(None, [])
    found = [_Answer(len(s), math.fsum(s) / len(s)) for s in given.values()]
    total = 0.0
    if len(silent) >= k:
        total += math.comb(len(silent), k) * (math.fsum(silent) / len(silent))
    most = min(k, max((answer.votes for answer in found), default=0))
    total += math.fsum(_won_with(votes, found, len(silent), k) for votes in range(1, most + 1))
    return total / math.comb(n, k)


def _won_with(votes: int, answers: Sequence[_Answer], silent: int, k: int) -> float:
    """Return the sum, over the sets of k that an answer wins with so many votes, of its score.

    Answers are taken up one by one. `ways[u, t]` counts the choices of u responses among those so
    far with t answers at `votes` and none above; `scored` sums the tied answers' scores over them.
    """
    tied = k // votes
    ways = np.zeros((k + 1, tied + 1))
    scored = np.zeros_like(ways)
    for used in range(min(silent, k) + 1):
        ways[used, 0] = math.comb(silent, used)
    for answer in answers:
        further, further_scored = np.zeros_like(ways), np.zeros_like(ways)
        for taken in range(min(answer.votes, votes) + 1):
            count = math.comb(answer.votes, taken)
            before, before_scored = ways[: k + 1 - taken], scored[: k + 1 - taken]
            if taken < votes:
                further[taken:] += count * before
                further_scored[taken:] += count * before_scored
            else:
                further[taken:, 1:] += count * before[:, :-1]
                gained = before_scored + answer.score * before
                further_scored[taken:, 1:] += count * gained[:, :-1]
        ways, scored = further, further_scored
    return float((scored[k, 1:] / np.arange(1, tied + 1)).sum())
