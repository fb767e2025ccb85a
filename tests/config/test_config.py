import subprocess
import sys
from collections import Counter
from typing import get_args

import pytest
import yaml
from helpers import changed, configured, table

from tether.config import UPDATE_KINDS, Config, Section, walk_fields
from tether.config.load import (
    load_config,
    merge_overrides,
    read_recipe,
    shipped_recipes,
    validate_config,
)
from tether.config.stages import RewardModelConfig, SFTConfig
from tether.errors import UserError
from tether.support.strict_yaml import load_yaml

SMALL = {
    "model": {"actor": "m"},
    "data": {"train": "d"},
    "reward": {"kind": "exact_answer"},
    "rollout": {"prompts": 8, "samples_per_prompt": 2},
    "actor": {"minibatch_rows": 4},
    "critic": {"minibatch_rows": 4},
}


@table(
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


def test_a_run_is_saved_now_and_then_unless_told_otherwise():
    assert configured(SMALL).train.checkpoint_every == 10
    for name in shipped_recipes():
        assert read_recipe(name).get("train", {}).get("checkpoint_every", 10) > 0


@table(
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


@table("eps_low", [1e-6, 1.0])
def test_the_ends_of_a_range_are_taken(eps_low):
    assert configured(SMALL, actor__update__eps_low=eps_low).actor.update.eps_low == eps_low


def test_a_missing_field_is_named():
    with pytest.raises(UserError, match=r"reward\.kind is missing"):
        configured({k: v for k, v in SMALL.items() if k != "reward"})


def test_every_mistake_is_named_at_once():
    with pytest.raises(UserError) as refusal:
        configured(SMALL, actor__lr=-1, rollout__prompts=0)
    assert len(str(refusal.value).splitlines()) == 2


@table("role", ["actor", "critic"])
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


@table(("field", "doc"), list(fields_of(Config)))
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
    assert counts["actor.update.kind"] == len(UPDATE_KINDS) == 8
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


# A recipe of several stages is looked at in tests/stages.
ONE_STAGE = [name for name in shipped_recipes() if "stage" not in read_recipe(name)]


@table("name", ONE_STAGE)
def test_shipped_recipes_are_valid(name):
    assert load_config(name).rows > 0


@pytest.mark.parametrize(
    ("content", "reason"), [("- 1\n", "not a mapping"), ("a: [\n", "YAML"), (None, "No recipe")]
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


# What "Every trust region" refuses: (what is given, the field named, a word of the advice).
GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline", "opo")
TRPO = {"actor__update__kind": "trpo"}
REFUSED = [
    *(
        (
            {"advantage__estimator": name, "rollout__samples_per_prompt": 1},
            rf"advantage\.estimator {name} .*rollout\.samples_per_prompt must be 2",
        )
        for name in GROUPS
    ),
    *(({**TRPO, "actor__update__max_kl": x}, r"actor\.update\.max_kl") for x in (0, -0.01)),
    *(
        ({"actor__update": {"kind": "penalty", "target": x}}, r"actor\.update\.target")
        for x in (0, -1)
    ),
    *(({"kl__in_reward__target": x}, r"kl\.in_reward\.target") for x in (0, -6)),
    *(
        ({"actor__update": {"kind": kind, "eps_low": x}}, r"actor\.update\.eps_low")
        for kind in ("clip", "gspo", "cispo")
        for x in (0, -0.1, 1.01)
    ),
    *(
        ({"actor__update": {"kind": kind, "eps_high": x}}, r"actor\.update\.eps_high")
        for kind in ("clip", "gspo", "cispo")
        for x in (0, -0.1)
    ),
    *(({"actor__update__dual_clip": x}, r"actor\.update\.dual_clip") for x in (1, 0.5, -3)),
    *(({"actor__stop_kl": x}, r"actor\.stop_kl") for x in (0, -0.1)),
    ({**TRPO, "actor__update__damping": 0}, r"actor\.update\.damping"),
    ({**TRPO, "actor__update__cg_iterations": 0}, r"actor\.update\.cg_iterations"),
    ({**TRPO, "actor__update__backtracks": -1}, r"actor\.update\.backtracks"),
    ({**TRPO, "actor__update__backtrack_ratio": 1}, r"actor\.update\.backtrack_ratio"),
    ({**TRPO, "actor__entropy_coef": 0.01}, r"actor\.entropy_coef .*trpo"),
    ({**TRPO, "kl__in_loss__coef": 0.1}, r"kl\.in_loss\.coef .*trpo"),
    ({**TRPO, "critic": {"shared_trunk": True}}, r"critic\.shared_trunk .*trpo"),
    ({**TRPO, "actor__stop_kl": 0.1}, r"actor\.stop_kl .*trpo"),
    ({**TRPO, "actor__betas": [0.9, 0.95]}, r"actor\.betas .*trpo.*critic\.betas"),
    ({**TRPO, "actor__eps": 1e-6}, r"actor\.eps .*trpo"),
    ({**TRPO, "actor__weight_decay": 0.1}, r"actor\.weight_decay .*trpo"),
    ({**TRPO, "actor__lr_warmup_iterations": 3}, r"actor\.lr_warmup_iterations .*trpo"),
    ({"actor__betas": [0.9]}, r"actor\.betas"),
    ({"actor__betas": [0.9, 1.0]}, r"actor\.betas"),
    ({"critic__weight_decay": -0.1}, r"critic\.weight_decay"),
    ({"actor__eps": 0}, r"actor\.eps is 0"),
    (
        {
            **TRPO,
            "rollout": {"prompts": 1, "samples_per_prompt": 1},
            "actor__minibatch_rows": 1,
            "critic__minibatch_rows": 1,
        },
        r"trpo needs at least 2 rows",
    ),
    *(
        ({"critic": {"shared_trunk": True, field: value}}, rf"critic\.{field} .*shared_trunk")
        for field, value in (
            *(("lr", 1e-3), ("epochs", 2), ("minibatch_rows", 4), ("weight_decay", 0.0)),
            *(("betas", [0.9, 0.999]), ("eps", 1e-8), ("lr_warmup_iterations", 0)),
        )
    ),
    *(
        ({"advantage__estimator": "remax", "critic": critic}, r"critic\.\w+ needs a critic.*gae")
        for critic in (
            *({"shared_trunk": True}, {"warmup_iterations": 1}, {"lam": 1.0}),
            {"pretrain": {"prompts": 4}},
        )
    ),
    (
        {"advantage": {"estimator": "rloo", "lam_alpha": 0.05}},
        r"advantage\.lam_alpha needs a critic",
    ),
    *(({"critic__lam": lam}, r"critic\.lam is") for lam in (-0.1, 1.1)),
    (
        {"rollout": {"samples_per_prompt": 1, "dynamic_sampling": {}}},
        r"dynamic_sampling compares the responses.*samples_per_prompt must be 2",
    ),
    (
        {"rollout__dynamic_sampling": {"max_rounds": 1}},
        r"rollout\.dynamic_sampling\.max_rounds is 1",
    ),
    (
        {"reward__overlong": {"buffer_tokens": 4, "max_tokens": 999}},
        r"reward\.overlong\.max_tokens is 999.*rollout\.max_response_tokens",
    ),
    (
        {"reward__overlong": {"buffer_tokens": 999}},
        r"reward\.overlong\.buffer_tokens is 999.*write less than",
    ),
    ({"reward__overlong": {"max_tokens": 4}}, r"reward\.overlong\.buffer_tokens"),
    ({"advantage__estimator": "gdpo"}, r"gdpo normalises several rewards.*reward\.parts"),
    *(
        (
            {
                "advantage__estimator": "gdpo",
                "rollout__samples_per_prompt": 2,
                "kl__in_reward__coef": coef,
                "reward": {
                    "parts": [{"name": n, "kind": "exact_answer"} for n in "ab"],
                    "overlong": overlong,
                },
            },
            field,
        )
        for coef, overlong, field in (
            (0.1, None, r"kl\.in_reward\.coef does not go with .*gdpo.*kl\.in_loss"),
            (0.0, {"buffer_tokens": 2}, r"reward\.overlong does not go with .*gdpo"),
        )
    ),
    (
        {"kl__in_loss": {"level": "sequence", "estimator": "k3"}},
        r"level sequence has one form.*estimator: k2",
    ),
    (
        {"kl__in_loss": {"coef": 0.1, "level": "sequence", "estimator": "k2"}},
        r"level sequence has one number per response.*actor\.aggregation: seq_mean_token_sum",
    ),
    (
        {"advantage__estimator": "distillation", "kl__in_reward__coef": 1.0},
        r"distillation learns from the KL to a teacher.*model\.reference.*kl\.in_reward\.coef",
    ),
    (
        {
            "advantage__estimator": "distillation",
            "model__reference": "teacher",
            "kl__in_reward": {"coef": 1.0, "controller": "adaptive"},
        },
        r"distillation does not go with .*adaptive",
    ),
    ({"advantage__lam_alpha": 0}, r"advantage\.lam_alpha is 0"),
    ({"critic__pretrain": {"heldback": 1.0}}, r"critic\.pretrain\.heldback is 1"),
    ({"critic__pretrain": {"prompts": 1}}, r"critic\.pretrain\.prompts is 1"),
    (
        {"critic": {"shared_trunk": True, "pretrain": {"prompts": 4}}},
        r"critic\.pretrain .*shared_trunk",
    ),
    (
        {"advantage": {"estimator": "remax", "truncation": "bootstrap"}},
        r"advantage\.truncation bootstrap needs a critic.*write zero",
    ),
    ({"actor__update": {"kind": "trpo", "eps_low": 0.1}}, r"actor\.update\.eps_low .*another kind"),
    ({"actor__update": {"kind": "clip", "max_kl": 0.1}}, r"actor\.update\.max_kl .*another kind"),
    ({"actor__update": {"kind": "cpi", "target": 0.1}}, r"actor\.update\.target .*another kind"),
    ({"actor__update": {"max_kl": 0.1}}, r"actor\.update\.max_kl .*another kind"),  # kind: clip
    ({"actor__update": {"kind": "clip", "epsilon": 1}}, r"Unknown field actor\.update\.epsilon"),
    ({"actor__update__kind": "ppo"}, r"actor\.update\.kind is 'ppo', .*clip, penalty, trpo"),
    ({"actor__aggregation": "mean"}, r"actor\.aggregation"),
    ({"advantage__estimator": "vtrace"}, r"advantage\.estimator"),
    ({"kl__in_loss__estimator": "k4"}, r"kl\.in_loss\.estimator"),
    *(
        ({section: 3}, rf"{section} is 3, but it is a section")
        for section in ("actor", "critic", "kl", "advantage", "rollout")
    ),
    ({"kl__in_reward": "k1"}, r"kl\.in_reward is 'k1', but it is a section"),
    ({"kl__in_loss": 0.1}, r"kl\.in_loss is 0.1, but it is a section"),
    ({"actor__update": "trpo"}, r"actor\.update is 'trpo', but it is a section"),
]


@table(("given", "reason"), REFUSED, ids=lambda x: str(x)[:70])
def test_what_makes_no_sense_together_is_refused_by_field(given, reason):
    with pytest.raises(UserError, match=reason) as refusal:
        configured(SMALL, **given)
    assert "Traceback" not in str(refusal.value)
    assert "\n" not in str(refusal.value)


RIGHT_IN_LOSS = {"plain": ("k2", "full", "k1+", "k3+"), "ratio": ("k1", "k3")}
SAMPLED = ("k1", "abs", "k2", "k3", "k1+", "k3+")


@table("estimator", SAMPLED)
def test_only_k1_goes_into_the_reward_unless_it_is_an_ablation(estimator):
    section = {"estimator": estimator}
    if estimator in ("k1", "k1+"):
        assert configured(SMALL, kl__in_reward=section)
    else:
        with pytest.raises(UserError, match=rf"kl\.in_reward: estimator {estimator}.*write k1"):
            configured(SMALL, kl__in_reward=section)
    allowed = configured(SMALL, kl__in_reward={**section, "ablation": True})
    assert allowed.kl.in_reward.estimator == estimator


@table("ablation", [False, True])
def test_the_full_kl_never_goes_into_the_reward(ablation):
    with pytest.raises(UserError, match=r"kl\.in_reward: estimator full.*write k1"):
        configured(SMALL, kl__in_reward={"estimator": "full", "ablation": ablation})


@table("weighting", RIGHT_IN_LOSS)
@table("estimator", [*SAMPLED, "full"])
def test_in_the_loss_an_estimator_stands_where_it_is_right_unless_it_is_an_ablation(
    estimator, weighting
):
    section = {"coef": 0.1, "estimator": estimator, "weighting": weighting}
    if estimator in RIGHT_IN_LOSS[weighting]:
        config = configured(SMALL, kl__in_loss=section)
        assert config.kl.in_loss.by_ratio == (weighting == "ratio")
        return
    with pytest.raises(UserError, match=rf"kl\.in_loss: estimator {estimator}".replace("+", r"\+")):
        configured(SMALL, kl__in_loss=section)
    ablation = {**section, "ablation": True}
    if (estimator, weighting) == ("full", "ratio"):  # there is no token whose ratio to take
        with pytest.raises(UserError, match="full has no ratio"):
            configured(SMALL, kl__in_loss=ablation)
    else:
        assert configured(SMALL, kl__in_loss=ablation)


@table("estimator", [*SAMPLED, "full"])
def test_by_itself_the_weighting_in_the_loss_is_the_right_one(estimator):
    section = {"estimator": estimator, "ablation": estimator == "abs"}
    by_ratio = configured(SMALL, kl__in_loss=section).kl.in_loss.by_ratio
    assert by_ratio == (estimator in RIGHT_IN_LOSS["ratio"])


@table(
    ("other", "ours"),
    [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3"), ("kl+", "k1+"), ("low_var_kl+", "k3+")],
)
def test_verls_names_of_the_estimators_are_taken(other, ours):
    weighting = "ratio" if ours in RIGHT_IN_LOSS["ratio"] else "plain"
    in_loss = {"estimator": other, "weighting": weighting}
    config = configured(
        SMALL, kl__in_loss=in_loss, kl__in_reward={"estimator": other, "ablation": True}
    )
    assert config.kl.in_loss.estimator == config.kl.in_reward.estimator == ours


def test_another_kind_as_an_override_takes_the_fields_of_the_old_one_away(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(changed(SMALL, actor__update={"kind": "clip", "eps_low": 0.1})))
    # The kind may come after its own fields.
    config = load_config(path, {"actor.update.max_kl": 0.05, "actor.update.kind": "trpo"})
    assert (config.actor.update.kind, config.actor.update.max_kl) == ("trpo", 0.05)
    same = load_config(path, {"actor.update.kind": "clip", "actor.update.eps_high": 0.3})
    assert (same.actor.update.eps_low, same.actor.update.eps_high) == (0.1, 0.3)
    with pytest.raises(UserError, match=r"actor\.update\.eps_low .*another kind"):
        load_config(path, {"actor.update.kind": "trpo", "actor.update.eps_low": 0.2})


@table("unnamed", [{"eps_low": 0.1}, {}], ids=["fields of the default kind", "nothing"])
def test_a_recipe_that_leaves_the_kind_out_may_be_given_another(tmp_path, unnamed):
    """No kind is clip; so another kind takes clip's fields away here too."""
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(changed(SMALL, actor__update=unnamed)))
    assert load_config(path).actor.update.kind == "clip"
    assert load_config(path, {"actor.update.kind": "trpo"}).actor.update.kind == "trpo"


@table("section", ["actor", "kl.in_reward", "actor.update"])
def test_an_override_of_a_whole_section_is_refused(section):
    with pytest.raises(UserError, match=rf"{section} is a section; write one of its fields"):
        merge_overrides(changed(SMALL), {section: 3})


def test_the_critics_steps_are_the_actors_unless_given():
    config = configured(
        {**SMALL, "critic": {}}, actor__lr=0.5, actor__epochs=3, actor__minibatch_rows=7
    )
    assert (config.critic_lr, config.critic_epochs, config.critic_minibatch_rows) == (0.5, 3, 7)
    given = {"lr": 0.1, "epochs": 2, "minibatch_rows": 5}
    config = configured({**SMALL, "critic": given}, actor__lr=0.5)
    assert (config.critic_lr, config.critic_epochs, config.critic_minibatch_rows) == (0.1, 2, 5)


def test_the_critics_adam_is_the_actors_unless_given_and_zero_is_given():
    names = ("lr_warmup_iterations", "betas", "eps", "weight_decay")
    actor = {"lr_warmup_iterations": 4, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1}
    same = configured({**SMALL, "critic": {}, "actor": {**SMALL.get("actor", {}), **actor}})
    assert [getattr(same, f"critic_{name}") for name in names] == [4, (0.8, 0.9), 1e-6, 0.1]
    own = {"lr_warmup_iterations": 0, "betas": [0.5, 0.6], "eps": 1e-4, "weight_decay": 0}
    apart = configured({**SMALL, "critic": own, "actor": {**SMALL.get("actor", {}), **actor}})
    assert [getattr(apart, f"critic_{name}") for name in names] == [0, (0.5, 0.6), 1e-4, 0]


@table(
    ("rollout", "sentence"),
    [
        ({"tools": [{"kind": "search"}]}, "either a corpus or a url"),
        ({"tools": [{"kind": "search", "corpus": "c", "url": "http://x"}]}, "not both"),
        ({"tools": [{"kind": "search", "url": "ftp://x"}]}, "http://HOST:PORT/retrieve"),
        (
            {"tools": [{"kind": "search", "corpus": "c", "topk": 0}]},
            r"rollout\.tools\.0\.topk is 0",
        ),
        ({"tools": [{"kind": "search", "corpus": "c", "x": 1}]}, r"rollout\.tools\.0\.x"),
        ({"tools": ["serch"]}, r"rollout\.tools\.0\.kind is 'serch'"),
        ({"tools": ["calculator"], "environment": "a.py:b"}, "exclude each other"),
        ({"tools": ["calculator"], "max_response_tokens": 128}, "counts observations too"),
        ({"state_masking": False}, "needs tools or an environment"),
        ({"environment": "somewhere"}, r"rollout\.environment: kind is 'somewhere'"),
    ],
)
def test_tools_that_cannot_work_are_refused_by_name(rollout, sentence):
    mapping = changed(SMALL, rollout__max_response_tokens=200)
    mapping["rollout"] |= rollout
    with pytest.raises(UserError, match=sentence):
        validate_config(mapping)


def test_tools_survive_the_way_through_a_runs_config():
    tools = ["calculator", {"kind": "search", "corpus": "c.jsonl"}, {"kind": "a/b.py:f"}]
    config = configured(SMALL, rollout__tools=tools, rollout__max_response_tokens=200)
    assert validate_config(yaml.safe_load(config.to_yaml())).rollout == config.rollout
    assert [tool.kind for tool in config.rollout.tools] == ["calculator", "search", "a/b.py:f"]
    assert config.rollout.tools[1].topk == 3


@table(
    ("text", "says"),
    [
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: &a [*a]", "nested too deeply"),
        ("\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 1}]" for i in range(9)),
         "more than 100,000 values"),
    ],
)  # fmt: skip
def test_yaml_that_is_too_deep_or_unfolds_is_one_sentence(tmp_path, text, says):
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"deep\.yaml [^\n]*{says}"):
        load_config(tmp_path / "deep.yaml")


@table(
    ("dotted", "aggregation", "said"),
    [
        ({}, "token_mean", None),
        ({"actor__update": {"kind": "gspo"}}, "seq_mean_token_mean", None),
        ({"advantage__estimator": "dr_grpo"}, "seq_mean_token_sum_norm", None),
        ({"actor__aggregation": "seq_mean_token_mean"}, "seq_mean_token_mean", None),
        (
            {"actor__update": {"kind": "gspo"}, "actor__aggregation": "token_mean"},
            "token_mean",
            "gspo is its paper's loss only with seq_mean_token_mean",
        ),
        (
            {"advantage__estimator": "dr_grpo", "actor__aggregation": "token_mean"},
            "token_mean",
            "dr_grpo is its paper's loss only with seq_mean_token_sum_norm",
        ),
    ],
)
def test_the_aggregation_is_that_of_the_paper_unless_another_is_written_and_said(
    dotted, aggregation, said
):
    config = configured(SMALL, **dotted)
    assert config.aggregation == aggregation
    assert [said in note for note in config.departures] == ([True] if said else [])


@table(
    ("in_loss", "says_so"),
    [
        ({"coef": 0.1}, True),
        ({"coef": 0.0}, False),
        ({"coef": 0.1, "level": "sequence", "estimator": "k2"}, False),
    ],
)
def test_a_kl_per_token_in_the_loss_is_said_to_be_a_partial_gradient(in_loss, says_so):
    config = configured(SMALL, kl__in_loss=in_loss, actor__aggregation="seq_mean_token_sum")
    assert any("partial gradient" in note for note in config.departures) == says_so


def test_dynamic_sampling_with_a_kl_in_the_reward_is_said_not_to_pull_back():
    dynamic = {"rollout__dynamic_sampling": {"max_rounds": 2}, "rollout__samples_per_prompt": 2}
    for coef, says_so in ((0.1, True), (0.0, False)):
        config = configured(SMALL, **dynamic, kl__in_reward__coef=coef)
        assert any("no longer pull back" in note for note in config.departures) == says_so


def test_a_key_that_stands_twice_is_an_error_with_both_lines(tmp_path):
    recipe = tmp_path / "twice.yaml"
    recipe.write_text("actor:\n  lr: 1.0e-4\n  epochs: 2\n  lr: 1.0e-6\n")
    with pytest.raises(UserError, match=r"twice\.yaml, line 4 .*'lr' .* second time, after line 2"):
        load_config(recipe)


def test_a_merged_key_may_be_given_again():
    """`<<` is there to be overridden, also by what is merged a second time."""
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b, y: 3}\n"
    assert load_yaml(text)["c"] == {"x": 2, "y": 3}


