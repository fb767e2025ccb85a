"""The rules: each reads a run's numbers and says whether one trouble of PPO is in them.

A threshold is a number that healthy runs stay clear of and runs with the trouble exceed; both were
made on purpose (scripts/measure_doctor.py), and docs/doctor.md has the count. What a rule says, and
what it needs, is in `table.py`.
"""

import statistics
from collections.abc import Sequence

from tether.run.doctor.evidence import (
    Evidence,
    Point,
    Record,
    end,
    is_number,
    start,
)
from tether.run.doctor.findings import Reading

Found = Sequence[Reading]  # what a trouble shows in; empty = it is not there

MAX_TOKEN_KL = 1.0  # nats per token to the reference
LEAST_AFFORDABLE_KL = 0.1  # nats per response
COLLAPSED_ENTROPY = 0.2  # share of the entropy at the start
LEAST_ENTROPY = 0.15  # nats per token at the start, below which the task leaves nothing to choose
SHORTEST = 1.5  # tokens per response, EOS included
LONGEST_SHARE = 0.9  # of rollout.max_response_tokens
ENDED_AT_FIRST = 0.5  # share of responses; with fewer at the start, the trouble is truncation
MAX_ZERO_SPREAD = 0.9  # share of groups
LEAST_EXPLAINED = 0.05  # explained variance of a critic that is of use
MAX_VALUE_GAP = 1.0  # between mean value and mean reward, in spreads of the score
WORSE_THAN_NOTHING = -0.5  # explained variance
MAX_CLIP_FRACTION = 0.15
MAX_APPROX_KL = 0.25  # nats per token that one iteration may move, for long
JUMP = 1.0  # nats per token in a single iteration
LEAST_ENDED = 0.7  # share of responses that end by themselves
MAX_REPEATING = 0.3  # share of rows
REPEATING_ROW = 0.5  # distinct pairs of neighbours, as a share of all, in a row that repeats itself
FEWEST_TOKENS = 8  # of a row that can be said to repeat itself
# Nats per token between sampler and trainer; of any token, where no mean is known. In bfloat16
# rounding alone brings 0.03 (SmolLM2-135M); the bounds there are those of the self-check.
MAX_MEAN_GAPS = {"float32": 0.01, "bfloat16": 0.1}
MAX_GAPS = {"float32": 0.1, "bfloat16": 1.0}
LEAST_MOVE = 1e-5  # nats per token and iteration
FLAT = 5  # iterations in a row
SIGNIFICANT = 2.0  # standard errors
MAX_UNSCORED = 0.01  # share of all rows


def change(name: str, points: Sequence[Point]) -> Reading:
    """Return how a metric went, from its start to its end."""
    return Reading(name, last=points[-1], first=points[0])


