"""The readout's own derivative against autograd through log_softmax, in float64."""

import pytest
import torch
from helpers import set_limits, table
from torch import nn

from tether.models import token_log_probs
from tether.models.token_log_probs import token_full_kl, token_log_probs_and_entropies

VOCABULARY = 40


def problem(bias: bool):
    generator = torch.Generator().manual_seed(3)
    head = nn.Linear(6, VOCABULARY, bias=bias, dtype=torch.float64)
    for weight in head.parameters():
        weight.data = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
    states = torch.randn(3, 5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, VOCABULARY, (3, 5), generator=generator)
    mask = torch.rand(3, 5, generator=generator) < 0.7
    weights = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    return head, states, ids, mask, weights


def by_autograd(head, states, ids, mask, temperature):
    log_p = torch.log_softmax(head(states) / temperature, dim=-1)
    chosen = log_p.gather(2, ids[:, :, None]).squeeze(2)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return torch.where(mask, chosen, 0.0), torch.where(mask, entropy, 0.0)


def gradients(found, weights, parts, states, head):
    loss = sum((weights[i] * found[i]).sum() for i in parts)
    return torch.autograd.grad(loss, [states, *head.parameters()])


@table("bias", [False, True])
@table("temperature", [1.0, 0.6])
@table("parts", [(0,), (1,), (0, 1)])
@table("cells", [1, 4, 1000])
@table("block", [1, 3, 1000])
def test_values_and_gradients_are_autograds(monkeypatch, bias, temperature, parts, cells, block):
    """Log-prob alone, entropy alone, both; kept in one chunk, or made again in several."""
    set_limits(monkeypatch, chunk=cells * VOCABULARY, block=block * VOCABULARY)
    head, states, ids, mask, weights = problem(bias)
    found = token_log_probs_and_entropies(head, states, ids, mask, temperature)
    expected = by_autograd(head, states, ids, mask, temperature)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
    own = gradients(found, weights, parts, states, head)
    for a, b in zip(own, gradients(expected, weights, parts, states, head), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@table("piece", [1, 2, 5])
@table("block", [1, 2])
def test_pieces_and_blocks_change_no_value_and_no_gradient(monkeypatch, piece, block):
    set_limits(monkeypatch, piece=piece * VOCABULARY, block=block * VOCABULARY)
    head, states, ids, mask, weights = problem(True)
    found = token_log_probs_and_entropies(head, states, ids, mask, 0.6)
    expected = by_autograd(head, states, ids, mask, 0.6)
    own = gradients(found, weights, (0, 1), states, head)
    theirs = gradients(expected, weights, (0, 1), states, head)
    for a, b in zip([*found, *own], [*expected, *theirs], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_two_graphs_at_once_have_rooms_of_their_own():
    """The second forward runs before the first backward, and after a room was given back."""
    head, states, ids, mask, weights = problem(False)
    expected = gradients(by_autograd(head, states, ids, mask, 1.0), weights, (0,), states, head)
    for _ in range(2):
        first = token_log_probs_and_entropies(head, states, ids, mask, 1.0)
        second = token_log_probs_and_entropies(head, 2 * states, ids, mask, 1.0)
        own = gradients(first, weights, (0,), states, head)
        for a, b in zip(own, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
        gradients(second, weights, (0,), states, head)


@table("cells", [1, 4, 1000])
def test_full_kl_and_its_gradient_are_autograds_in_any_number_of_chunks(monkeypatch, cells):
    set_limits(monkeypatch, piece=cells * VOCABULARY)
    head, states, _, mask, weights = problem(True)
    other, other_states, *_ = problem(True)
    other.weight.data += 0.3
    found = token_full_kl(other, other_states.detach(), head, states, mask, 0.7)
    log_p = torch.log_softmax(other(other_states.detach()) / 0.7, dim=-1)
    log_q = torch.log_softmax(head(states) / 0.7, dim=-1)
    expected = torch.where(mask, (log_p.exp() * (log_p - log_q)).sum(-1), 0.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    for a, b in zip(
        gradients([found], weights, [0], states, head),
        gradients([expected], weights, [0], states, head),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_a_frozen_head_gets_no_gradient_and_the_states_theirs():
    head, states, ids, mask, _ = problem(False)
    head.requires_grad_(False)
    log_probs, _ = token_log_probs_and_entropies(head, states, ids, mask, 1.0)
    log_probs.sum().backward()
    assert head.weight.grad is None
    assert states.grad[mask].abs().min() > 0
    assert not states.grad[~mask].any()


def test_probabilities_that_were_used_up_are_not_used_again():
    head, states, ids, mask, _ = problem(False)
    log_probs, _ = token_log_probs_and_entropies(head, states, ids, mask, 1.0)
    log_probs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        log_probs.sum().backward()


def test_a_token_that_cannot_be_sampled_costs_no_entropy_and_has_no_gradient():
    """Probabilities 1/2, 1/2, 0: entropy log 2, to the last bit that float32 has."""
    head = nn.Linear(1, 3)
    head.weight.data.zero_()
    head.bias.data = torch.tensor([0.0, 0.0, -torch.inf])
    states = torch.zeros(1, 1, 1, requires_grad=True)
    ids, mask = torch.tensor([[1]]), torch.tensor([[True]])
    log_probs, entropies = token_log_probs_and_entropies(head, states, ids, mask, 1.0)
    assert float(log_probs.detach()) == pytest.approx(-0.6931472, abs=1e-7)
    assert float(entropies.detach()) == pytest.approx(0.6931472, abs=1e-7)
    (log_probs + entropies).sum().backward()
    assert head.bias.grad.tolist() == pytest.approx([-0.5, 0.5, 0.0], abs=1e-7)


def test_a_very_unlikely_token_keeps_its_log_prob():
    """exp(-200) is 0 in float32; its log is not lost for that."""
    head = nn.Linear(1, 2)
    head.weight.data.zero_()
    head.bias.data = torch.tensor([100.0, -100.0])
    ids, mask = torch.tensor([[1]]), torch.tensor([[True]])
    log_probs, _ = token_log_probs_and_entropies(head, torch.zeros(1, 1, 1), ids, mask, 1.0)
    assert float(log_probs.detach()) == pytest.approx(-200.0, abs=1e-4)


def test_room_kept_on_one_device_is_not_lent_to_another():
    """A plan runs the heads on `meta` tensors in the process that has trained on a CPU."""
    for device in ("cpu", "meta"):
        weight, states = (torch.zeros(n, 4, device=device, requires_grad=True) for n in (9, 3))
        ids = torch.zeros(3, dtype=torch.long, device=device)
        log_probs, _ = token_log_probs.FusedLogProbs.apply(states, weight, None, ids, 1.0, True)
        log_probs.sum().backward()
        assert weight.grad.device.type == device
