"""A probe: what a model knows and how it speaks, measured where it was not trained.

Facts by the likelihood of their choices, perplexity of plain text, greedy answers to ordinary
questions. The same probe before and after a run says what the run has cost.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from tether.data.batching import join_pairs, length_mask
from tether.data.messages import render_prompt
from tether.data.probe import Fact, Probe
from tether.models.policy import Policy
from tether.models.vocabulary import Vocabulary
from tether.ppo.estimates import Interval
from tether.ppo.scoring import response_texts
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Greedy, SingleTurn

MAX_ANSWER_TOKENS = 48
PROBE_TEMPERATURE = 1.0  # whatever a run samples at: a likelihood is the model's own
ASKED = "Question: {}\nAnswer:"


@dataclass(frozen=True)
class ProbeResult:
    """What a probe found, item by item, in the order of its files."""

    right: list[bool]  # per fact
    nats: list[float]  # per text: mean negative log-likelihood of its tokens
    answers: list[str]  # per question

    def facts(self) -> Interval:
        """Return the share of facts whose right choice is the likeliest."""
        return Interval.of_mean([float(x) for x in self.right])

    def perplexity(self) -> Interval:
        """Return the perplexity per token: exp of the mean over texts."""
        return Interval.of_mean(self.nats).exp()

    def facts_gained(self, before: "ProbeResult") -> Interval:
        """Return the change in the share of facts; items are compared with themselves."""
        pairs = zip(self.right, before.right, strict=True)
        return Interval.of_mean([float(after) - float(was) for after, was in pairs])

    def perplexity_ratio(self, before: "ProbeResult") -> Interval:
        """Return perplexity over that of before; texts are compared with themselves."""
        pairs = zip(self.nats, before.nats, strict=True)
        return Interval.of_mean([after - was for after, was in pairs]).exp()

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "ProbeResult":
        return cls(list(record["right"]), list(record["nats"]), list(record["answers"]))


def run_probe(probe: Probe, policy: Policy, vocabulary: Vocabulary) -> ProbeResult:
    """Ask a model everything that a probe holds."""
    tokenizer = vocabulary.tokenizer
    return ProbeResult(
        right=_right(probe.facts, policy, tokenizer),
        nats=_nats(probe.texts, policy, tokenizer),
        answers=_answers(probe.questions, policy, vocabulary),
    )


def _right(facts: Sequence[Fact], policy: Policy, tokenizer: PreTrainedTokenizerBase) -> list[bool]:
    """Return for each fact whether its right choice has the largest log-likelihood per character.

    Per character, as a sum favours short choices and a mean per token those of many sure tokens.
    """
    pairs = [
        _continued(tokenizer, ASKED.format(fact.question), f" {choice}")
        for fact in facts
        for choice in fact.choices
    ]
    totals = iter(_log_likelihoods(pairs, policy))
    found = []
    for fact in facts:
        scores = [next(totals) / len(choice) for choice in fact.choices]
        found.append(max(range(len(scores)), key=scores.__getitem__) == fact.answer)
    return found


def _nats(texts: Sequence[str], policy: Policy, tokenizer: PreTrainedTokenizerBase) -> list[float]:
    """Return the mean negative log-likelihood of each text's tokens but the first."""
    ids = [_encode(tokenizer, text) for text in texts]
    pairs = [(row[:1], row[1:]) for row in ids]
    totals = _log_likelihoods(pairs, policy)
    return [-total / len(rest) for total, (_, rest) in zip(totals, pairs, strict=True)]


def _answers(questions: Sequence[str], policy: Policy, vocabulary: Vocabulary) -> list[str]:
    if not questions:
        return []
    ids = [render_prompt(vocabulary.tokenizer, question, None) for question in questions]
    sampler = LocalSampler(vocabulary.eos_ids, MAX_ANSWER_TOKENS, policy.temperature)
    sampler.sync(policy.model, 0)
    rollout = sampler.run([SingleTurn(row) for row in ids], Greedy())
    return response_texts(rollout, vocabulary)


def _log_likelihoods(pairs: Sequence[tuple[list[int], list[int]]], policy: Policy) -> list[float]:
    """Return the log-likelihood of each second part after its first."""
    if not pairs:
        return []
    sequences = join_pairs(pairs).to(policy.model.device)
    mask = length_mask(sequences.response_lengths, sequences.width)
    return policy.log_probs(sequences, mask).double().sum(dim=1).tolist()


def _continued(
    tokenizer: PreTrainedTokenizerBase, begin: str, rest: str
) -> tuple[list[int], list[int]]:
    """Encode both together, so that a token at the seam is as in running text, and cut there."""
    whole, first = _encode(tokenizer, begin + rest), _encode(tokenizer, begin)
    same = 0
    while same < min(len(first), len(whole) - 1) and whole[same] == first[same]:
        same += 1
    return whole[:same], whole[same:]


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])
