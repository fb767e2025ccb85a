"""On-policy distillation: the teacher is the reference, and its KL the only signal."""

import pytest
import torch
from helpers import configured, distinct_letters, tiny_recipe
from tiny_models import tiny_llama

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