def kl_explodes(e: Evidence) -> Found:
    """The KL per token is large, and still grows."""
    kl = e.series("kl/token_mean")
    half = end(kl[: len(kl) // 2 + 1])
    if end(kl) <= MAX_TOKEN_KL or end(kl) <= 1.2 * half:
        return ()
    moved = e.series("actor/approx_kl")
    return (
        change("kl/sequence_mean", e.series("kl/sequence_mean") or kl),
        *([change("actor/approx_kl", moved)] if moved else []),
        change("score/mean", e.series("score/mean")),
    )


def kl_stuck(e: Evidence) -> Found:
    """Beta is so large that next to no KL pays.

    The policy that is best under score - beta x KL has, to second order, a KL of
    Var(score) / (2 beta²) nats per response: the exponential tilt of the reference.
    """
    beta, spread = e.series("kl/coef"), e.series("score/std")
    if end(beta) <= 0 or end(spread) <= 0:
        return ()
    affordable = 0.5 * (end(spread) / end(beta)) ** 2
    if affordable >= LEAST_AFFORDABLE_KL:
        return ()
    return (
        Reading("kl/coef", beta[-1]),
        Reading("KL that pays, in nats per response", Point(beta[-1].iteration, affordable)),
        change("kl/sequence_mean", e.series("kl/sequence_mean")),
        change("score/mean", e.series("score/mean")),
    )


def entropy_collapse(e: Evidence) -> Found:
    entropy = e.series("actor/entropy")
    began = statistics.median(p.value for p in entropy[:3])  # it may be gone within a quarter
    if began < LEAST_ENTROPY or end(entropy) > COLLAPSED_ENTROPY * began:
        return ()
    return (change("actor/entropy", entropy), change("score/mean", e.series("score/mean")))


def one_length(e: Evidence) -> Found:
    """Responses ran to one end: to nothing, or to the limit although they used to end."""
    length, ended = e.series("response/length_mean"), e.series("response/eos_rate")
    limit = e.number("rollout.max_response_tokens")
    short = end(length) <= SHORTEST and start(length) > 1.5 * end(length)
    long = (
        limit is not None
        and end(length) >= LONGEST_SHARE * limit
        and start(ended) >= ENDED_AT_FIRST
        and end(ended) < ENDED_AT_FIRST
    )
    if not short and not long:
        return ()
    return (change("response/length_mean", length), change("response/eos_rate", ended))


def zero_spread(e: Evidence) -> Found:
    alike = e.series("advantage/zero_spread_share")
    spread = e.series("score/std")
    late = alike[len(alike) // 2 :]  # one iteration has few groups
    share = statistics.fmean(p.value for p in late)
    if share < MAX_ZERO_SPREAD or end(spread) == 0:  # all alike is another rule
        return ()
    return (change("advantage/zero_spread_share", alike), Reading("score/mean", last_score(e)))


def last_score(e: Evidence) -> Point:
    return e.series("score/mean")[-1]


def critic_explains_nothing(e: Evidence) -> Found:
    """The critic is not better than a constant, and not even the right constant; or far worse.

    An explained variance near 0 alone says little: a few tokens of a short answer leave little
    to foresee. Its mean must be wrong as well.
    """
    explained, value = e.series("critic/explained_variance"), e.series("value/mean")
    reward, spread = e.series("reward/mean"), e.series("score/std")
    gap = abs(end(reward) - end(value))
    apart = end(spread) > 0 and gap > MAX_VALUE_GAP * end(spread)
    useless = end(explained) < LEAST_EXPLAINED and apart
    if not useless and end(explained) > WORSE_THAN_NOTHING:
        return ()
    return (
        change("critic/explained_variance", explained),
        change("value/mean", value),
        Reading("reward/mean", reward[-1]),
    )


def clip_fraction(e: Evidence) -> Found:
    """Many tokens are clipped, at the end or for most of the run: it soon ends otherwise."""
    clipped = e.series("actor/pg_clipfrac")
    typical = max(end(clipped), statistics.median(p.value for p in clipped))
    if e.setting("actor.update.kind") not in (None, "clip") or typical < MAX_CLIP_FRACTION:
        return ()
    return (change("actor/pg_clipfrac", clipped), *_moved(e))


def stale_rows(e: Evidence) -> Found:
    """Each iteration's updates end far from the policy that sampled their rows."""
    moved = e.series("actor/approx_kl")
    if statistics.median(p.value for p in moved) < MAX_APPROX_KL:
        return ()
    steps = e.series("actor/steps")
    ratio = e.series("actor/ratio_max")
    return (
        change("actor/approx_kl", moved),
        *([Reading("actor/steps", steps[-1])] if steps else []),
        *([Reading("actor/ratio_max", max(ratio, key=lambda p: p.value))] if ratio else []),
    )


def _moved(e: Evidence) -> list[Reading]:
    moved = e.series("actor/approx_kl")
    return [change("actor/approx_kl", moved)] if moved else []


def policy_jumped(e: Evidence) -> Found:
    moved = e.series("actor/approx_kl")
    far = max(moved, key=lambda p: p.value)
    if far.value < JUMP:
        return ()
    return (Reading("actor/approx_kl", far), change("score/mean", e.series("score/mean")))


def score_never_varies(e: Evidence) -> Found:
    """Every row scores alike, and not because the task is solved."""
    spread, score = e.series("score/std"), e.series("score/mean")
    if any(p.value > 0 for p in spread[-FLAT:]):
        return ()
    if any(p.value > 0 for p in spread) and end(score) > score[0].value:
        return ()
    return (change("score/std", spread), Reading("score/mean", score[-1]))


def truncation(e: Evidence) -> Found:
    ended = e.series("response/eos_rate")
    if end(ended) >= LEAST_ENDED:
        return ()
    return (change("response/eos_rate", ended), change("response/length_mean", _lengths(e)))


def _lengths(e: Evidence) -> list[Point]:
    return e.series("response/length_mean")


def repetition(e: Evidence) -> Found:
    first, last = (_repeating_share(rows) for rows in e.first_and_last_rows())
    if last is None or last <= MAX_REPEATING or (first is not None and last <= first):
        return ()
    name = "share of rows that repeat themselves"
    at_first = None if first is None else Point(min(e.rows), first)
    return (Reading(name, Point(max(e.rows), last), at_first),)


def _repeating_share(rows: Sequence[Record]) -> float | None:
    """Return the share of the rows in which few pairs of neighbouring tokens are new."""
    if not rows:
        return None
    repeating = 0
    for row in rows:
        ids = row.get("response_ids")
        if not isinstance(ids, list) or len(ids) < FEWEST_TOKENS:
            continue
        pairs = list(zip(map(str, ids), map(str, ids[1:]), strict=False))
        repeating += len(set(pairs)) < REPEATING_ROW * len(pairs)
    return repeating / len(rows)


def sampler_mismatch(e: Evidence) -> Found:
    """The sampler's log-probs are not the trainer's, beyond rounding."""
    if e.setting("rollout.lag"):  # older weights wrote the rows, which is meant to be so
        return ()
    computed_in = "bfloat16" if e.setting("model.compute") == "bfloat16" else "float32"
    most, most_of_any = MAX_MEAN_GAPS[computed_in], MAX_GAPS[computed_in]
    mean = e.series("rollout/log_prob_diff_mean")
    largest = e.series("rollout/log_prob_diff_max")
    if mean:
        return (change("rollout/log_prob_diff_mean", mean),) if end(mean) > most else ()
    gap = _mean_gap(e.first_and_last_rows()[1])
    over = end(largest) > most_of_any if gap is None else gap > most
    if not over:
        return ()
    found = [change("rollout/log_prob_diff_max", largest)]
    if gap is not None:
        found.append(Reading("mean gap in nats per token", Point(max(e.rows), gap)))
    return found


def _mean_gap(rows: Sequence[Record]) -> float | None:
    """Return the mean of |old - rollout| over the sampled tokens of some rows."""
    gaps = []
    for row in rows:
        columns = [row.get(name) for name in ("rollout_log_probs", "old_log_probs")]
        mask = row.get("response_mask")
        if all(isinstance(column, list) for column in (*columns, mask)):
            gaps += [
                abs(a - b)
                for a, b, counts in zip(*columns, mask, strict=False)  # pyright: ignore
                if counts and is_number(a) and is_number(b)
            ]
    return statistics.fmean(gaps) if gaps else None


def learning_rate_too_low(e: Evidence) -> Found:
    """The weights do not move, although there is something to learn from.

    With one step per iteration every ratio is 1 when it is measured, so the KL to the reference
    has to show it.
    """
    spread, steps = e.series("score/std"), e.series("actor/steps")
    one_step = bool(steps) and statistics.median(p.value for p in steps) <= 1
    name = "kl/token_mean" if one_step else "actor/approx_kl"
    moved = e.series(name)
    if len(moved) < 3 or statistics.median(p.value for p in spread) == 0:
        return ()
    typical = end(moved) if one_step else statistics.median(p.value for p in moved)
    if abs(typical) >= LEAST_MOVE:
        return ()
    rate = e.series("actor/lr")
    return (
        *([Reading("actor/lr", max(rate, key=lambda p: p.value))] if rate else []),
        change(name, moved),
        change("score/mean", e.series("score/mean")),
    )


def heldout_falls(e: Evidence) -> Found:
    """Held-out scores fell below the best by more than chance, while training scores rose."""
    points = [(_heldout(line), line) for line in e.evals]
    known = [(point, error) for (point, error), _ in points if point is not None]
    score = e.series("score/mean")
    # A few prompts are learnt at once, and may be lost again by the end.
    reached = max(end(score), statistics.median(p.value for p in score))
    if len(known) < 2 or reached <= score[0].value:
        return ()
    (last, last_error) = known[-1]
    best, best_error = max(known[:-1], key=lambda item: item[0].value)
    chance = (last_error**2 + best_error**2) ** 0.5
    if best.value - last.value <= max(SIGNIFICANT * chance, 1e-9):
        return ()
    return (Reading("held-out sampled.mean", last, best), change("score/mean", score))


def _heldout(line: Record) -> tuple[Point | None, float]:
    """Return a held-out mean and its standard error, from its 95% interval."""
    sampled, iteration = line.get("sampled"), line.get("iteration")
    if not isinstance(sampled, dict) or type(iteration) is not int:
        return None, 0.0
    mean, low, high = (sampled.get(name) for name in ("mean", "low", "high"))
    if not is_number(mean):
        return None, 0.0
    width = high - low if is_number(low) and is_number(high) else 0.0
    return Point(iteration, float(mean)), width / (2 * 1.96)


def unscorable_rows(e: Evidence) -> Found:
    rows = e.number("rollout.prompts"), e.number("rollout.samples_per_prompt")
    failed = e.events_of("unscorable")
    if not failed:
        return ()
    made = e.iterations * (rows[0] or 1) * (rows[1] or 1)
    if made and len(failed) <= MAX_UNSCORED * made:
        return ()
    return (Reading("rows that could not be scored", Point(_at(failed[-1]), float(len(failed)))),)


def not_finite(e: Evidence) -> Found:
    lost = e.events_of("non_finite")
    name = "rows or steps with numbers that were not finite"
    return (Reading(name, Point(_at(lost[-1]), float(len(lost)))),) if lost else ()


def tools_not_called(e: Evidence) -> Found:
    calls = e.series("tools/calls_mean")
    return (change("tools/calls_mean", calls),) if end(calls) == 0 else ()


def stopped(e: Evidence) -> Found:
    """The run ended itself, and has not been resumed since."""
    kinds = [event.get("kind") for event in e.events]
    ends = [i for i, kind in enumerate(kinds) if kind in ("stopped", "failed")]
    if not ends or "resumed" in kinds[ends[-1] :]:
        return ()
    return (Reading("iterations done", Point(_at(e.events[ends[-1]]), float(e.iterations))),)


def _at(event: Record) -> int:
    iteration = event.get("iteration")
    return iteration if type(iteration) is int else 0
