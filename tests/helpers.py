"""Slow, obvious references and small makers that several tests share. Nothing of tether computes
a reference number here: loops over plain lists, and transformers' own forward."""

import functools
import inspect
import json
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from tiny_models import tiny_llama as tiny_llama
from torch import Tensor

from tether.config import ESTIMATORS, Config
from tether.config.load import validate_config
from tether.models import token_log_probs
from tether.rollout.local import LocalSampler
from tether.rollout.sampler import Draw, SingleTurn
from tether.types import Experience, Rollout, Sequences


def table(names: str | tuple[str, ...], rows: Iterable, ids: Callable | Iterable | None = None):
    """Run a test on every row of a table as one test, and report every row that fails.

    Called as `pytest.mark.parametrize`, for rows that take next to no time: there each row would
    cost more as a test of its own than in its body. The rows share the test's fixtures.
    """
    names = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    rows = list(rows)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def all_rows(*args, **kwargs) -> None:
            assert rows, "an empty table proves nothing"
            failed = []
            for number, row in enumerate(rows):
                values = _row_values(row, len(names))
                try:
                    test(*args, **kwargs, **dict(zip(names, values, strict=True)))
                except (Exception, pytest.fail.Exception) as fault:
                    failed.append(f"{_row_name(ids, number, row, values)}: {_told(fault)}")
            if failed:
                pytest.fail(
                    f"{len(failed)} of {len(rows)} rows\n" + "\n".join(failed), pytrace=False
                )

        signature = inspect.signature(test)
        rest = [p for name, p in signature.parameters.items() if name not in names]
        all_rows.__signature__ = signature.replace(parameters=rest)  # the fixtures it asks for
        return all_rows

    return decorate


def _row_values(row: object, count: int) -> tuple:
    if hasattr(row, "values") and hasattr(row, "marks"):  # pytest.param
        return tuple(row.values)
    return (row,) if count == 1 else tuple(row)


def _row_name(ids, number: int, row: object, values: tuple) -> str:
    if getattr(row, "id", None) and hasattr(row, "marks"):
        return str(row.id)
    if callable(ids):
        return "-".join(str(ids(value)) for value in values)
    return str(list(ids)[number]) if ids else ", ".join(map(ascii, values))


def _told(fault: BaseException) -> str:
    """The line of the test that failed, and why."""
    lines = [f for f in traceback.extract_tb(fault.__traceback__) if f.filename != __file__]
    where = f"{Path(lines[0].filename).name}:{lines[0].lineno}" if lines else "?"
    return f"{where}: {type(fault).__name__}: {fault}"


# Estimators that a plain reward is enough for. gdpo wants several, distillation a teacher.
PLAIN_ESTIMATORS = [name for name in ESTIMATORS if name not in ("gdpo", "distillation")]


def few_or_many(names: str | tuple[str, ...], few, many):
    """Run a test with `few` in `make test` and with `many` in `make test-long`."""
    values = (many,) if isinstance(names, str) else many
    return pytest.mark.parametrize(names, [few, pytest.param(*values, marks=pytest.mark.long)])


def first_or_all(values: Iterable, quick: int = 1) -> list:
    """Return values for `parametrize`: the first in `make test`, the others in `make test-long`."""
    long = pytest.mark.long
    return [v if i < quick else pytest.param(v, marks=long) for i, v in enumerate(values)]


def changed(mapping: dict, **dotted: object) -> dict:
    """A deep copy with `section__field=value` replaced."""
    mapping = json.loads(json.dumps(mapping))
    for path, value in dotted.items():
        *sections, field = path.split("__")
        inner = mapping
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[field] = value
    return mapping


def configured(mapping: dict, **dotted: object) -> Config:
    return validate_config(changed(mapping, **dotted))


def set_limits(monkeypatch, **logits: int) -> None:
    """Compute that many logits at once on a CPU: `chunk`, `piece`, `block`."""
    limits = replace(token_log_probs.CPU_LIMITS, **logits)
    monkeypatch.setattr(token_log_probs, "CPU_LIMITS", limits)


