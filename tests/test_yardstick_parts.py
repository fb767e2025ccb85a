"""The parts of `make yardsticks` that are tether's own runs: data, fits and signs, by hand."""

import importlib.util
import json
import math
import random
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import table

from tether.config.load import load_config
from tether.config.stages import SFTConfig

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "scripts"
RECIPES = SCRIPTS / "yardstick_recipes"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script(monkeypatch):
    """A script as a module; scripts find each other by name, as when they are run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return lambda name: load(SCRIPTS / f"{name}.py")


def share(mean: float, count: int = 500) -> dict:
    return {"mean": mean, "low": mean - 0.04, "high": mean + 0.04, "count": count, "binary": True}


@table(
    ("scores", "fall"),
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 0.0),
        ([0.5, 0.5, 0.5, 0.5, 0.5, 0.0], 0.1),  # 2.0 / 5 after 2.5 / 5
        ([1.0] * 5 + [0.0] * 5 + [1.0] * 5, 1.0),  # it came back, and had fallen
    ],
)
def test_the_largest_fall_is_below_the_best_so_far(script, scores, fall):
    assert script("yardstick_runs").largest_fall(scores) == pytest.approx(fall)


def test_shares_of_several_seeds_are_pooled_by_their_questions(script):
    found = script("yardstick_runs").pooled([share(0.5, 100), share(0.8, 300)])
    assert found.mean == pytest.approx(290 / 400)
    assert found.count == 400
    assert found.low == pytest.approx(0.67926, abs=1e-5)  # Wilson's, by hand: z² = 3.84146
    assert found.high == pytest.approx(0.76646, abs=1e-5)


def test_a_run_is_trained_once_and_kept(script, tmp_path, parity):
    runs, part = script("yardstick_runs"), script("yardstick_parity")
    folder = tmp_path / "data"
    parity.make(folder, share=0.5, seed=100, demonstrations=64)
    demonstrations = {"data.train": str(folder / "demonstrations.jsonl")}
    fields = {"model.start": str(folder / "model"), **demonstrations}
    model = runs.one_sft(part.SOURCE / "sft.yaml", fields, tmp_path / "sft")
    paths = {"model.actor": str(model), "reward.kind": f"{part.SOURCE / 'reward.py'}:parity_at_end"}
    paths |= {f"data.{name}": str(folder / f"{name}.jsonl") for name in ("train", "heldout")}
    small = {"train.iterations": 2, "train.eval_every": 0, "train.eval_prompts": 8}
    small |= {"rollout.prompts": 4, "rollout.max_response_tokens": 4, "actor.minibatch_rows": 16}
    store = script("yardstick_store").Store(tmp_path / "kept", tmp_path / "work")

    def again(paths) -> dict:
        return runs.one_run(store, "Y7-x", part.SOURCE / "rl.yaml", small, paths, part.CODE)

    first = again(lambda: paths)
    assert [line["iteration"] for line in first["evals"]] == [0, 2]
    assert len(first["curves"]["response/length_mean"]) == 2
    assert first["processor_seconds"] > 0
    assert again(lambda: pytest.fail("trained again")) == json.loads(json.dumps(first))


# Parity -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def parity():
    return load(ROOT / "examples" / "parity" / "make.py")


def test_a_long_demonstration_has_the_parity_of_every_beginning(parity):
    bits = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1, 1, 0]
    assert parity.demonstrate(bits, long=True) == "0100111011011"
    assert parity.demonstrate(bits, long=False) == "1"
    row = parity.row_of(bits)
    assert row == {"prompt": "0110100110110.......=", "parity": "1"}


def test_demonstrations_are_long_in_their_share_and_never_of_held_out_bits(parity):
    heldout = parity.draw_rows(random.Random(0), 50, set())
    asked = {row["prompt"] for row in heldout}
    rows = parity.draw_demonstrations(random.Random(1), 4000, 0.2, asked)
    assert not asked & {row["prompt"] for row in rows}
    long = [row for row in rows if len(row["response"]) > 1]
    assert 0.17 < len(long) / len(rows) < 0.23  # five deviations
    lengths = {len(row["prompt"].rstrip(".=")) for row in rows}
    assert lengths == set(range(12, 21))
    assert {len(row["prompt"]) for row in rows} == {21}
    for row in rows:
        bits = row["prompt"].rstrip(".=")
        assert int(row["response"][-1]) == bits.count("1") % 2
        assert len(row["response"]) in (1, len(bits))


@table(
    ("response", "finished", "expected"),
    [
        ("1", True, 1.0),
        ("0110001", True, 1.0),
        ("0110000", True, 0.0),
        ("1", False, 0.0),  # cut off
        ("", True, 0.0),
    ],
)
def test_the_last_bit_of_an_ended_response_is_scored(response, finished, expected):
    reward = load(ROOT / "examples" / "parity" / "reward.py")
    assert reward.parity_at_end(response, parity="1", finished=finished) == expected


def test_the_parity_tokenizer_has_one_token_for_each_character(parity):
    tokenizer = parity.build_tokenizer()
    ids = tokenizer("0110.=")["input_ids"]
    assert ids == [0, 1, 1, 0, 2, 3]
    assert tokenizer.decode(ids) == "0110.="
    assert parity.POSITIONS >= 21 + 20 + 1  # field, longest response, end
    rollout = load_config(ROOT / "examples" / "parity" / "rl.yaml").rollout
    assert 20 + 1 <= rollout.max_response_tokens <= parity.POSITIONS - 21


def test_a_share_that_is_none_is_refused(parity, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["make.py", str(tmp_path), "--share", "20"])
    with pytest.raises(SystemExit) as stop:
        parity.main()
    assert stop.value.code == 2
    assert "write a share between 0 and 1" in capsys.readouterr().err


def parity_cell(before: float, after: float, first: float, last: float) -> dict:
    evals = [{"greedy": share(before)}, {"greedy": share(after)}]
    return {"evals": evals, "curves": {"response/length_mean": [first, last]}}


def test_parity_signs_are_those_of_shares_below_a_third(script):
    part = script("yardstick_parity")
    cells = {
        (0.1, "PPO"): [parity_cell(0.5, 0.99, 3, 16)],
        (0.2, "PPO"): [parity_cell(0.52, 0.97, 4, 16)],
        (0.5, "PPO"): [parity_cell(0.99, 0.2, 9, 1)],  # not below a third: no sign reads it
        (0.1, "GRPO"): [parity_cell(0.5, 0.60, 3, 2)],
        (0.2, "GRPO"): [parity_cell(0.5, 0.99, 4, 16)],
        (0.5, "GRPO"): [parity_cell(0.99, 0.99, 9, 16)],
    }
    assert part.signs_of(cells) == {
        "supervised, greedy, at chance below a third": True,
        "PPO generalises": True,
        "responses grow under PPO": True,
        "GRPO generalises": False,
        "responses grow under GRPO": False,
    }


# KL placements ------------------------------------------------------------------------------------


def kl_cell(english: float, chinese: float, scores: list[float]) -> dict:
    sets = {
        "english": {"sampled": share(english), "greedy": share(english), "kl": 1.0},
        "chinese": {"sampled": share(chinese), "greedy": share(chinese), "kl": 1.0},
    }
    return {"evals": [{"sets": sets}], "curves": {"score/mean": scores}}


def test_kl_signs_compare_placements_and_leave_the_cell_without_one_out(script):
    part = script("yardstick_kl")
    rising, falling = [0.2] * 5 + [0.8] * 5, [0.8] * 5 + [0.2] * 5
    cells = {
        "k1 in the reward": [kl_cell(0.9, 0.7, rising)],
        "k3 in the reward": [kl_cell(0.5, 0.4, falling)],
        "k1 in the loss": [kl_cell(0.8, 0.75, rising)],
        "k3 in the loss": [kl_cell(0.85, 0.6, rising)],
        "none": [kl_cell(0.95, 0.9, rising)],
    }
    assert list(part.signs_of(cells).values()) == [True, False, True, False, True, True]


def test_kl_data_is_english_to_train_on_and_both_languages_held_out(script, tmp_path):
    part = script("yardstick_kl")
    part.write_data(tmp_path)

    def read(name: str) -> list[dict]:
        lines = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    train = read("train")
    assert len(train) == 8000
    assert all(row["prompt"].startswith("Do you know that") for row in train)
    for language, begins in (("english", "Do you know"), ("chinese", "你知道")):
        heldout = read(f"heldout-{language}")
        assert len({row["prompt"] for row in heldout}) == 500
        assert all(row["prompt"].startswith(begins) for row in heldout)
        assert not {row["prompt"] for row in heldout} & {row["prompt"] for row in train}


@table("cell", ["k1 in the reward", "k3 in the reward", "k1 in the loss", "k3 in the loss", "none"])
def test_every_kl_cell_is_a_config_that_measures_the_kl(script, cell):
    part = script("yardstick_kl")
    files = {"english": "tether:arithmetic/heldout.jsonl", "chinese": "other.jsonl"}
    fields = {"data.train": "tether:arithmetic/train.jsonl", "data.heldout": files}
    config = load_config(part.RECIPE, {**fields, **part.CELLS[cell]})
    assert set(config.data.heldout) == {"english", "chinese"}
    assert config.kl.needs_reference
    assert not (cell.endswith("loss") and config.kl.in_loss.by_ratio)
    assert config.kl.in_reward.coef == (0.05 if "reward" in cell else 0.0)
    assert config.kl.in_loss.coef == {"k1 in the loss": 0.05, "k3 in the loss": 0.05}.get(
        cell, 1e-12 if cell == "none" else 0.0
    )


def test_what_was_tried_afterwards_differs_in_strength_or_rate_alone(script):
    part = script("yardstick_kl")
    files = {"data.train": "tether:arithmetic/train.jsonl", "data.heldout": "other.jsonl"}
    found = {
        name: load_config(part.RECIPE, {**files, **fields}) for name, fields in part.TRIED.items()
    }
    assert [config.actor.lr for config in found.values()] == [4e-4, 1e-4, 1e-4]
    assert [config.kl.in_reward.coef for config in found.values()] == [0.2, 0.05, 0.0]
    assert [config.kl.in_loss.coef for config in found.values()] == [0.0, 0.0, 0.05]


# Search -------------------------------------------------------------------------------------------


def test_search_files_hold_half_of_the_facts_known_and_nothing_twice(script, tmp_path, monkeypatch):
    part = script("yardstick_search")
    small = {"NUM_PEOPLE": 40, "NUM_TOWNS": 12, "HELDOUT": 40, "PASSES": 10, "FRESH": 400}
    for name, number in small.items():
        monkeypatch.setattr(part, name, number)
    part.write_files(tmp_path, seed=100)

    def prompts(name: str) -> list[str]:
        lines = (tmp_path / name).read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["prompt"] for line in lines]

    known, unknown = (prompts(f"heldout-{kind}.jsonl") for kind in ("known", "unknown"))
    train, lesson = prompts("train.jsonl"), prompts("lesson.jsonl")
    assert len(known) == len(unknown) == 20
    assert not set(train) & {*known, *unknown}
    taught = {p for p in lesson if lesson.count(p) >= part.PASSES}
    assert set(known) <= taught
    assert not set(unknown) & taught
    asked = len({*train, *known, *unknown})
    assert len(taught) == asked // 2


def test_engines_of_no_use_find_another_document_and_nothing(tmp_path):
    for name in ("search_tools.py",):
        (tmp_path / name).write_text((RECIPES / name).read_text(encoding="utf-8"))
    documents = [{"id": str(i), "contents": f"entity {i}"} for i in range(50)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    tools = load(tmp_path / "search_tools.py")
    assert tools.empty("entity 3") == ""
    found = [tools.shuffled(f"entity {i}") for i in range(50)]
    assert found == [tools.shuffled(f"entity {i}") for i in range(50)]
    assert sum(text == f"entity {i}" for i, text in enumerate(found)) <= 4  # one by chance
    assert len(set(found)) > 20


def search_cell(after: float, first: float, last: float) -> dict:
    return {
        "evals": [{"sampled": share(0.3), "calls": first}, {"sampled": share(after), "calls": last}]
    }


def test_search_signs_read_masking_and_searches(script):
    cells = {
        "right": [search_cell(0.9, 0.5, 1.0)],
        "right, read text learnt too": [search_cell(0.6, 0.5, 1.0)],
        "shuffled": [search_cell(0.5, 0.5, 0.2)],
        "empty": [search_cell(0.5, 0.5, 0.1)],
        "empty, GRPO": [search_cell(0.5, 0.5, 0.9)],
    }
    signs_of = script("yardstick_search").signs_of
    assert list(signs_of(cells).values()) == [True, True, False]
    cells["shuffled"] = [search_cell(0.5, 0.5, 0.3)]  # fewer, and more than half of what it was
    cells["empty"] = [search_cell(0.5, 0.5, 0.6)]
    assert list(signs_of(cells).values()) == [True, False, True]


# Gao's law ----------------------------------------------------------------------------------------


def test_both_forms_are_fitted_back_from_their_own_points(script):
    part = script("yardstick_gao")
    ds = [0.3, 0.6, 1.0, 1.5, 2.2, 3.0]
    rl = [(d, d * (1.2 - 0.7 * math.log(d)), 0.01) for d in ds]
    best = [(d, d * (1.5 - 0.4 * d), 0.01) for d in ds]
    assert part.fit(rl, np.log) == pytest.approx((1.2, 0.7, 1.0))
    assert part.fit(best, np.positive) == pytest.approx((1.5, 0.4, 1.0))


def test_the_best_of_n_is_any_of_all_subsets(script):
    chances = script("yardstick_gao").chances(4, 2)
    # of the six pairs the worst is never the best, the next of one, then of two, then of three
    assert chances.tolist() == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6])


def test_gold_is_compared_at_equal_d_only_where_both_are(script):
    part = script("yardstick_gao")
    free = [(1.0, 1.0, 0.03), (2.0, 2.0, 0.03)]
    tied = [(0.5, 0.7, 0.04), (1.5, 1.5, 0.04), (2.5, 9.0, 0.04)]
    gaps = part.above(tied, free)
    assert [gap for gap, _ in gaps] == pytest.approx([0.2, 0.0])
    assert [error for _, error in gaps] == pytest.approx([0.05, 0.05])
    mean, half = part.mean_above(gaps)
    assert mean == pytest.approx(0.1)
    assert half == pytest.approx(1.959964 * 0.05)


@pytest.mark.long
def test_a_small_course_and_best_of_n_are_measured(script, tmp_path, monkeypatch):
    part = script("yardstick_gao")
    sizes = {"demonstrations": 64, "questions": 64, "pairs": 64, "heldout": 16}
    small = {f"task.{name}": size for name, size in sizes.items()}
    small |= {"ppo.rollout.prompts": 32, "sft.train.passes": 1, "reward_model.train.passes": 1}
    monkeypatch.setattr(part, "PIPELINE", {**part.PIPELINE, **small})
    for name, value in {"ITERATIONS": 2, "EVERY": 1, "MOST": 4, "BEST_OF": (1, 2, 4)}.items():
        monkeypatch.setattr(part, name, value)
    layout = part.prepare(tmp_path, seed=100)
    points = part.course(layout, beta=0.0)
    assert [len(point) for point in points] == [4] * 3
    assert points[0][0] == pytest.approx(0.0, abs=1e-6)  # KL of SFT to itself
    assert points[2][0] > 0
    best = part.best_of_n(layout)
    assert [point[0] for point in best] == pytest.approx(
        [0.0, math.log(2) - 1 / 2, math.log(4) - 3 / 4]
    )
    assert best[0][3] < best[1][3] < best[2][3]  # what it is chosen by rises


# Families of reasoning-gym ------------------------------------------------------------------------


def test_there_are_twenty_families_with_the_same_arguments_held_out(script):
    config = load_config(RECIPES / "reasoning.yaml", {"model.actor": "tether:starter"})
    sources = config.data.files("train")
    assert len({source.path for source in sources}) == 20

    def rest(arguments: dict) -> dict:
        return {name: value for name, value in arguments.items() if name != "size"}

    heldout = {source.path: rest(source.arguments) for source in config.data.files("heldout")}
    assert heldout == {source.path: rest(source.arguments) for source in sources}


def test_a_family_is_better_or_worse_where_intervals_are_apart(script):
    part = script("yardstick_reasoning")
    low, middle, high = (
        part.Estimate(mean, mean - 0.05, mean + 0.05, 200, False) for mean in (0.3, 0.35, 0.5)
    )
    assert part.verdict(low, high) is True
    assert part.verdict(high, low) is False
    assert part.verdict(low, middle) is None


# Keeping ------------------------------------------------------------------------------------------


def test_a_broken_result_is_refused_by_its_name(script, tmp_path):
    store = script("yardstick_store").Store(tmp_path)
    store.path("Y", {}).write_text('{"settings": {}')
    with pytest.raises(SystemExit, match="is not a whole result; remove it"):
        store.measured("Y", {}, lambda: {}, ["scripts"])


def test_with_only_what_is_kept_nothing_is_measured(script, tmp_path):
    module = script("yardstick_store")
    store = module.Store(tmp_path, only_kept=True)
    with pytest.raises(module.NotThere, match=r"not measured yet: .*--only Y5"):
        store.measured("Y5-cell", {}, lambda: pytest.fail("measured"), ["scripts"])


@table("estimator", ["gae", "grpo"])
def test_recipes_are_whole_with_either_estimator(estimator):
    given = {"model.actor": "tether:starter", "data.train": "a.jsonl", "data.heldout": "b.jsonl"}
    given |= {"advantage.estimator": estimator}
    reward = {"reward.kind": f"{ROOT / 'examples' / 'parity' / 'reward.py'}:parity_at_end"}
    parity = load_config(ROOT / "examples" / "parity" / "rl.yaml", {**given, **reward})
    assert parity.rollout.max_response_tokens > 20  # the longest response, and its end
    tools = {"rollout.tools": [{"kind": f"{RECIPES / 'search_tools.py'}:empty"}]}
    search = load_config(RECIPES / "search.yaml", {**given, **tools})
    assert search.rollout.is_multi_turn


@table("name", ["reasoning_sft", "search_sft"])
def test_supervised_recipes_are_whole(name):
    fields = {"model.start": "tether:starter", "data.train": "rows.jsonl"}
    assert load_config(RECIPES / f"{name}.yaml", fields, SFTConfig).train.minibatch_rows == 64
