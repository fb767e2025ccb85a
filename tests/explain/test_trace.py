"""A trace's numbers obey the formulas, by loops over plain lists, and come from the real models."""

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from helpers import distinct_letters, slow_log_probs, table
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tether import api
from tether.algo.losses import LossInputs
from tether.config import ActorSection
from tether.errors import UserError
from tether.explain import trace as trace_module
from tether.explain.objective import token_verdicts

PROMPT = "2+1=?"
DUAL_CLIP = {"kind": "clip", "dual_clip": 3.0}
DPPO = {"kind": "dppo", "max_divergence": 0.005}  # of a token whose probability was 1


def trace(model: str, prompt: str = PROMPT, reward=distinct_letters, **given) -> dict:
    """As JSON has it: what cannot be written and read again is no record."""
    record = api.trace(prompt, model, reward=reward, **given)
    return json.loads(json.dumps(record, allow_nan=False))


def close(a: list[float], b: list[float], tolerance: float = 2e-6) -> None:
    assert a == pytest.approx(b, abs=tolerance)


def check_rewards(record: dict) -> None:
    """reward = score - beta x KL, the score on the last token alone."""
    tokens, beta = record["tokens"], record["settings"]["beta"]
    length = len(tokens["response_ids"])
    kl = [
        old - ref for old, ref in zip(tokens["old_log_probs"], tokens["ref_log_probs"], strict=True)
    ]
    close(tokens["kl"], kl)
    scores = [0.0] * (length - 1) + [record["score"] or 0.0]
    assert tokens["token_level_scores"] == scores
    close(tokens["token_level_rewards"], [scores[t] - beta * kl[t] for t in range(length)])


def check_deltas_and_returns(record: dict) -> None:
    tokens, gamma = record["tokens"], record["settings"]["gamma"]
    rewards, values = tokens["token_level_rewards"], tokens["values"]
    following = [*values[1:], record["final_value"]]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, following, values, strict=True)]
    close(tokens["deltas"], deltas)
    close(tokens["returns"], [a + v for a, v in zip(tokens["advantages"], values, strict=True)])
    assert tokens["policy_advantages"] == tokens["advantages"]  # not whitened


def check_gae(record: dict) -> None:
    """Backwards over the deltas."""
    decay = record["settings"]["gamma"] * record["settings"]["lam"]
    expected, after = [], 0.0
    for delta in reversed(record["tokens"]["deltas"]):
        after = delta + decay * after
        expected.insert(0, after)
    close(record["tokens"]["advantages"], expected)


def check_clip(record: dict) -> None:
    """Ratio 1 before the update; the clipped objective by its definition after it."""
    old, advantages = record["tokens"]["old_log_probs"], record["tokens"]["policy_advantages"]
    close(record["before"]["ratio"], [1.0] * len(old), 1e-5)
    fields = record["settings"]["update_fields"]
    low, high = 1 - fields["eps_low"], 1 + fields["eps_high"]
    for moment in ("before", "after"):
        part = record[moment]
        ratios = [math.exp(n - o) for n, o in zip(part["new_log_probs"], old, strict=True)]
        close(part["ratio"], ratios, 1e-5)
        plain = [r * a for r, a in zip(ratios, advantages, strict=True)]
        held = [min(max(r, low), high) * a for r, a in zip(ratios, advantages, strict=True)]
        close(part["cpi_terms"], plain, 1e-5)
        close(part["clipped_terms"], held, 1e-5)
        close(part["objective_terms"], [min(x) for x in zip(plain, held, strict=True)], 1e-5)
        weights = record["weights"]
        assert weights == pytest.approx([1 / len(old)] * len(old))
        assert part["l_cpi"] == pytest.approx(sum(plain) / len(plain), abs=1e-5)
        objective = sum(min(x) for x in zip(plain, held, strict=True)) / len(plain)
        assert part["objective"] == pytest.approx(objective, abs=1e-5)


def check_ppo(record: dict) -> None:
    check_rewards(record)
    check_deltas_and_returns(record)
    check_gae(record)
    check_clip(record)


def test_a_fresh_model_obeys_every_identity_and_its_values_are_0(recipe):
    record = trace(recipe())
    check_ppo(record)
    assert not any(record["tokens"]["values"])
    assert any(record["new_values"])
    assert {"note_zero_head", "note_same_reference", "note_whitening"} <= set(record["notes"])