def f64(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@st.composite
def grids(draw, *cells, max_rows: int = 4, max_columns: int = 6) -> list[list[list]]:
    """One rectangle (list of rows) for each strategy in `cells`, all of one drawn shape."""
    rows, columns = draw(st.integers(1, max_rows)), draw(st.integers(1, max_columns))
    kinds = [st.lists(cell, min_size=columns, max_size=columns) for cell in cells]
    return [draw(st.lists(row, min_size=rows, max_size=rows)) for row in kinds]


numbers = st.floats(-5, 5, allow_subnormal=False)


def tiny_recipe(model: str, data: str, run: Path) -> dict:
    """A run of two short iterations; a test changes what it is about."""
    return {
        "threads": 1,
        "run": {"dir": str(run), "rollouts_every": 1},
        "model": {"actor": model},
        "data": {"train": data, "heldout": data},
        "rollout": {"prompts": 6, "samples_per_prompt": 2, "max_response_tokens": 8},
        "reward": {"kind": "exact_answer"},
        "actor": {"lr": 1e-3, "epochs": 2, "minibatch_rows": 5},
        "critic": {"lr": 1e-3, "epochs": 2, "minibatch_rows": 5},
        "train": {"iterations": 2},
    }


def sequences_of(rows: list[tuple[list[int], list[int]]], width: int | None = None) -> Sequences:
    """(prompt ids, response ids) a row, padded by hand with id 0 to `width`."""
    width = width or max(len(p) + len(r) for p, r in rows)
    ids = [p + r + [0] * (width - len(p) - len(r)) for p, r in rows]
    lengths = [[len(p) for p, _ in rows], [len(r) for _, r in rows]]
    return Sequences(torch.tensor(ids), *map(torch.tensor, lengths))


def mask_of(sequences: Sequences) -> Tensor:
    """True on every response token."""
    mask = torch.zeros(len(sequences.ids), sequences.width, dtype=torch.bool)
    for row, length in enumerate(sequences.response_lengths.tolist()):
        mask[row, :length] = True
    return mask


def read_out(policy, sequences: Sequences, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies with gradients, as the updates take them."""
    return policy.log_probs_and_entropies(policy.states(sequences), sequences, mask)


def logits_before(model, prompt: list[int], response: list[int]) -> Tensor:
    """Logits that predict each response token: transformers' forward on one bare row."""
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0]
    return torch.stack([logits[len(prompt) + t - 1] for t in range(len(response))])


def slow_log_probs(model, prompt: list[int], response: list[int], temperature=1.0) -> Tensor:
    logits = logits_before(model, prompt, response) / temperature
    return torch.stack([torch.log_softmax(x, 0)[i] for x, i in zip(logits, response, strict=True)])


def slow_entropies(model, prompt: list[int], response: list[int], temperature=1.0) -> Tensor:
    p = torch.softmax(logits_before(model, prompt, response).double() / temperature, dim=-1)
    return torch.stack([-(row * row.log()).sum() for row in p])


def sample(
    model,
    prompts: list[list[int]],
    limit: int = 8,
    eos_ids: tuple[int, ...] = (),
    choice=None,
    temperature: float = 1.0,
    episodes: list | None = None,
) -> Rollout:
    sampler = LocalSampler(frozenset(eos_ids), limit, temperature)
    sampler.sync(model, 0)
    episodes = episodes or [SingleTurn(ids) for ids in prompts]
    return sampler.run(episodes, choice or Draw(7, "token", 0))


def generated(model, prompt: list[int], tokens: int) -> list[int]:
    """Greedy tokens by transformers' own generate, of one bare row."""
    found = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


def response(rollout: Rollout, row: int) -> list[int]:
    return rollout.response_ids[row, : rollout.response_lengths[row]].tolist()


def made_experience(
    roles, rows: int = 7, seed: int = 0, unscored: tuple[int, ...] = (), pairs: list | None = None
):
    """Random rows of different lengths with holes in their masks, in the actor's own float type.

    Old log-probs lie so far from the actor's that some ratios are clipped on either side. `pairs`
    are (prompt ids, response ids) in place of random ones.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = pairs or [
        (
            torch.randint(0, 250, (2 + row % 3,), generator=generator).tolist(),
            torch.randint(0, 250, (1 + 2 * row % 7,), generator=generator).tolist(),
        )
        for row in range(rows)
    ]
    sequences = sequences_of(pairs)
    mask = mask_of(sequences)
    mask[:, 2] = False  # a column of tool output
    mask[list(unscored)] = False
    names = ("old_log_probs", "values", "returns", "policy_advantages")
    cells = {name: torch.randn(mask.shape, generator=generator).double() for name in names}
    now = roles.actor.log_probs(sequences, mask)
    cells["old_log_probs"] = now + 0.3 * cells["old_log_probs"]
    cells = {name: torch.where(mask, x, 0.0).to(now.dtype) for name, x in cells.items()}
    zeros = torch.zeros_like(now)
    return Experience(
        sequences=sequences,
        response_mask=mask,
        ref_log_probs=zeros,
        kl=zeros,
        final_values=zeros[:, 0],
        token_level_scores=zeros,
        token_level_rewards=zeros,
        advantages=zeros,
        correction_weights=torch.ones_like(now),
        **cells,
    )


def only_rows(experience: Experience, rows: list[int]) -> Experience:
    """The same experience as if the other rows had never been sampled."""
    picked = torch.tensor(rows)
    tensors = {
        name: getattr(experience, name)[picked]
        for name in experience.__dataclass_fields__
        if name not in ("sequences", "rows")
    }
    s = experience.sequences
    kept = Sequences(s.ids[picked], s.prompt_lengths[picked], s.response_lengths[picked])
    return replace(
        experience,
        sequences=kept,
        **{k: v if v.ndim == 1 else v[:, : kept.width] for k, v in tensors.items()},
    )


def captured_gradients(optimizer, monkeypatch) -> list[list[Tensor]]:
    """From now on a step keeps its gradients here and moves no weight."""
    steps: list[list[Tensor]] = []

    def step() -> Tensor:
        steps.append([p.grad.clone() for p in optimizer.parameters])
        optimizer.adam.zero_grad(set_to_none=True)
        return torch.tensor(1.0)

    monkeypatch.setattr(optimizer, "step", step)
    return steps


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().split("\n") if line]


def distinct_letters(response: str) -> float:
    """A reward that a random model earns some of."""
    return len(set(response)) / 8


class Stop(BaseException):
    """Ends a run as rudely as an exception can."""


def stopping(calls: int):
    """A reward that ends the process's work at that call; every run starts to count anew."""
    seen = []

    def reward(response: str) -> float:
        seen.append(response)
        if len(seen) == calls:
            raise Stop
        return distinct_letters(response)

    return reward
