"""On-policy distillation: the teacher is the reference, and its KL the only signal."""

import pytest
import torch
from helpers import configured, distinct_letters, tiny_recipe
from tiny_models import tiny_llama

import tether
from tether.errors import UserError
from tether.ppo.iteration import run_iteration
from tether.ppo.result import first_controls
from tether.ppo.roles import build_roles


@pytest.fixture(scope="module")
def teacher(byte_tokenizer, tmp_path_factory):
    """A model of the same vocabulary with other weights."""
    folder = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(7)
    model = tiny_llama(260, 256)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight) * weight.std())
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tiny_model_dir, tiny_data, tmp_path, teacher):
    return {
        **tiny_recipe(tiny_model_dir, tiny_data, tmp_path / "run"),
        "model": {"actor": tiny_model_dir, "reference": str(teacher)},
        "advantage": {"estimator": "distillation"},
        "kl": {"in_reward": {"coef": 1.0}},
        "critic": {},
    }


def test_advantages_are_the_teachers_log_probs_minus_the_students_and_the_kl_falls(settings):
    config = configured(settings, actor__lr=3e-3, actor__minibatch_rows=12)
    roles = build_roles(config, distinct_letters)
    controls, found = first_controls(config), []
    for iteration in range(6):
        outcome = run_iteration(iteration, controls, roles, config)
        e = outcome.experience
        expected = torch.where(e.response_mask, e.ref_log_probs - e.old_log_probs, 0.0)
        torch.testing.assert_close(e.policy_advantages, expected)
        found.append(outcome.metrics(config)["kl/token_mean"])
    assert found[0] > 0.01
    assert found[-1] < 0.9 * found[0]


def test_a_teacher_of_another_vocabulary_is_refused(settings, teacher):
    small = tiny_llama(259, 256)  # one token fewer than the tokenizer spells
    small.save_pretrained(teacher.parent / "small")
    with pytest.raises(UserError, match=r"model\.reference .*another vocabulary.*same tokenizer"):
        build_roles(
            configured(settings, model__reference=str(teacher.parent / "small")), distinct_letters
        )


def test_a_larger_teacher_teaches_a_smaller_student(settings, byte_tokenizer, tmp_path):
    """Five layers teach two; only the vocabulary must be the same."""
    tiny_llama(260, 256, seed=3, layers=5).save_pretrained(tmp_path / "large")
    byte_tokenizer.save_pretrained(tmp_path / "large")
    config = configured(
        settings,
        model__reference=str(tmp_path / "large"),
        actor__lr=3e-3,
        actor__minibatch_rows=12,
    )
    found = distances(config)
    assert found[-1] < 0.9 * found[0]


def distances(config, iterations: int = 6) -> list[float]:
    """The KL to the teacher per token, iteration by iteration."""
    roles, controls = build_roles(config, distinct_letters), first_controls(config)
    outcomes = [run_iteration(i, controls, roles, config) for i in range(iterations)]
    return [outcome.metrics(config)["kl/token_mean"] for outcome in outcomes]


SYSTEM = "Answer in capital letters."


@pytest.fixture
def prompted(tiny_model_dir, settings):
    """The starting model is its own teacher, by a system prompt that the student does not see."""
    return {
        **settings,
        "model": {"actor": tiny_model_dir, "reference_system_prompt": SYSTEM},
    }


@pytest.mark.parametrize("adapter", [None, {"rank": 4}])
def test_the_reference_reads_the_system_prompt_and_the_actor_does_not(
    prompted, byte_tokenizer, tiny_model, adapter
):
    """Row by row: the model itself on the template's text with the system turn, then the
    response."""
    prompted["model"]["lora"] = adapter
    config = configured(prompted)
    outcome = run_iteration(
        0, first_controls(config), build_roles(config, distinct_letters), config
    )
    experience, rollout = outcome.experience, outcome.rollout
    for row in range(3):
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": outcome.prompts.texts[row]},
        ]
        text = byte_tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        prompt = byte_tokenizer(text, add_special_tokens=False)["input_ids"]
        length = int(rollout.response_lengths[row])
        response = rollout.response_ids[row, :length]
        with torch.no_grad():
            logits = tiny_model(torch.tensor([[*prompt, *response.tolist()]])).logits[0]
        told = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(experience.ref_log_probs[row, :length], told, atol=1e-4, rtol=0)
        assert SYSTEM not in byte_tokenizer.decode(outcome.prompts.ids[row])


def test_a_system_prompt_becomes_weights(prompted):
    """The KL between the student without it and the teacher with it falls."""
    config = configured(prompted, actor__lr=3e-3, actor__minibatch_rows=12)
    found = distances(config)
    assert found[0] > 0.01
    assert found[-1] < 0.9 * found[0]


def test_a_run_that_distils_a_prompt_passes_its_self_check_and_resumes(prompted, tmp_path):
    """The check that an equal reference has a KL of 0 does not apply; four iterations are two and
    two, bit for bit."""
    for run, stops in (("whole", [4]), ("parts", [2, 4])):
        for iterations in stops:
            config = configured(
                prompted,
                run__dir=str(tmp_path / run),
                actor__schedule="constant",
                train__iterations=iterations,
            )
            tether.train(config, resume=True)
    names = ("metrics.jsonl", "checkpoints/000004/actor/model.safetensors")
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"data__chat_template": False}, "chat_template: false"),
        ({"model__learn_layers": 1}, "learn_layers"),
        ({"train__price_samples": 64}, "price_samples"),
        ({"kl__in_reward__coef": 0}, "kl.in_reward.coef: 1"),
    ],
)
def test_what_a_prompted_reference_does_not_go_with_is_named(prompted, fields, complaint):
    with pytest.raises((UserError, ValueError), match=complaint):
        configured(prompted, **fields)