def test_a_run_with_a_trained_critic_obeys_every_identity(trained_run):
    record = trace(trained_run)
    check_ppo(record)
    assert all(record["tokens"]["values"])
    assert any(abs(kl) > 1e-4 for kl in record["tokens"]["kl"])
    assert "note_zero_head" not in record["notes"]


def test_a_run_is_traced_with_its_own_actor_reference_critic_and_beta(trained_run, tiny_model_dir):
    record = trace(trained_run)
    checkpoint = Path(trained_run) / "checkpoints" / "000003"
    state = json.loads((checkpoint / "state.json").read_text())
    assert record["settings"]["beta"] == state["controls"]["beta"] > 0.3
    prompt, response = record["prompt_ids"], record["tokens"]["response_ids"]
    with torch.no_grad():
        actor = AutoModelForCausalLM.from_pretrained(checkpoint / "actor")
        reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
        close(
            record["tokens"]["old_log_probs"],
            slow_log_probs(actor, prompt, response).tolist(),
            1e-4,
        )
        close(
            record["tokens"]["ref_log_probs"],
            slow_log_probs(reference, prompt, response).tolist(),
            1e-4,
        )
        weights = load_file(checkpoint / "critic.safetensors")
        trunk = {k.removeprefix("trunk."): v for k, v in weights.items() if k.startswith("trunk.")}
        reference.model.load_state_dict(trunk)
        states = reference.model(torch.tensor([prompt + response])).last_hidden_state[0]
        values = states @ weights["head.weight"][0] + weights["head.bias"]
    first = len(prompt) - 1
    close(record["tokens"]["values"], values[first : first + len(response)].tolist(), 1e-4)


def test_nothing_of_a_traced_run_changes(trained_run):
    def contents() -> dict[str, str]:
        files = (path for path in Path(trained_run).rglob("*") if path.is_file())
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    before = contents()
    first, second = trace(trained_run), trace(trained_run)
    assert contents() == before
    assert first == second


def test_what_is_typed_wins_over_the_run(trained_run):
    record = trace(trained_run, overrides={"kl.in_reward.coef": 0.7, "advantage.lam": 0.4})
    assert record["settings"]["beta"] == 0.7
    check_ppo(record)


@pytest.mark.parametrize("truncation", ["zero", "bootstrap"])
def test_a_truncated_response_obeys_every_identity(trained_run, truncation):
    fields = {"rollout.max_response_tokens": 3, "advantage.truncation": truncation}
    record = trace(trained_run, overrides=fields)
    assert record["finish_reason"] == "length"
    check_ppo(record)
    bootstraps = truncation == "bootstrap"
    assert (record["score"] is None) == bootstraps
    assert (record["final_value"] != 0) == bootstraps
    assert ("note_bootstrap" in record["notes"]) == bootstraps
    assert ("note_truncated" in record["notes"]) == (not bootstraps)


def test_a_group_is_compared_with_its_own_mean_and_spread(recipe):
    record = trace(recipe(advantage__estimator="grpo", rollout__samples_per_prompt=4))
    check_rewards(record)
    check_deltas_and_returns(record)
    sums = [row["token_level_reward"] for row in record["group"]]
    assert len(sums) == 4
    mean = sum(sums) / 4
    spread = math.sqrt(sum((s - mean) ** 2 for s in sums) / 3)
    assert spread > 0
    expected = [(s - mean) / (spread + 1e-6) for s in sums]
    close([row["advantage"] for row in record["group"]], expected, 1e-4)
    length = len(record["tokens"]["response_ids"])
    close(record["tokens"]["advantages"], [expected[0]] * length, 1e-4)
    assert sums[0] == pytest.approx(sum(record["tokens"]["token_level_rewards"]), abs=1e-5)
    assert record["new_values"] is None
    assert {"note_no_critic", "note_group"} <= set(record["notes"])


def test_a_given_response_stands_in_row_0_and_only_there(recipe):
    path = recipe(advantage__estimator="rloo", rollout__samples_per_prompt=3)
    drawn, given = trace(path), trace(path, response="abc")
    assert given["response"] == "abc"
    assert given["tokens"]["response_ids"][-1] == 256  # EOS
    assert given["tokens"]["rollout_log_probs"] is None
    assert given["score"] == 3 / 8
    others = [row["response"] for row in given["group"][1:]]
    assert others == [row["response"] for row in drawn["group"][1:]]
    check_rewards(given)


