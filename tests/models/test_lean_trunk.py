"""The sampler's own trunk against transformers', from the same cache."""

import pytest
import torch
from helpers import table

from models.families import make_family
from tether.config import LoraSection
from tether.models.forward import decode_step, prefill
from tether.models.kv_cache import SlotCache
from tether.models.lean_trunk import LeanTrunk, can_be_lean, packed_trunk
from tether.models.lora import adapter_merged, add_adapter
from tether.models.precision import compute_in

PROMPTS = [[3, 5, 8, 13, 21], [4], [7, 7, 9]]
LEAN = ("llama", "smollm2", "qwen2", "qwen3")
LONGEST = 16


def decoded(trunk, layers):
    """States after prompts of three lengths, a token each, pieces of two rows, a token each."""
    cache = SlotCache(layers, 4, LONGEST, torch.device("cpu"))
    padded = torch.tensor([ids + [0] * (5 - len(ids)) for ids in PROMPTS])
    found = [prefill(trunk, cache, padded, [5, 1, 3], [(0,), (1, 3), (2,)])]
    rows = [(0,), (1,), (2,), (3,)]
    one = torch.tensor([[11], [12], [13], [14]])
    found.append(decode_step(trunk, cache, one, [1] * 4, rows))
    pieces = torch.tensor([[30, 31, 32], [40, 41, 0]])
    found.append(decode_step(trunk, cache, pieces, [3, 2], [(2,), (0,)]))
    found.append(decode_step(trunk, cache, one + 50, [1] * 4, rows))
    return torch.cat(found)


@pytest.mark.parametrize("family", LEAN)
def test_its_states_are_those_of_transformers(family):
    model = make_family(family)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # biases begin at 0, norms at 1
            if name.endswith("bias") or "norm" in name:
                weight += torch.linspace(-0.3, 0.3, len(weight))
    expected = decoded(model.model, 3)
    with packed_trunk(model, LONGEST) as lean:
        assert isinstance(lean, LeanTrunk)
        torch.testing.assert_close(decoded(lean, 3), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", LEAN)
def test_in_float64_they_differ_by_its_rounding_alone(family, float64_norms):
    model = make_family(family).double()
    expected = decoded(model.model, 3)
    with packed_trunk(model, LONGEST) as lean:
        torch.testing.assert_close(decoded(lean, 3), expected, rtol=1e-12, atol=1e-12)


def test_products_are_in_bfloat16_where_the_model_computes_in_it():
    model = make_family("smollm2")
    exact = decoded(model.model, 3)
    compute_in(model, "bfloat16")
    expected = decoded(model.model, 3)
    with packed_trunk(model, LONGEST) as lean:
        found = decoded(lean, 3)
    assert found.dtype == torch.float32
    gap = (found - expected).abs().mean() / (exact - expected).abs().mean()
    assert float((exact - expected).abs().mean()) > 0
    assert float(gap) < 0.5, "the same operands are rounded"


def test_an_adapter_counts_once_it_is_merged():
    model = make_family("llama")
    before = decoded(model.model, 3)
    add_adapter(model, LoraSection(rank=3, alpha=6), 0, "actor")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight += 0.2
    expected = decoded(model.model, 3)
    assert float((expected - before).abs().max()) > 0.01
    with adapter_merged(model), packed_trunk(model, LONGEST) as lean:
        torch.testing.assert_close(decoded(lean, 3), expected, rtol=1e-5, atol=1e-5)


@table(
    ("family", "longest", "lean"),
    [
        ("llama", 100, True),
        ("mistral", 4, True),
        ("mistral", 5, False),  # its window is 4
        ("qwen2-window", 16, False),
        ("gpt2", 4, False),
    ],
)
def test_layers_of_other_kinds_and_shorter_windows_stay_with_transformers(family, longest, lean):
    model = make_family(family)
    assert can_be_lean(model.base_model, longest) is lean
    with packed_trunk(model, longest) as trunk:
        assert isinstance(trunk, LeanTrunk) is lean