BASE = {"model__dtype": "bfloat16"}


@table(
    ("dotted", "field"),
    [
        (BASE, "model.dtype"),
        (BASE | {"advantage__estimator": "grpo"}, "model.dtype"),
        (BASE | {"critic": {"shared_trunk": True}}, "model.dtype"),
        (BASE | {"model__lora": {"rank": 2}}, "model.critic_dtype"),
        ({"model__critic_dtype": "bfloat16"}, "model.critic_dtype"),
    ],
)
def test_weights_that_learn_are_not_bfloat16(dotted, field):
    with pytest.raises(UserError, match=rf"{field} is bfloat16, .*; write {field}: float32, "):
        configured(SMALL, **dotted)
    assert configured(SMALL, **dotted, model__ablation=True).model.ablation


@table(
    "dotted",
    [
        {"model__reference_dtype": "bfloat16"},
        BASE | {"model__lora": {"rank": 2}, "model__critic_lora": {"rank": 2}},
        BASE | {"model__lora": {"rank": 2}, "model__critic_dtype": "float32"},
        BASE | {"model__lora": {"rank": 2}, "critic": {"shared_trunk": True}},
        BASE | {"model__lora": {"rank": 2}, "advantage__estimator": "grpo"},
    ],
)
def test_weights_that_do_not_learn_may_be_bfloat16(dotted):
    model = configured(SMALL, **dotted).model
    assert "bfloat16" in (model.dtype, model.reference_dtype)