def test_remax_compares_with_the_models_own_greedy_response(recipe):
    path = recipe(advantage__estimator="remax", kl__in_reward__coef=0.0)
    greedy = api.generate(PROMPT, trace_model(path), max_tokens=8)[0]
    record = trace(path, response="abc")
    expected = 3 / 8 - distinct_letters(greedy)
    close(record["tokens"]["advantages"], [expected] * 4, 1e-5)


def trace_model(path: str) -> str:
    from tether.config.load import load_config

    return load_config(path).model.actor


KINDS = {
    "clip": {"kind": "clip"},
    "dual clip": {"kind": "clip", "dual_clip": 3.0},
    "penalty": {"kind": "penalty"},
    "exact penalty": {"kind": "penalty", "estimator": "full"},
    "trpo": {"kind": "trpo"},
    "cpi": {"kind": "cpi"},
    "reinforce": {"kind": "reinforce"},
    "gspo": {"kind": "gspo"},
    "cispo": {"kind": "cispo"},
    "dppo": {"kind": "dppo", "max_divergence": 1e-3},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_update_kind_shows_its_own_terms(recipe, name):
    """Each objective by its definition, from log-probs and advantages alone."""
    record = trace(recipe(actor__update=KINDS[name], actor__lr=0.01))
    old, advantages = record["tokens"]["old_log_probs"], record["tokens"]["policy_advantages"]
    new = record["after"]["new_log_probs"]
    gaps = [n - o for n, o in zip(new, old, strict=True)]
    assert max(map(abs, gaps)) > 1e-3
    ratios = [math.exp(gap) for gap in gaps]
    plain = [r * a for r, a in zip(ratios, advantages, strict=True)]
    close(record["after"]["cpi_terms"], plain, 1e-4)
    close(record["before"]["ratio"], [1.0] * len(old), 1e-5)
    fields = record["settings"]["update_fields"]
    low, high = 1 - fields.get("eps_low", 0), 1 + fields.get("eps_high", 0)

    def clipped(r: list[float]) -> list[float]:
        held = [min(max(x, low), high) for x in r]
        return [min(x * a, h * a) for x, h, a in zip(r, held, advantages, strict=True)]

    match name:
        case "clip" | "dual clip":
            expected = clipped(ratios)
        case "penalty":
            coef = fields["coef"]
            kl = [math.exp(gap) - gap - 1 for gap in gaps]
            expected = [x - coef * k for x, k in zip(plain, kl, strict=True)]
        case "exact penalty":  # only its sign is known from the sampled tokens
            close(record["before"]["objective_terms"], advantages, 1e-5)
            terms = zip(record["after"]["objective_terms"], plain, strict=True)
            assert all(term < x for term, x in terms)
            return
        case "trpo" | "cpi":
            expected = plain
        case "reinforce":
            expected = [a * n for a, n in zip(advantages, new, strict=True)]
        case "gspo":
            whole = math.exp(sum(gaps) / len(gaps))
            close(record["after"]["objective_ratio"], [whole] * len(old), 1e-4)
            expected = clipped([whole] * len(old))
        case "cispo":
            held = [min(max(r, low), high) for r in ratios]
            expected = [h * a * n for h, a, n in zip(held, advantages, new, strict=True)]
        case "dppo":
            moved = [math.exp(n) - math.exp(o) for n, o in zip(new, old, strict=True)]
            dropped = [abs(m) > 1e-3 and m * a > 0 for m, a in zip(moved, advantages, strict=True)]
            assert any(dropped)
            expected = [0.0 if d else x for d, x in zip(dropped, plain, strict=True)]
            verdicts = record["after"]["verdicts"]
            assert [v.startswith("clipped") for v in verdicts] == dropped
    close(record["after"]["objective_terms"], expected, 1e-4)
    total = sum(w * x for w, x in zip(record["weights"], expected, strict=True))
    assert record["after"]["objective"] == pytest.approx(total, abs=1e-4)


def test_the_actor_moves_even_where_the_recipe_warms_the_critic_up_first(recipe):
    record = trace(recipe(critic__warmup_iterations=5))
    assert record["after"]["new_log_probs"] != record["before"]["new_log_probs"]


@pytest.mark.parametrize("shared", [True, False])
def test_a_shared_trunk_is_traced_too(recipe, shared):
    dotted = {"critic": {"shared_trunk": True}} if shared else {}
    record = trace(recipe(**dotted))
    check_ppo(record)
    assert ("critic/grad_norm" in record["metrics"]) == (not shared)


@table(
    ("update", "ratio", "advantage", "verdict"),
    [
        (DUAL_CLIP, 1.1, 1.0, "inside"),
        (DUAL_CLIP, 1.3, 1.0, "clipped_high"),
        (DUAL_CLIP, 0.7, -1.0, "clipped_low"),
        (DUAL_CLIP, 1.3, -1.0, "kept_high"),
        (DUAL_CLIP, 3.1, -1.0, "clipped_dual"),
        (DUAL_CLIP, 0.7, 1.0, "kept_low"),
        (DUAL_CLIP, 1.3, 0.0, "no_advantage"),
        ({"kind": "cispo"}, 1.3, 1.0, "capped"),
        ({"kind": "cispo"}, 1.3, -1.0, "capped"),
        ({"kind": "cispo"}, 1.2, -1.0, "inside"),
        ({"kind": "cpi"}, 9.0, 1.0, "no_bound"),
        (DPPO, 1.01, 1.0, "clipped_high"),
        (DPPO, 0.99, -1.0, "clipped_low"),
        (DPPO, 1.01, -1.0, "kept_high"),
        (DPPO, 0.999, -1.0, "inside"),
    ],
)
def test_a_verdict_says_which_side_and_whether_it_binds(update, ratio, advantage, verdict):
    new, old, advantages = (torch.tensor([[x]]) for x in (math.log(ratio), 0.0, advantage))
    inputs = LossInputs(new, old, advantages, torch.ones(1, 1, dtype=torch.bool))
    assert token_verdicts(ActorSection(update=update).update, inputs) == [verdict]


def test_verdicts_follow_the_ratios(recipe):
    """A step so long that tokens leave the interval on both sides."""
    record = trace(recipe(actor__lr=0.05), overrides={"seed": 3})
    low, high = 0.8, 1.2
    cells = zip(
        record["after"]["ratio"],
        record["tokens"]["policy_advantages"],
        record["after"]["verdicts"],
        strict=True,
    )
    for ratio, advantage, verdict in cells:
        if low <= ratio <= high:
            assert verdict == "inside"
        else:
            side = "high" if ratio > high else "low"
            binds = advantage > 0 if side == "high" else advantage < 0
            assert verdict == f"{'clipped' if binds else 'kept'}_{side}"
    assert set(record["after"]["verdicts"]) - {"inside"}


def test_the_columns_of_a_prompt_in_the_data_are_found(recipe):
    record = trace(recipe(), "3+22=?", reward=None)
    assert record["columns"] == {"answer": "25"}
    assert record["columns_source"].endswith("train.jsonl, line 11")


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("12+34=?", "46"),
        ("你知道3+4=9吗？", "不对，3+4=7"),
        ("Do you know that 1+1=2?", "Yes, 1+1=2"),
    ],
)
def test_a_sum_that_is_not_in_the_data_is_worked_out(recipe, prompt, answer):
    record = trace(recipe(data__heldout=None), prompt, reward=None)
    assert (record["columns"], record["columns_source"]) == ({"answer": answer}, "sum")


