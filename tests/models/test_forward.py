"""Log-probs, entropies and values of response tokens, against transformers' own logits."""

import pytest
import torch
from helpers import (
    mask_of,
    read_out,
    sequences_of,
    set_limits,
    slow_entropies,
    slow_log_probs,
    table,
    tiny_llama,
)
from hypothesis import given
from hypothesis import strategies as st

from tether.models.critic import Critic
from tether.models.policy import Policy

ROWS = [
    ([5, 9, 200], [7, 8, 256]),
    ([1], [2, 3, 4, 5, 6, 7]),
    ([11, 12, 13, 14, 15, 16, 17], [18]),
    ([0, 0, 21], [0, 22, 0, 0]),  # id 0, which padding also uses, is a token like any other
]
MANY = 10_000  # microbatch tokens


def log_probs(model, rows, microbatch_tokens=MANY, width=None, temperature=1.0):
    sequences = sequences_of(rows, width)
    return Policy(model, temperature, microbatch_tokens).log_probs(sequences, mask_of(sequences))


def test_logits_at_t_minus_1_score_token_t(tiny_model):
    """Trap 3."""
    for prompt, response in ROWS:
        expected = slow_log_probs(tiny_model, prompt, response)
        found = log_probs(tiny_model, [(prompt, response)])[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@table("microbatch_tokens", [1, 16, MANY])
@table("width", [None, 40])
def test_padding_and_batch_size_change_no_log_prob(tiny_model, width, microbatch_tokens):
    """Trap 2; also Trap 1, as one row is made of the id that padding uses."""
    found = log_probs(tiny_model, ROWS, microbatch_tokens, width)
    for row, (prompt, response) in enumerate(ROWS):
        expected = slow_log_probs(tiny_model, prompt, response)
        torch.testing.assert_close(found[row, : len(response)], expected, rtol=0, atol=1e-5)
        assert (found[row, len(response) :] == 0).all()


@given(st.permutations(range(4)))
def test_position_in_the_batch_changes_no_log_prob(tiny_model, order):
    """Trap 2."""
    found = log_probs(tiny_model, [ROWS[i] for i in order])
    torch.testing.assert_close(found, log_probs(tiny_model, ROWS)[list(order)], rtol=0, atol=1e-5)


def test_what_padding_holds_changes_nothing(tiny_model):
    """Trap 1: a padded cell may hold the EOS id, as with pad = EOS."""
    plain = sequences_of(ROWS)
    used = (
        torch.arange(plain.ids.shape[1]) < (plain.prompt_lengths + plain.response_lengths)[:, None]
    )
    filled = type(plain)(
        torch.where(used, plain.ids, 256), plain.prompt_lengths, plain.response_lengths
    )
    policy, mask = Policy(tiny_model, 1.0, MANY), mask_of(plain)
    assert torch.equal(policy.log_probs(plain, mask), policy.log_probs(filled, mask))


@table("temperature", [0.5, 2.0])
def test_the_temperature_divides_the_logits(tiny_model, temperature):
    found = log_probs(tiny_model, ROWS, temperature=temperature)
    for row, (prompt, response) in enumerate(ROWS):
        expected = slow_log_probs(tiny_model, prompt, response, temperature)
        torch.testing.assert_close(found[row, : len(response)], expected, rtol=0, atol=1e-5)


@table("temperature", [0.05, 1.0, 3.0])
def test_entropy_is_exact_and_never_negative(tiny_model, temperature):
    """Trap 15: -sum p log p of the tempered distribution."""
    sequences = sequences_of(ROWS)
    _, found = read_out(Policy(tiny_model, temperature, MANY), sequences, mask_of(sequences))
    assert (found >= 0).all()
    for row, (prompt, response) in enumerate(ROWS):
        expected = slow_entropies(tiny_model, prompt, response, temperature).float()
        torch.testing.assert_close(found[row, : len(response)], expected, rtol=1e-5, atol=1e-5)


def test_masked_cells_hold_zero(tiny_model):
    sequences = sequences_of(ROWS)
    mask = mask_of(sequences)
    mask[:, 1] = False
    mask[2] = False
    policy = Policy(tiny_model, 1.0, MANY)
    found, entropies = read_out(policy, sequences, mask)
    assert (found[~mask] == 0).all()
    assert (entropies[~mask] == 0).all()
    torch.testing.assert_close(found[mask], log_probs(tiny_model, ROWS)[mask], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cells", [1, 3])
def test_chunks_of_logits_change_neither_log_probs_nor_gradients(monkeypatch, cells):
    model = tiny_llama(50, 3).double()
    rows = [([5, 9], [7, 8, 3]), ([1], [2, 3, 4, 5, 6, 7])]

    def evaluated():
        sequences = sequences_of(rows)
        log_probs, entropies = read_out(Policy(model, 0.7, MANY), sequences, mask_of(sequences))
        (log_probs.sum() + 0.3 * entropies.sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        return [log_probs.detach(), entropies.detach(), *gradients]

    whole = evaluated()
    set_limits(monkeypatch, chunk=cells * 50)
    for a, b in zip(whole, evaluated(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_values_start_at_exactly_zero(tiny_model):
    sequences = sequences_of(ROWS)
    values, final_values = Critic(tiny_llama(260, 256), MANY).values(sequences, mask_of(sequences))
    assert not values.any()
    assert not final_values.any()


@table("microbatch_tokens", [1, MANY])
def test_the_value_of_token_t_is_read_at_t_minus_1(microbatch_tokens):
    """Trap 3: and the final value at the last token itself, of the bare row's own forward."""
    model = tiny_llama(260, 256)
    critic = Critic(model, microbatch_tokens)
    torch.nn.init.normal_(critic.head.weight)
    critic.head.bias.data.fill_(0.5)
    sequences = sequences_of(ROWS, width=30)
    values, final_values = critic.values(sequences, mask_of(sequences))
    for row, (prompt, response) in enumerate(ROWS):
        hidden = model.model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
        read = [float((state @ critic.head.weight[0] + 0.5).detach()) for state in hidden]
        expected = [read[len(prompt) + t - 1] for t in range(len(response))]
        assert values[row, : len(response)].tolist() == pytest.approx(expected, abs=1e-4)
        assert (values[row, len(response) :] == 0).all()
        assert float(final_values[row]) == pytest.approx(read[-1], abs=1e-4)


def test_the_value_after_tool_output_is_read_at_its_last_token():
    """Trap 3: token 4 comes after tool output in columns 2 and 3; its state has read both."""
    model = tiny_llama(260, 256)
    critic = Critic(model, MANY)
    torch.nn.init.normal_(critic.head.weight)
    sequences = sequences_of([([1, 2], [3, 4, 5, 6, 7])])
    mask = torch.tensor([[True, True, False, False, True]])
    values, _ = critic.values(sequences, mask)
    hidden = model.model(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]])).last_hidden_state[0, -1]
    expected = float((hidden @ critic.head.weight[0]).detach())
    assert float(values[0, 4]) == pytest.approx(expected, abs=1e-4)
    assert values[0, 2:4].tolist() == [0, 0]
