import subprocess
import sys
from collections import Counter
from typing import get_args

import pytest
import yaml
from helpers import changed, configured

from tether.config import UPDATE_KINDS, Config, Section, walk_fields
from tether.errors import UserError
from tether.recipes import load_config, merge_overrides, shipped_recipes

SMALL = {
    "model": {"actor": "m"},
    "data": {"train": "d"},
    "reward": {"kind": "exact_answer"},
    "rollout": {"prompts": 8, "samples_per_prompt": 2},
    "actor": {"minibatch_rows": 4},
    "critic": {"minibatch_rows": 4},
}


@pytest.mark.parametrize(
    ("field", "nearest"),
    [
        ("actor__learning_rate", "actor.lr"),
        ("actor__minibatch_row", "actor.minibatch_rows"),
        ("rollout__gamma", "advantage.gamma"),  # a right name in a wrong section
        ("kl__in_reward__beta", "kl.in_reward"),
        ("sead", "seed"),
    ],
)
def test_an_unknown_field_is_refused_and_the_nearest_is_named(field, nearest):
    with pytest.raises(UserError) as refusal:
        configured(SMALL, **{field: 1})
    assert f"Unknown field {field.replace('__', '.')}; did you mean {nearest}" in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollout__samples_per_prompt", 0),
        ("rollout__temperature", 0),
        ("rollout__prompts", "many"),
        ("rollout__prompts", 2.5),
        ("actor__update__eps_low", 0),
        ("actor__update__eps_low", 1.5),
        ("actor__update__eps_high", 0),
        ("actor__update__kind", "trpoo"),
        ("actor__lr", -1e-4),
        ("actor__lr", float("nan")),
        ("critic__lr", float("inf")),
        ("advantage__gamma", 1.01),
        ("advantage__lam", -0.1),
        ("advantage__truncation", "maybe"),
        ("reward__max_failed_share", 2),
        ("kl__in_reward__coef", -0.1),
        ("model__dtype", "float16"),
        ("train__iterations", 0),
        ("seed", -1),
        ("seed", 2**64),  # random numbers are computed from 64 bits
        ("schema", 2),
    ],
)
def test_a_value_out_of_range_or_of_a_wrong_type_is_refused_by_field(field, value):
    with pytest.raises(UserError, match=field.replace("__", r"\.")):
        configured(SMALL, **{field: value})


@pytest.mark.parametrize("eps_low", [1e-6, 1.0])
def test_the_ends_of_a_range_are_taken(eps_low):
    assert configured(SMALL, actor__update__eps_low=eps_low).actor.update.eps_low == eps_low


def test_a_missing_field_is_named():
    with pytest.raises(UserError, match=r"reward\.kind is missing"):
        configured({k: v for k, v in SMALL.items() if k != "reward"})


def test_every_mistake_is_named_at_once():
    with pytest.raises(UserError) as refusal:
        configured(SMALL, actor__lr=-1, rollout__prompts=0)
    assert len(str(refusal.value).splitlines()) == 2


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_minibatch_larger_than_the_rows_is_refused(role):
    assert configured(SMALL, **{f"{role}__minibatch_rows": 16}).rows == 16
    with pytest.raises(UserError, match=rf"{role}\.minibatch_rows is 17.*at most 16"):
        configured(SMALL, **{f"{role}__minibatch_rows": 17})


def test_an_adaptive_horizon_at_which_beta_could_reach_zero_is_refused():
    """rows < 5 horizon: with 16 rows, 4 will do and 3 will not."""
    adaptive = changed(SMALL, kl__in_reward__controller="adaptive")
    assert configured(adaptive, kl__in_reward__horizon=4)
    with pytest.raises(UserError, match="more than 3"):
        configured(adaptive, kl__in_reward__horizon=3)
    assert configured(SMALL, kl__in_reward__horizon=3)  # fixed: nothing moves


def test_overrides_are_merged_into_the_recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    config = load_config(path, {"actor.lr": 0.5, "kl.in_reward.coef": 0.25, "seed": 9})
    assert (config.actor.lr, config.kl.in_reward.coef, config.seed) == (0.5, 0.25, 9)
    assert config.actor.minibatch_rows == 4  # its neighbour in the recipe stays


def test_an_override_below_a_value_is_refused():
    with pytest.raises(UserError, match="seed is not a section"):
        merge_overrides({"seed": 1}, {"seed.x": 2})


def fields_of(section: type[Section]):
    """Every field of every section; where a section is one of several kinds, of each."""
    for name, info in section.model_fields.items():
        options = (info.annotation, *get_args(info.annotation))
        inner = [x for x in options if isinstance(x, type) and issubclass(x, Section)]
        for kind in inner:
            assert kind.__doc__, kind
            yield from fields_of(kind)
        if not inner:
            yield f"{section.__name__}.{name}", info.description


@pytest.mark.parametrize(("field", "doc"), list(fields_of(Config)))
def test_every_field_has_one_doc_line(field, doc):
    assert doc
    assert "\n" not in doc


def test_walking_the_fields_names_each_once_by_what_a_recipe_writes():
    names = [dotted for dotted, _ in walk_fields()]
    assert len(names) == len(list(fields_of(Config)))
    outside = [name for name in names if not name.startswith("actor.update.")]
    assert len(outside) == len(set(outside))
    assert {"schema", "seed", "kl.in_reward.coef", "actor.update.eps_low"} <= set(names)


def test_walking_the_fields_names_those_of_each_kind_of_update():
    """A name stands once for each kind that has it."""
    counts = Counter(dotted for dotted, _ in walk_fields())
    assert counts["actor.update.kind"] == len(UPDATE_KINDS) == 7
    assert counts["actor.update.eps_low"] == 3  # clip, gspo, cispo
    assert counts["actor.update.max_kl"] == counts["actor.update.dual_clip"] == 1


def test_a_written_config_makes_the_same_config_again(tmp_path):
    config = configured(
        SMALL,
        run__dir="somewhere",
        data__system_prompt="简短: yes\n- no",
        actor__lr=3e-7,
        kl__in_reward__controller="adaptive",
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    again = load_config(path)
    assert again.run.dir is None  # it is where the file lies
    assert load_config(path, {"run.dir": "somewhere"}) == config
    assert yaml.safe_load(config.to_yaml())["schema"] == 1


def test_a_config_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        configured(SMALL).actor.lr = 1.0


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipes_are_valid(name):
    assert load_config(name).rows > 0


@pytest.mark.parametrize(
    ("content", "reason"), [("- 1\n", "no mapping"), ("a: [\n", "YAML"), (None, "No recipe")]
)
def test_a_file_that_is_no_recipe_is_refused(tmp_path, content, reason):
    path = tmp_path / "r.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=reason):
        load_config(path)


def test_a_misspelt_recipe_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'arithmetic'"):
        load_config("arithmetic2")


@pytest.mark.parametrize("module", ["tether", "tether.config", "tether.rewards.child"])
def test_it_imports_without_torch(module):
    """A command's help, and the child that runs rewards, must start in a blink."""
    check = (
        f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