def test_typed_columns_win_and_need_no_data(recipe):
    record = trace(
        recipe(data__train="gone.jsonl", data__heldout=None),
        reward=None,
        columns={"answer": "x"},
        response="x",
    )
    assert (record["score"], record["columns_source"]) == (1.0, "typed")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"prompt": "  "}, "The prompt is empty"),
        ({"prompt": "Hello", "reward": None}, "asks for 'answer'.*--column answer=VALUE"),
        ({"prompt": "01+1=?", "reward": None}, "asks for 'answer'"),
        ({"response": "much too long"}, "has 14 tokens with its end.*max_response_tokens 14"),
        ({"prompt": "x" * 300}, "^PROMPT: "),
        ({"overrides": {"actor.lrr": 1}}, "Unknown field actor.lrr"),
        ({"reward": lambda: None}, "could not be scored: the reward returned None"),
        ({"reward": lambda: 1 / 0}, "could not be scored: ZeroDivisionError"),
    ],
)
def test_wrong_input_gets_one_sentence(recipe, given, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        trace(recipe(), **given)
    assert len(str(error.value).splitlines()) == 1


def test_every_key_of_the_record_is_documented(trained_run):
    record = trace(trained_run)
    inner = [record["tokens"], record["before"], record["group"][0]]
    for key in [*record, *(key for part in inner for key in part)]:
        assert key in trace_module.__doc__, key
    assert record["schema"] == 1


def test_tensors_are_written_as_the_shortest_floats(trained_run):
    import numpy as np

    for x in trace(trained_run)["tokens"]["old_log_probs"]:
        assert repr(x) == repr(float(str(np.float32(x))))
