"""The benchmark: our programs on a tiny model, and tables from turns that were made up."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import table
from transformers import AutoModelForCausalLM

from bench import blocks, limits, profile, report, rounds, run
from bench.blocks import Block, Check, Side
from bench.environments import NotThere, python_of
from bench.floor import ppo_operations, weights
from bench.jobs import mixed_lengths, ppo_job, prompts, sampling_job, update_job
from bench.models import ROOT, TINY, model_directory
from bench.ours import ppo, sampling, time_to_score, update
from bench.peers.transformers_generate import program as generate
from bench.protocol import laps
from bench.report import block_lines, summary
from bench.rounds import Turns, measure


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return model_directory("tiny", tmp_path_factory.mktemp("bench"))


def turn(*seconds: float, tokens: int = 100, peak_mib: float = 50.0) -> dict:
    return {
        "seconds": list(seconds),
        "cpu_seconds": [7.0],
        "tokens": tokens,
        "peak_mib": peak_mib,
        "load": 1.0,
    }


def made_up(sides: dict[str, list[dict]], checks: list[Check], tmp_path: Path, **fields) -> Turns:
    block = Block(
        name="made-up",
        title="made up",
        sides=[Side(name, "none", dict) for name in sides],
        checks=checks,
        **fields,
    )
    turns = Turns(block, tmp_path)
    turns.results = sides
    return turns


# Our programs.


def test_our_sampler_gives_each_row_the_length_that_the_job_asks_for(tiny):
    job = sampling_job(tiny, prompts(5, 4, vocabulary=512), [3, 1, 4, 2, 6], repeats=2)
    result = sampling.run(job)
    assert result["tokens"] == 3 + 1 + 4 + 2 + 6
    assert len(result["seconds"]) == 2


def test_transformers_is_asked_for_the_same_tokens(tiny):
    job = sampling_job(tiny, prompts(5, 4, vocabulary=512), [3, 1, 4, 2, 6], repeats=1)
    assert generate.run(job)["tokens"] == 16


def test_a_generated_row_stops_at_its_own_length():
    stop = generate.OwnLength(prompt_width=4, lengths=[1, 3])
    assert stop(torch.zeros(2, 6), None).tolist() == [True, False]


@pytest.mark.parametrize(("lora_rank", "shared_trunk"), [(0, False), (2, True)])
def test_our_step_samples_every_row_to_the_end(tiny, tmp_path, lora_rank, shared_trunk):
    ids = prompts(4, 6, vocabulary=512)
    job = ppo_job(tiny, ids, 5, repeats=1, lora_rank=lora_rank, shared_trunk=shared_trunk)
    result = ppo.run({**job, "scratch": str(tmp_path)})
    assert result["tokens"] == 4 * 5  # an EOS among them would have ended a row
    assert len(result["seconds"]) == 1


def test_the_step_is_given_the_prompts_of_the_job(tiny, tmp_path):
    ids = prompts(4, 6, vocabulary=512)
    job = {**ppo_job(tiny, ids, 5, repeats=1), "scratch": str(tmp_path)}
    config, roles = ppo.build(job)
    assert sorted(roles.train_prompts.for_iteration(0, 4, config.seed, shuffle=True).ids) == sorted(
        ids
    )
    assert config.actor.epochs == 4
    assert config.actor.minibatch_rows == 4


def test_the_matrix_product_is_counted_with_two_operations_a_weight_and_row(monkeypatch):
    monkeypatch.setattr(limits, "GEMM", (2, 3, 5))
    monkeypatch.setattr(limits, "GEMM_SECONDS", 0.01)
    result = limits.gemm({"repeats": 2})
    assert result["tokens"] == 2 * (2 * 3 * 5)
    assert all(0 < seconds < 0.01 for seconds in result["seconds"])


def test_the_bare_forward_counts_one_token_a_row_and_step(tiny):
    job = {"model": str(tiny), "prompts": prompts(5, 4, vocabulary=512), "steps": 3, "repeats": 1}
    assert limits.bare_forward(job)["tokens"] == 15


def test_a_program_answers_with_one_line_whatever_libraries_print():
    program = (
        "from bench.protocol import *; job = read_job(); print('noise');"
        "write_result(job, {'seconds': [job['x']]})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input='{"x": 3}',
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["seconds"] == [3]
    assert "noise" in done.stderr


def test_peak_memory_remembers_what_was_given_back():
    program = (
        "from bench.protocol import peak_mib; before = peak_mib();"
        "block = b'x' * (200 << 20); del block; print(peak_mib() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert 195 < float(done.stdout) < 210


def test_the_first_lap_is_the_warm_up():
    result = laps([(1.0, 10.0), (4.0, 12.0), (5.0, 13.0), (7.0, 17.0)])
    assert result == {"warm_up": 3.0, "seconds": [1.0, 2.0], "cpu_seconds": [1.0, 4.0]}


def test_the_clock_stands_still_while_a_run_evaluates(monkeypatch):
    now = iter([10.0, 13.0, 20.0, 24.0])  # evaluated, evaluating, evaluated, evaluating
    monkeypatch.setattr(time_to_score.time, "perf_counter", lambda: next(now))
    watch = time_to_score.Stopwatch(score=0.85)

    def evaluate(iteration: int, score: float) -> None:
        watch.evaluating(500)
        sampled = SimpleNamespace(mean=score)
        watch.evaluated(SimpleNamespace(iteration=iteration, sampled=sampled, kl=0.5))

    evaluate(0, 0.50)
    evaluate(1, 0.84)
    with pytest.raises(time_to_score.Reached):
        evaluate(2, 0.85)
    assert watch.curve == [(0, 0.0, 0.50), (1, 3.0, 0.84), (2, 7.0, 0.85)]


# Jobs.


def test_mixed_lengths_are_spread_evenly():
    lengths = mixed_lengths(64, 8, 64)
    assert (min(lengths), max(lengths), sum(lengths)) == (8, 64, 64 * 36)
    assert lengths != sorted(lengths)


def test_the_eight_prompts_differ_in_their_first_token_only():
    one, eight = (side.job for side in prefill_sides())
    assert len({tuple(ids) for ids in one()["prompts"]}) == 1
    assert len({ids[0] for ids in eight()["prompts"]}) == 8
    assert {tuple(ids[1:]) for ids in eight()["prompts"]} == {tuple(one()["prompts"][0][1:])}


def prefill_sides() -> list[Side]:
    """Of the block, with a model that need not exist."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "model_directory", lambda name: Path(name))
        sides = blocks.prefill().sides
        jobs = [side.job() for side in sides]
    return [
        Side(side.name, side.module, lambda job=job: job)
        for side, job in zip(sides, jobs, strict=True)
    ]


