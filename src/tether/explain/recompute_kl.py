"""The inputs of the worked examples on KL and information, put through the functions that train."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tether.algo.aggregation import weighted_sum
from tether.algo.kl import estimate_kl, exact_kl, k1, k3
from tether.algo.losses import log_ratio
from tether.algo.masked import masked_mean, masked_sum

NATS_A_BIT = math.log(2)


def row(numbers: Sequence[float]) -> Float[Tensor, "1 tokens"]:
    return torch.tensor([list(numbers)], dtype=torch.float64)


def flat(x: Tensor) -> list[float]:
    return x.flatten().tolist()


def everywhere(x: Tensor) -> Bool[Tensor, "1 tokens"]:
    return torch.ones_like(x, dtype=torch.bool)


# P and Q of each exact KL.
DISTRIBUTIONS = {
    "die": ((1 / 6,) * 6, (0.1,) * 5 + (0.5,)),
    "coin": ((0.8, 0.2), (0.7, 0.3)),
    "tokens": ((0.3, 0.4, 0.3), (0.5, 0.3, 0.2)),
    "tokens_again": ((0.6, 0.3, 0.1), (0.7, 0.2, 0.1)),
    "weather": ((0.7, 0.2, 0.1), (0.5, 0.3, 0.2)),
    "forecaster": ((0.8, 0.2), (0.9, 0.1)),
    "mild": ((0.4, 0.3, 0.2, 0.1), (0.45, 0.35, 0.15, 0.05)),
    "wild": ((0.4, 0.3, 0.2, 0.1), (0.8, 0.1, 0.05, 0.05)),
    "grades": ((0.1, 0.3, 0.4, 0.2), (0.05, 0.25, 0.5, 0.2)),
    "kept": ((0.9, 0.1), (0.9, 0.1)),
    "turned": ((0.9, 0.1), (0.1, 0.9)),
    "ruled_out": ((0.5, 0.5), (1.0, 0.0)),
}


def kl_both_ways(name: str) -> list[float]:
    p, q = DISTRIBUTIONS[name]
    forwards, backwards = exact_kl(p, q), exact_kl(q, p)
    return [forwards, forwards / NATS_A_BIT, backwards, backwards / NATS_A_BIT]


def kl_terms(name: str) -> list[float]:
    """Compute P·ln(P/Q), outcome by outcome."""
    p, q = map(row, DISTRIBUTIONS[name])
    return flat(p * k1(p.log(), q.log(), everywhere(p)))


def kl_terms_backwards(name: str) -> list[float]:
    """Compute Q·ln(Q/P), outcome by outcome."""
    p, q = map(row, DISTRIBUTIONS[name])
    return flat(q * k1(q.log(), p.log(), everywhere(q)))


def log_probabilities(numbers: Sequence[float]) -> list[float]:
    return flat(row(numbers).log())


# A code for the weather P, made for P or for a wrong belief Q.


def weather_code_lengths() -> list[float]:
    """Entropy of P by its distance from even odds; cross-entropy is KL more."""
    p, q = DISTRIBUTIONS["weather"]
    entropy = math.log(3) - exact_kl(p, (1 / 3,) * 3)
    return [entropy / NATS_A_BIT, (entropy + exact_kl(p, q)) / NATS_A_BIT]


def weather_prefix_code() -> list[float]:
    """Mean bits on P of the best code for P, of the best for Q, and what the second costs more."""
    p, q = DISTRIBUTIONS["weather"]
    own, other = (float(weighted_sum(row(huffman_lengths(x)), row(p))) for x in (p, q))
    return [own, other, other - own]


def huffman_lengths(p: Sequence[float]) -> list[int]:
    """Length of each outcome's word in the best code whose words have whole bits."""
    lengths = [0] * len(p)
    heap = [(weight, [i]) for i, weight in enumerate(p)]
    while len(heap) > 1:
        (first, ones), (second, others), *heap = sorted(heap)
        for i in (*ones, *others):
            lengths[i] += 1
        heap.append((first + second, ones + others))
    return lengths


def weather_ideal_lengths() -> list[float]:
    """Bits of each outcome in the code that Q calls for."""
    return [surprisal_bits(p)[0] for p in DISTRIBUTIONS["weather"][1]]