@table("field", ["dtype", "critic_dtype", "reference_dtype"])
def test_bfloat16_products_do_not_go_with_float64_weights(field):
    sentence = rf"model: compute is bfloat16 and {field} float64, .*; write {field}: float32"
    with pytest.raises(UserError, match=sentence):
        configured(SMALL, model__compute="bfloat16", **{f"model__{field}": "float64"})


@table("schema", [SFTConfig, RewardModelConfig])
def test_a_stage_computes_in_bfloat16_with_float32_weights(schema):
    mapping = {"model": {"start": "m", "compute": "bfloat16"}, "data": {"train": "d"}}
    assert validate_config(mapping, schema).model.compute == "bfloat16"
    mapping["model"]["dtype"] = "float64"
    with pytest.raises(UserError, match=r"compute is bfloat16 and dtype float64"):
        validate_config(mapping, schema)


def test_a_trust_region_is_not_measured_in_bfloat16():
    with pytest.raises(UserError, match=r"model\.compute bfloat16 does not go with .* trpo"):
        configured(SMALL, model__compute="bfloat16", actor__update={"kind": "trpo"})


def test_samples_in_bfloat16_are_corrected_by_token_unless_asked_otherwise():
    config = configured(SMALL, model__compute="bfloat16")
    assert (config.correction.kind, config.correction.cap) == ("token", 2.0)
    assert config.may_mismatch
    off = configured(SMALL, model__compute="bfloat16", rollout__correction={"kind": "none"})
    assert off.correction.kind == "none"
    assert off.may_mismatch  # it is measured all the same
    with pytest.raises(
        UserError, match=r"reuse_log_probs does not go with model\.compute bfloat16"
    ):
        configured(SMALL, model__compute="bfloat16", rollout__reuse_log_probs=True)


@table("schema", [SFTConfig, RewardModelConfig])
def test_a_stage_does_not_learn_in_bfloat16(schema):
    mapping = {"model": {"start": "m", "dtype": "bfloat16"}, "data": {"train": "d"}}
    with pytest.raises(UserError, match=r"model: dtype is bfloat16, .*; write float32"):
        validate_config(mapping, schema)


def test_what_needs_the_chat_template_or_held_out_prompts_is_refused_without_them():
    with pytest.raises(UserError, match="system_prompt needs the chat template"):
        validate_config(changed(SMALL, data__system_prompt="Be brief.", data__chat_template=False))
    with pytest.raises(UserError, match=r"train\.probe is run with the held-out evaluations"):
        validate_config(changed(SMALL, train__probe="tether:probe"))
