"""KL between two typed distributions: exact, and from samples."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tether.algo.kl import estimate_kl, exact_kl
from tether.algo.random import uniform
from tether.errors import UserError
from tether.explain.document import Section, Table
from tether.explain.words import Language, say
from tether.rollout.token_choice import inverse_cdf

NATS_PER_BIT = math.log(2)
CHUNK = 100_000  # samples drawn at a time
ESTIMATORS = ("k1", "k2", "k3")


def parse_distribution(name: str, text: str) -> list[float]:
    """Parse `0.8,0.2` or `1/6,5/6` as probabilities."""
    probabilities = []
    for part in text.split(","):
        try:
            probabilities.append(float(Fraction(part.strip())))
        except (ValueError, ZeroDivisionError, OverflowError):
            raise UserError(
                f"{name}: {part!r} is not a probability; write numbers separated by commas, such "
                f"as 0.8,0.2 or 1/6,5/6."
            ) from None
    if min(probabilities) < 0:
        raise UserError(f"{name} holds {min(probabilities):g}; a probability is never negative.")
    total = math.fsum(probabilities)
    if not math.isclose(total, 1, abs_tol=1e-6):
        raise UserError(f"{name} sums to {total:g}, not to 1; probabilities must sum to 1.")
    return probabilities


def parse_pair(p_text: str, q_text: str) -> tuple[list[float], list[float]]:
    """Parse P and Q, which must have the same number of outcomes."""
    p, q = parse_distribution("P", p_text), parse_distribution("Q", q_text)
    if len(p) != len(q):
        raise UserError(f"P has {len(p)} outcomes and Q has {len(q)}; give both the same outcomes.")
    return p, q


def tell_exact(p: Sequence[float], q: Sequence[float], language: Language = "en") -> Section:
    """Show both directions in nats and bits, with the terms of the sums."""
    rows = [[say("kl_outcome", language), "p", "q", "p·ln(p/q)", "q·ln(q/p)"]]
    for i, (pi, qi) in enumerate(zip(p, q, strict=True), start=1):
        terms = [_number(_term(pi, qi)), _number(_term(qi, pi))]
        rows.append([str(i), _number(pi), _number(qi), *terms])
    forwards, backwards = exact_kl(p, q), exact_kl(q, p)
    sums = [_number(x) for x in (sum(p), sum(q), forwards, backwards)]
    rows.append([say("kl_sum", language), *sums])
    lines = [
        _line("P", "Q", forwards, language),
        _line("Q", "P", backwards, language),
        *_impossible("P", "Q", p, q, language),
        *_impossible("Q", "P", q, p, language),
    ]
    return Section(say("title_kl", language), [Table(rows), *lines])


def _line(first: str, second: str, kl: float, language: Language) -> str:
    bits = _number(kl / NATS_PER_BIT)
    return say("kl_line", language, p=first, q=second, nats=_number(kl), bits=bits)


@dataclass(frozen=True)
class Estimate:
    """One estimator over the first `samples` outcomes."""

    samples: int
    estimator: str
    mean: float
    bias: float  # mean - exact
    spread: float  # standard deviation of one sample's estimate
    error: float  # of the mean: spread / sqrt(samples)


def sample_estimates(
    p: Sequence[float], q: Sequence[float], samples: int, seed: int
) -> list[Estimate]:
    """Estimate the KL by k1, k2 and k3 from the first 10, 100, … outcomes of one sample of p."""
    exact, drawn = exact_kl(p, q), _draw(p, samples, seed)
    log_p, log_q = _log(p)[drawn], _log(q)[drawn]
    everywhere = torch.ones_like(drawn, dtype=torch.bool)
    found = []
    for count in _counts(samples):
        for name in ESTIMATORS:
            values = estimate_kl(name, log_p, log_q, everywhere)[:count]
            mean = float(values.mean())
            spread = float(values.std()) if count > 1 else math.nan
            error = spread / math.sqrt(count)
            found.append(Estimate(count, name, mean, mean - exact, spread, error))
    return found


SAMPLE_COLUMNS = ("samples", "estimator", "mean", "bias", "spread", "error")  # `kl_…` in words


def tell_samples(
    p: Sequence[float], q: Sequence[float], samples: int, seed: int, language: Language = "en"
) -> Section:
    """Show the estimates of `sample_estimates`; if the KL is infinite, say so instead."""
    title = say("kl_samples_title", language, seed=seed)
    exact = exact_kl(p, q)
    if not math.isfinite(exact):
        return Section(title, [say("kl_no_limit", language)])
    rows = [[say(f"kl_{column}", language) for column in SAMPLE_COLUMNS]]
    before = None
    for e in sample_estimates(p, q, samples, seed):
        count = "" if e.samples == before else str(e.samples)
        numbers = [_number(x) for x in (e.mean, e.bias, e.spread, e.error)]
        rows.append([count, e.estimator, *numbers])
        before = e.samples
    limit = _number(math.fsum(0.5 * pi * math.log(pi / qi) ** 2 for pi, qi in _possible(p, q)))
    return Section(
        title,
        [
            say("kl_exact", language, nats=_number(exact)),
            Table(rows, numbers_from=2),
            say("kl_estimators", language, limit=limit),
        ],
    )


def _draw(p: Sequence[float], samples: int, seed: int) -> Tensor:
    u = uniform(seed, "kl", np.arange(samples))
    weights = torch.tensor(p, dtype=torch.float64)
    return torch.cat([inverse_cdf(weights.expand(len(part), -1), part) for part in u.split(CHUNK)])


def _log(p: Sequence[float]) -> Float[Tensor, " outcomes"]:
    return torch.tensor(p, dtype=torch.float64).log()


def _counts(samples: int) -> Iterator[int]:
    """Yield 10, 100, 1000, … and at last `samples`."""
    count = 10
    while count < samples:
        yield count
        count *= 10
    yield samples


def _term(pi: float, qi: float) -> float:
    """Compute p·ln(p/q) of one outcome: 0 where p is 0, for every q."""
    if pi == 0:
        return 0.0
    return pi * math.log(pi / qi) if qi > 0 else math.inf


def _possible(p: Sequence[float], q: Sequence[float]) -> list[tuple[float, float]]:
    return [(pi, qi) for pi, qi in zip(p, q, strict=True) if pi > 0]


def _impossible(
    name: str, other: str, p: Sequence[float], q: Sequence[float], language: Language
) -> list[str]:
    """Say why a KL is infinite."""
    return [
        say("kl_infinite", language, p=name, q=other, i=i, probability=pi)
        for i, (pi, qi) in enumerate(zip(p, q, strict=True), start=1)
        if pi > 0 and qi == 0
    ]


def _number(x: float) -> str:
    return "–" if math.isnan(x) else "∞" if x == math.inf else f"{x + 0.0:.6f}"