# Tokens search, think, answer, search of the reference and the current policy.


def sampled_k1() -> list[float]:
    """log(current / reference)."""
    reference, current = (row(p).log()[:, [0, 1, 2, 0]] for p in DISTRIBUTIONS["tokens_again"])
    return flat(k1(current, reference, everywhere(current)))


def sampled_mean() -> list[float]:
    numbers = row(sampled_k1())
    return [float(masked_mean(numbers, everywhere(numbers)))]


def expected_estimates() -> list[float]:
    """k1, k2 and k3 averaged over every token as the current policy would draw it."""
    reference, current = map(row, DISTRIBUTIONS["tokens_again"])
    arguments = current.log(), reference.log(), everywhere(current)
    return [float(weighted_sum(estimate_kl(k, *arguments), current)) for k in ("k1", "k2", "k3")]


def held_k3() -> list[float]:
    """The mean of k3 for P = 0.01, 0.99 and Q = 0.5, 0.5; the same with each k3 held below 10."""
    p, q = row([0.01, 0.99]), row([0.5, 0.5])
    values = k3(p.log(), q.log(), everywhere(p))
    return [float(weighted_sum(x, p)) for x in (values, values.clamp(-10, 10))]


def sequence_kl() -> list[float]:
    """The sum of four tokens' k1 in nats and in bits, and their mean in nats."""
    kl = row([0.1, 0.5, 0.2, -0.1])
    total = float(masked_sum(kl, everywhere(kl)))
    return [total, total / NATS_A_BIT, float(masked_mean(kl, everywhere(kl)))]


# Surprise, in bits.


def surprisal_bits(p: float) -> list[float]:
    """KL from being sure of an outcome that had probability p."""
    return [exact_kl((1.0, 0.0), (p, 1 - p)) / NATS_A_BIT]


def surprisal_differences(name: str) -> list[float]:
    """Bits of surprise under Q minus under P, outcome by outcome, and their mean under P."""
    p, q = map(row, DISTRIBUTIONS[name])
    differences = k1(p.log(), q.log(), everywhere(p)) / NATS_A_BIT
    return [*flat(differences), float(weighted_sum(differences, p))]


# How much may change within a bound on the KL.


def distance_and_kl(name: str) -> list[float]:
    """Total variation (the largest change of any event's probability) and KL(P‖Q)."""
    p, q = DISTRIBUTIONS[name]
    return [math.fsum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2, exact_kl(p, q)]


def kl_of_keeping(share: float) -> list[float]:
    """The largest KL(old‖new) where new does as old in that share of cases, else as it likes."""
    return [exact_kl((1.0, 0.0), (share, 1 - share))]


def largest_changes(bounds: Sequence[float]) -> list[float]:
    """Pinsker: KL <= delta leaves every event's probability within sqrt(delta / 2)."""
    return [math.sqrt(bound / 2) for bound in bounds]


def ratios(name: str) -> list[float]:
    old, new = (row(p).log() for p in DISTRIBUTIONS[name])
    return flat(log_ratio(new, old).exp())


# Physics: two states with energies 0, 1 under P and 0, 2 under Q, at temperature 1.


def free_energy() -> list[float]:
    """Mean energy difference under P, difference of the free energies, and KL(P‖Q)."""
    first, second = row([0.0, 1.0]), row([0.0, 2.0])
    p, q = torch.softmax(-first, dim=1), torch.softmax(-second, dim=1)
    energy = float(weighted_sum(second - first, p))
    free = float(torch.logsumexp(-first, 1) - torch.logsumexp(-second, 1))
    return [energy, free, exact_kl(flat(p), flat(q))]


def kl_of_optimum(betas: Sequence[float]) -> list[float]:
    """KL to the reference of the best policy, reference x e^(r / beta), r = 1 for the second."""
    reference = row(DISTRIBUTIONS["tokens_again"][0])
    reward = row([0.0, 1.0, 0.0])
    best = (torch.softmax(reference.log() + reward / beta, dim=1) for beta in betas)
    return [exact_kl(flat(policy), flat(reference)) for policy in best]