def test_every_check_names_sides_of_its_block():
    for block in blocks.blocks():
        names = {side.name for side in block.sides}
        named = [side for c in block.checks for side in (c.large, c.small)]
        assert {n for side in named for n in ([side] if isinstance(side, str) else side)} <= names


def test_every_program_and_environment_exists():
    for block in blocks.blocks():
        for side in block.sides:
            assert (ROOT / (side.module.replace(".", "/") + ".py")).is_file()
            if side.environment != blocks.OURS:
                assert (ROOT / "bench" / "peers" / side.environment).is_dir()


def test_the_floor_counts_the_weights_of_the_models_own_matrices(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    layers, head = weights(tiny)
    assert head == TINY.vocab_size * TINY.hidden_size
    assert layers + head == sum(m.weight.numel() for m in linear)


def test_the_floor_of_a_step_by_hand(tmp_path):
    shape = {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1}
    shape |= {"intermediate_size": 4, "num_hidden_layers": 1, "vocab_size": 10}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    job = {"model": str(tmp_path), "prompts": [[1], [1]], "response_tokens": 1, "epochs": 1}
    # 16 weights in attention, 24 in the feed-forward, 20 in the head; 4 tokens read, 2 sampled.
    actor, critic = 2 * (40 * 4 + 20 * 2), 2 * 40 * 4
    full = 2 * actor + critic + 3 * (actor + critic)
    assert ppo_operations({**job, "lora_rank": 0, "shared_trunk": False}) == full
    shared = 2 * actor + 2 * actor
    assert ppo_operations({**job, "lora_rank": 4, "shared_trunk": True}) == shared


# Rounds.


def counted(monkeypatch, results: dict[str, dict]) -> list[str]:
    """Sides are not run but looked up; the list fills with their names in order."""
    asked: list[str] = []

    def run(side: Side, number: int) -> dict:
        asked.append(side.name)
        if side.name not in results:
            raise NotThere("no such wheel")
        return results[side.name]

    monkeypatch.setattr(rounds, "run", run)
    return asked


def test_sides_take_turns_and_a_stopped_run_goes_on(monkeypatch, tmp_path):
    block = Block("b", "b", [Side("a", "none", dict), Side("z", "none", dict)], [])
    asked = counted(monkeypatch, {"a": turn(1.0), "z": turn(2.0)})
    measure(block, 2, tmp_path)
    assert asked == ["a", "z", "a", "z"]
    measure(block, 3, tmp_path)
    assert asked == ["a", "z", "a", "z", "a", "z"]


def test_turns_of_other_sources_are_not_used_again(monkeypatch, tmp_path):
    block = Block("b", "b", [Side("a", "none", dict)], [])
    asked = counted(monkeypatch, {"a": turn(1.0)})
    measure(block, 1, tmp_path)
    monkeypatch.setattr(rounds, "sources", lambda: "another hash")
    measure(block, 1, tmp_path)
    assert asked == ["a", "a"]


def test_a_missing_environment_leaves_a_gap_where_it_may(monkeypatch, tmp_path):
    may = Block("b", "b", [Side("a", "none", dict), Side("z", "none", dict, optional=True)], [])
    counted(monkeypatch, {"a": turn(1.0)})
    turns = measure(may, 2, tmp_path)
    assert turns.missing == {"z": "no such wheel"}
    assert turns.complete
    assert any("no such wheel" in line for line in block_lines(may, turns, None))
    must = Block("c", "c", [Side("z", "none", dict)], [])
    with pytest.raises(SystemExit, match="no such wheel"):
        measure(must, 1, tmp_path)


def test_a_failing_side_says_what_it_said():
    with pytest.raises(SystemExit, match=r"(?s)broken failed.*No module named"):
        rounds.run(Side("broken", "bench.no_such_program", dict), 0)


def test_a_peer_without_requirements_runs_in_our_environment():
    assert python_of("transformers_generate") == Path(sys.executable)


# Tables.


def test_a_ratio_is_of_medians(tmp_path):
    check = Check("against", "peer", "ours", at_least=2.5)
    sides = {"ours": [turn(1), turn(2), turn(9)], "peer": [turn(5), turn(4), turn(6)]}
    found = report.figures(made_up(sides, [check], tmp_path))
    assert report.verdict(check, found).ratio == 5 / 2
    assert report.verdict(check, found).met


@pytest.mark.parametrize(
    ("check", "ratio", "met"),
    [
        (Check("x", "a", "b", "seconds", at_least=2.1), 2.0, False),
        (Check("x", "a", "b", "seconds", at_most=2.0), 2.0, True),
        (Check("x", "a", "b", "memory", at_most=0.8), 30 / 40, True),
        (Check("x", "a", "b", "memory", at_most=0.7), 30 / 40, False),
        (Check("x", "a", "b", "rate", at_least=0.7), (100 / 4) / (40 / 2), True),
        (Check("x", "a", "b"), 2.0, None),
    ],
)
def test_targets_are_held_against_the_right_quantity(tmp_path, check, ratio, met):
    sides = {"a": [turn(4, tokens=100, peak_mib=30)], "b": [turn(2, tokens=40, peak_mib=40)]}
    verdict = report.verdict(check, report.figures(made_up(sides, [check], tmp_path)))
    assert (verdict.ratio, verdict.met) == (ratio, met)


def test_a_program_at_its_best_is_the_faster_of_its_sides(tmp_path):
    check = Check("x", ("a", "b", "gone"), ("c", "d"), at_least=2)
    sides = {"a": [turn(9)], "b": [turn(4)], "c": [turn(2)], "d": [turn(3)], "gone": []}
    found = report.figures(made_up(sides, [check], tmp_path))
    assert report.verdict(check, found).ratio == 4 / 2
    assert report.verdict(Check("x", ("gone",), "c"), found).ratio is None
    memory = Check("x", ("a", "b"), "c", "memory")
    assert report.verdict(memory, found).ratio == 1


def test_updates_are_timed_on_rows_that_share_their_prompts(tiny, tmp_path):
    ids = prompts(3, 64, vocabulary=512)
    job = {**update_job(tiny, ids, 4, 5, share=True), "scratch": str(tmp_path), "repeats": 1}
    config, roles = ppo.build(job)
    assert config.rows == config.actor.minibatch_rows == 12
    assert roles.share_prompts
    assert update.run(job)["tokens"] == 12 * 5
    assert not ppo.build({**job, "share_prompts": False})[1].share_prompts


def test_a_side_that_never_got_there_is_a_bound_or_a_failure(tmp_path):
    check = Check("x", "peer", "ours", at_least=3)
    never = {**turn(), "curve": [[0, 0.0, 0.5], [40, 120.0, 0.7]]}
    found = report.figures(made_up({"ours": [turn(30)], "peer": [never]}, [check], tmp_path))
    assert report.verdict(check, found).cells() == ["> 4.00", "at least 3", "yes"]
    found = report.figures(made_up({"ours": [never], "peer": [turn(30)]}, [check], tmp_path))
    assert report.verdict(check, found).met is False


@pytest.mark.long
def test_a_block_from_its_process_to_its_table(tiny, tmp_path):
    job = sampling_job(tiny, prompts(4, 4, vocabulary=512), [2, 4, 6, 8], repeats=1)
    side = blocks.ours_sampling("tether", lambda: job)
    block = Block("b", "quick", [side], [], unit="tokens/s")
    turns = measure(block, 1, tmp_path)
    (result,) = turns.results["tether"]
    assert result["tokens"] == 20
    rate = float(block_lines(block, turns, None)[3].split()[1])
    assert rate == pytest.approx(20 / result["seconds"][0], abs=0.5)


def test_the_tables_show_rates_gaps_and_verdicts(tmp_path):
    check = Check("against the peer", "peer", "ours", at_least=2.5)
    turns = made_up({"ours": [turn(2)], "peer": []}, [check], tmp_path, unit="tokens/s")
    lines = block_lines(turns.block, turns, None)
    assert lines[0] == "made up"
    assert lines[3].split() == ["ours", "50", "50", "–", "50", "7", "50", "1.0"]
    assert lines[4].split() == ["peer", "not", "measured"]
    (row,) = (line for line in summary([(turns.block, turns)]) if "against the peer" in line)
    assert row.split()[-5:] == ["not", "measured", "at", "least", "2.5"]


@table(
    ("operator", "group"),
    [
        ("aten::addmm", "GEMM"),
        ("aten::mm", "GEMM"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::_log_softmax_backward_data", "softmax and head"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::searchsorted", "sampling"),
        ("aten::mul", profile.OTHER),
    ],
)
def test_operators_are_grouped_by_what_they_serve(operator, group):
    assert profile.group_of(operator) == group


def test_the_page_has_a_place_for_both_tables():
    page = run.DOCUMENT.read_text(encoding="utf-8")
    for marker in (run.MARKER, profile.MARKER):
        assert page.count(f"<!-- {marker} -->\n```text\n") == 1
    begun = re.findall(r"<!-- (?!end )[^\n]+ -->\n", page)
    assert page.count("<!-- end -->") == len(begun) == len(set(begun))


def test_every_block_is_explained_on_the_page():
    page = run.DOCUMENT.read_text(encoding="utf-8")
    assert [b.name for b in blocks.blocks() if f"`{b.name}`" not in page] == []
