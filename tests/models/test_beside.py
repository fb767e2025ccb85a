"""The adapter's own forward and backward against peft's and against plain sums in float64."""

import copy

import pytest
import torch
from conftest import tiny_llama
from helpers import mask_of, read_out, sequences_of

from tether.config import LoraSection
from tether.models import adapters, products
from tether.models.adapters import Beside, add_adapter, learned
from tether.models.policy import Policy
from tether.models.products import use_onednn
from tether.models.reference import AdapterOffReference

ROWS = [([5, 9, 200], [7, 8, 256]), ([1], [2, 3, 4, 5, 6, 7])]

pytestmark = pytest.mark.skipif(not products.ON_BOARD, reason="torch without oneDNN on x86")


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(products, "WORTH_IT", 1)


def adapted():
    model = tiny_llama(260, 256)
    use_onednn(model)
    add_adapter(model, LoraSection(rank=4, alpha=12.0), 3, "actor")
    return model


def moved(model):
    generator = torch.Generator().manual_seed(5)
    for name, weight in learned(model).items():
        if "lora_B" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=generator)
    return model


def test_log_probs_and_gradients_are_pefts(monkeypatch):
    model, sequences = moved(adapted()), sequences_of(ROWS)
    used = []
    apply = Beside.apply
    monkeypatch.setattr(Beside, "apply", lambda *given: used.append(given) or apply(*given))

    def evaluated():
        log_probs, _ = read_out(Policy(model, 1.0, 1000), sequences, mask_of(sequences))
        log_probs.sum().backward()
        found = [log_probs.detach(), *(weight.grad for weight in learned(model).values())]
        model.zero_grad(set_to_none=True)
        return found

    own = evaluated()
    assert len(used) == sum("lora_A" in name for name in learned(model))
    monkeypatch.setattr(adapters, "by_onednn", lambda *given: False)
    for found, expected in zip(own, evaluated(), strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6 * max(1.0, scale))


def test_a_fresh_adapter_changes_no_bit():
    actor = Policy(adapted(), 0.7, 20)
    sequences = sequences_of(ROWS)
    mask = mask_of(sequences)
    old = actor.log_probs(sequences, mask)
    assert torch.equal(AdapterOffReference(actor).log_probs(sequences, mask, old), old)


def test_a_copy_reads_its_own_matrices():
    model, sequences = adapted(), sequences_of(ROWS)
    twin = moved(copy.deepcopy(model))
    read = [Policy(m, 1.0, 1000).log_probs(sequences, mask_of(sequences)) for m in (model, twin)]
    assert (read[0] - read[1]).abs().max() > 1e-3


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_and_theirs_are_those_of_float64(bias):
    generator = torch.Generator().manual_seed(2)
    shapes = (7, 24), (40, 24), (40,), (3, 24), (40, 3)
    x, weight, shift, a, b = (torch.randn(s, generator=generator) for s in shapes)
    shift = shift if bias else None

    def plain(x, weight, shift, a, b, scale):
        return torch.nn.functional.linear(x, weight, shift) + scale * (x @ a.T @ b.T)

    def evaluated(read, cast):
        inputs = [None if t is None else cast(t).clone() for t in (x, weight, shift, a, b)]
        learn = [inputs[i].requires_grad_() for i in (0, 3, 4)]
        y = read(*inputs, 1.5)
        first = torch.autograd.grad((0.1 * y).sin().sum(), learn, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), learn)
        return [y, *first, *second]

    found = evaluated(Beside.apply, torch.Tensor.float)
    for one, other in zip(found, evaluated(plain, torch.Tensor.double), strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one.double(), other, rtol=0, atol=3e-6 * max(1.0, scale))
