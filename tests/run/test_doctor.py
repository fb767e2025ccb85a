"""Every rule of the doctor on made-up numbers, on both sides of its threshold; runs that are not
whole; and the thresholds on a few real runs."""

import json
from pathlib import Path

import pytest
import yaml
from helpers import changed, distinct_letters, table

from tether import api
from tether.config import walk_fields
from tether.errors import UserError
from tether.run.doctor.diagnosis import RULES, diagnose, examine
from tether.run.doctor.evidence import Evidence, Point, end, read_evidence, start
from tether.run.doctor.findings import Reading

DOCS = Path(__file__).resolve().parents[2] / "docs"
ITERATIONS = 12
CONFIG = {
    "schema": 1,
    "rollout": {"prompts": 8, "samples_per_prompt": 2, "max_response_tokens": 20},
    "actor": {"update": {"kind": "clip"}},
}
# What a run looks like that is well: one number for all iterations, or the first and the last.
WELL = {
    "score/mean": (0.5, 0.7),
    "score/std": 0.5,
    "response/length_mean": 6.0,
    "response/eos_rate": 1.0,
    "rollout/log_prob_diff_max": 1e-6,
    "kl/token_mean": (0.0, 0.3),
    "kl/sequence_mean": (0.0, 1.8),
    "kl/coef": 0.01,
    "reward/mean": (0.5, 0.68),
    "value/mean": (0.0, 0.6),
    "critic/explained_variance": (0.0, 0.2),
    "advantage/zero_spread_share": 0.5,
    "actor/entropy": (1.0, 0.6),
    "actor/approx_kl": 0.03,
    "actor/pg_clipfrac": 0.03,
    "actor/ratio_max": 2.0,
    "actor/steps": 4.0,
    "actor/lr": 1e-4,
    "tools/calls_mean": 1.0,
}
LOG_PROBS = {"rollout_log_probs": [-1.0] * 10, "old_log_probs": [-1.0] * 10,
             "response_mask": [True] * 10}  # fmt: skip
ROWS = [{"response_ids": list(range(10)), **LOG_PROBS} for _ in range(10)]


def line(first: float, last: float, n: int = ITERATIONS) -> list[float]:
    return [first + (last - first) * i / (n - 1) for i in range(n)]


def made(metrics=None, n=ITERATIONS, **rest) -> Evidence:
    """A run that is well but for what is given; None takes a metric away."""
    series = {}
    for name, value in {**WELL, **(metrics or {})}.items():
        if value is not None:
            series[name] = line(*value, n) if isinstance(value, tuple) else value
    records = [
        {"iteration": i, **{k: v[i] if isinstance(v, list) else v for k, v in series.items()}}
        for i in range(n)
    ]
    return Evidence(
        **{"metrics": records, "config": CONFIG, "rows": {0: ROWS, n - 1: ROWS}, **rest}
    )


def found(evidence: Evidence) -> set[str]:
    return {finding.rule for finding in diagnose(evidence).findings}


def evals(*means: float, half: float = 0.05) -> list[dict]:
    return [
        {"iteration": 10 * i, "sampled": {"mean": m, "low": m - half, "high": m + half}}
        for i, m in enumerate(means)
    ]


def events(kind: str, count: int, message: str = "why") -> list[dict]:
    return [{"iteration": 3, "kind": kind, "row": i, "message": message} for i in range(count)]


def rows(repeating: int, gap: float = 0.0) -> list[dict]:
    """Ten rows of which some say one token over and over."""
    old = [-1.0 + gap] * 10
    return [
        {"response_ids": [7] * 10 if i < repeating else list(range(10)), **LOG_PROBS,
         "old_log_probs": old}
        for i in range(10)
    ]  # fmt: skip


def test_a_run_that_is_well_is_left_in_peace():
    diagnosis = diagnose(made(evals=evals(0.5, 0.6)))
    assert not diagnosis.findings
    assert not diagnosis.not_judged
    assert len(diagnosis.judged) == len(RULES)


# (rule, a run with the trouble, the same run just short of it)
BOTH_SIDES = [
    ("kl_explodes", made({"kl/token_mean": (0.0, 1.5)}), made({"kl/token_mean": (0.0, 0.9)})),
    ("kl_explodes", made({"kl/token_mean": (0.0, 3.0)}), made({"kl/token_mean": 3.0})),
    # 0.5 (std / beta)² is 0.05 nats, then 0.5
    (
        "kl_stuck",
        made({"score/std": 0.1, "kl/coef": 0.1 / 0.1**0.5}),
        made({"score/std": 0.1, "kl/coef": 0.1}),
    ),
    (
        "entropy_collapse",
        made({"actor/entropy": [2.0] * 6 + [0.35] * 6}),
        made({"actor/entropy": [2.0] * 6 + [0.45] * 6}),
    ),
    # A task with one right answer leaves nothing to choose from the start.
    (
        "entropy_collapse",
        made({"actor/entropy": [0.2] * 6 + [0.01] * 6}),
        made({"actor/entropy": [0.1] * 6 + [0.005] * 6}),
    ),
    # It may be gone before a quarter of the run is over.
    (
        "entropy_collapse",
        made({"actor/entropy": [2.0] * 2 + [0.15] * 18}, n=20),
        made({"actor/entropy": [2.0] * 1 + [0.15] * 19}, n=20),
    ),
    (
        "one_length",
        made({"response/length_mean": [6.0] * 6 + [1.4] * 6}),
        made({"response/length_mean": [6.0] * 6 + [1.6] * 6}),
    ),
    (
        "one_length",
        made({"response/length_mean": [6.0] * 6 + [1.0] * 6}),
        made({"response/length_mean": 1.0}),
    ),
    (
        "one_length",
        made({"response/length_mean": (6.0, 20.0), "response/eos_rate": (1.0, 0.1)}),
        made({"response/length_mean": (6.0, 20.0), "response/eos_rate": (1.0, 0.8)}),
    ),
    (
        "zero_spread",
        made({"advantage/zero_spread_share": 0.95}),
        made({"advantage/zero_spread_share": 0.85}),
    ),
    # Few groups per iteration: the second half as a whole, 0.9125 and 0.8875 on average.
    (
        "zero_spread",
        made({"advantage/zero_spread_share": [0.5] * 6 + [0.875] * 4 + [1.0, 0.975]}),
        made({"advantage/zero_spread_share": [1.0] * 6 + [0.875] * 5 + [0.95]}),
    ),
    (
        "score_never_varies",
        made({"score/std": 0.0, "score/mean": 0.0}),
        made({"score/std": [0.0] * 11 + [0.1]}),
    ),
    # Solved: the score rose to where it is.
    (
        "score_never_varies",
        made({"score/std": [0.5] * 4 + [0.0] * 8, "score/mean": (0.9, 0.2)}),
        made({"score/std": [0.5] * 4 + [0.0] * 8, "score/mean": (0.2, 1.0)}),
    ),
    # Solved at once.
    (
        "score_never_varies",
        made({"score/std": [0.5] + [0.0] * 11, "score/mean": [0.5] + [0.4] * 11}),
        made({"score/std": [0.5] + [0.0] * 11, "score/mean": [0.5] + [1.0] * 11}),
    ),
    # A gap of 1.2 and of 0.8 spreads (0.5 each): the second is a critic behind a quick rise.
    (
        "critic_explains_nothing",
        made({"critic/explained_variance": 0.0, "value/mean": 0.1, "reward/mean": 0.7}),
        made({"critic/explained_variance": 0.0, "value/mean": 0.3, "reward/mean": 0.7}),
    ),
    (
        "critic_explains_nothing",
        made({"critic/explained_variance": 0.0, "value/mean": 0.1, "reward/mean": 0.9}),
        made({"critic/explained_variance": 0.0, "value/mean": 0.7, "reward/mean": 0.9}),
    ),
    (
        "critic_explains_nothing",
        made({"critic/explained_variance": -0.6}),
        made({"critic/explained_variance": -0.4}),
    ),
    ("clip_fraction", made({"actor/pg_clipfrac": 0.2}), made({"actor/pg_clipfrac": 0.1})),
    # Seven of twelve iterations, and the last three, above the bound.
    (
        "clip_fraction",
        made({"actor/pg_clipfrac": [0.3] * 7 + [0.05] * 5}),
        made({"actor/pg_clipfrac": [0.3] * 5 + [0.05] * 7}),
    ),
    (
        "clip_fraction",
        made({"actor/pg_clipfrac": [0.05] * 9 + [0.2] * 3}),
        made({"actor/pg_clipfrac": [0.05] * 11 + [0.9]}),
    ),
    (
        "clip_fraction",
        made({"actor/pg_clipfrac": 0.9}),
        made({"actor/pg_clipfrac": 0.9}, config=changed(CONFIG, actor__update__kind="gspo")),
    ),
    ("stale_rows", made({"actor/approx_kl": 0.3}), made({"actor/approx_kl": 0.2})),
    (
        "policy_jumped",
        made({"actor/approx_kl": [0.03] * 5 + [1.1] + [0.03] * 6}),
        made({"actor/approx_kl": [0.03] * 5 + [0.9] + [0.03] * 6}),
    ),
    ("truncation", made({"response/eos_rate": 0.6}), made({"response/eos_rate": 0.8})),
    ("repetition", made(rows={0: ROWS, 11: rows(4)}), made(rows={0: ROWS, 11: rows(3)})),
    ("repetition", made(rows={0: ROWS, 11: rows(8)}), made(rows={0: rows(8), 11: rows(8)})),
    (
        "sampler_mismatch",
        made({"rollout/log_prob_diff_mean": 0.02}),
        made({"rollout/log_prob_diff_mean": 0.005}),
    ),
    (
        "sampler_mismatch",
        made(
            {"rollout/log_prob_diff_mean": 0.2}, config=changed(CONFIG, model__compute="bfloat16")
        ),
        made(
            {"rollout/log_prob_diff_mean": 0.03}, config=changed(CONFIG, model__compute="bfloat16")
        ),
    ),
    (
        "sampler_mismatch",
        made(rows={0: ROWS, 11: rows(0, gap=0.02)}),
        made(rows={0: ROWS, 11: rows(0, gap=0.005)}),
    ),
    (
        "sampler_mismatch",
        made({"rollout/log_prob_diff_max": 0.2}, rows={}),
        made({"rollout/log_prob_diff_max": 0.05}, rows={}),
    ),
    ("learning_rate_too_low", made({"actor/approx_kl": 1e-9}), made({"actor/approx_kl": 1e-4})),
    # One step per iteration: the ratio is always 1, the KL to the reference tells.
    (
        "learning_rate_too_low",
        made({"actor/approx_kl": 0.0, "actor/steps": 1.0, "kl/token_mean": 1e-7}),
        made({"actor/approx_kl": 0.0, "actor/steps": 1.0}),
    ),
    # Standard errors 0.05/1.96 each: two of the difference are 0.072.
    ("heldout_falls", made(evals=evals(0.5, 0.6, 0.5)), made(evals=evals(0.5, 0.6, 0.55))),
    (
        "heldout_falls",
        made(evals=evals(0.6, 0.4)),
        made({"score/mean": (0.7, 0.5)}, evals=evals(0.6, 0.4)),
    ),
    # A few prompts are learnt within the first iteration.
    (
        "heldout_falls",
        made({"score/mean": [0.5] + [1.0] * 11}, evals=evals(0.6, 0.4)),
        made({"score/mean": 1.0}, evals=evals(0.6, 0.4)),
    ),
    # They may be lost again by the end; a run that lost all is another trouble.
    (
        "heldout_falls",
        made({"score/mean": [0.5] + [1.0] * 7 + [0.5] * 4}, evals=evals(0.6, 0.4)),
        made({"score/mean": [0.5] + [1.0] * 4 + [0.0] * 7}, evals=evals(0.6, 0.4)),
    ),
    # 12 iterations of 16 rows: 1% are 1.92 of 192.
    ("unscorable_rows", made(events=events("unscorable", 2)), made(events=events("unscorable", 1))),
    ("not_finite", made(events=events("non_finite_row", 1)), made(events=events("bad_row", 1))),
    (
        "tools_not_called",
        made({"tools/calls_mean": [1.0] * 6 + [0.0] * 6}),
        made({"tools/calls_mean": [1.0] * 6 + [0.1] * 6}),
    ),
    (
        "stopped",
        made(events=events("stopped", 1)),
        made(events=[*events("stopped", 1), *events("resumed", 1)]),
    ),
    ("stopped", made(events=events("failed", 1)), made(events=events("interrupted", 1))),
]


@table(("rule", "trouble", "short_of_it"), BOTH_SIDES)
def test_a_rule_speaks_beyond_its_threshold_and_not_before(rule, trouble, short_of_it):
    assert rule in found(trouble)
    assert rule not in found(short_of_it)


def test_the_table_has_every_rule():
    assert {rule for rule, _, _ in BOTH_SIDES} == {rule.name for rule in RULES}


def test_a_finding_has_numbers_fields_and_a_section_of_the_docs():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    sections = {
        text.strip().lower().replace(" ", "-")
        for mark, _, text in (row.partition(" ") for row in page.splitlines())
        if mark == "##"
    }
    fields = {name for name, _ in walk_fields()}
    names = {*fields, *(name.rpartition(".")[0] for name in fields), "data.train", "reward.parts"}
    for rule, trouble, _ in BOTH_SIDES:
        [finding] = [f for f in diagnose(trouble).findings if f.rule == rule]
        assert finding.readings, rule
        assert finding.link.removeprefix("docs/troubleshooting.md#") in sections, finding.link
        assert set(finding.fields) <= names, finding.fields
        assert finding.what.en.isascii()
        assert not finding.what.zh.isascii()
        assert not finding.change.zh.isascii()


def test_a_reading_says_how_a_number_was_and_how_it_is():
    reading = Reading("kl/token_mean", Point(11, 43.21), Point(0, 0.5))
    assert str(reading) == "kl/token_mean 0.5 at iteration 0, 43.2 at iteration 11"


def test_start_and_end_are_medians_of_a_quarter_which_one_outlier_does_not_move():
    points = [Point(i, v) for i, v in enumerate([1, 100, 3, 4, 5, 6, 7, 8, 9, 10, -50, 12])]
    assert start(points) == 3
    assert end(points) == 10


def test_a_finding_quotes_the_event_behind_it():
    [finding] = diagnose(made(events=events("stopped", 1, "disk full"))).findings
    assert finding.message == "disk full"


def test_the_diagnosis_is_plain_data():
    record = json.loads(json.dumps(diagnose(made({"response/eos_rate": 0.2})).as_dict()))
    [finding] = record["findings"]
    assert finding["rule"] == "truncation"
    assert finding["what"]["zh"] == "很多回答没写完就被截断。"
    assert finding["readings"][0]["last"] == {"iteration": 11, "value": 0.2}
    assert finding["evidence"][0].startswith("response/eos_rate 0.2 at iteration 0")


# Runs that are not whole


@pytest.fixture
def run(tmp_path) -> Path:
    """The run that is well, as files."""
    folder = tmp_path / "run"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    write(folder / "metrics.jsonl", made().metrics)
    write(folder / "evals.jsonl", evals(0.5, 0.6))
    write(folder / "events.jsonl", [])
    write(folder / "rollouts" / "000000.jsonl", ROWS)
    write(folder / "rollouts" / "000011.jsonl", ROWS)
    return folder


def write(path: Path, records) -> None:
    lines = [json.dumps({"schema": 1, **record}) + "\n" for record in records]
    path.write_text("".join(lines))


def test_a_run_on_disk_is_read_whole(run):
    evidence = read_evidence(run)
    assert evidence.notes == []
    assert evidence.iterations == ITERATIONS
    assert sorted(evidence.rows) == [0, 11]
    assert not examine(run).findings


def test_a_run_that_has_just_begun_says_what_it_lacks(run):
    write(run / "metrics.jsonl", made(n=12).metrics[:1])
    diagnosis = examine(run)
    assert not diagnosis.findings
    assert diagnosis.not_judged["kl_explodes"] == "needs 5 iterations, the run has 1"
    assert {"stopped", "policy_jumped"} <= set(diagnosis.judged)


def test_a_run_without_any_iteration_is_read(run):
    write(run / "metrics.jsonl", [])
    (run / "evals.jsonl").unlink()
    diagnosis = examine(run)
    assert set(diagnosis.judged) == {"stopped", "not_finite"}
    assert "evals.jsonl is missing." in diagnosis.notes


def test_without_rollouts_the_other_rules_judge(run):
    for file in (run / "rollouts").iterdir():
        file.unlink()
    diagnosis = examine(run)
    assert diagnosis.not_judged == {"repetition": "needs rows in rollouts/, see run.rollouts_every"}
    assert diagnosis.notes == ["rollouts/ holds no rows, so responses are not judged."]


def test_damaged_lines_are_named_and_the_rest_is_judged(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[3] = '{"iteration": 3, "score'
    lines[4] = "[1, 2]"
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n" + '{"iteration": 12')
    diagnosis = examine(run)
    assert diagnosis.notes == ["metrics.jsonl, line 4, 5: not a JSON object, left out."]
    assert "kl_explodes" in diagnosis.judged


def test_a_config_that_is_not_yaml_costs_only_the_settings(run):
    (run / "config.yaml").write_text("a: [1\n")
    [note] = examine(run).notes
    assert note.startswith("config.yaml cannot be read")


def test_numbers_that_are_not_numbers_are_left_out():
    odd = made({"score/mean": [None, "x", True, float("nan"), 1e400] + [0.5] * 7})
    assert [p.iteration for p in odd.series("score/mean")] == list(range(5, 12))


def test_another_schema_is_judged_as_far_as_it_is_known(run):
    records = [{"schema": 99, **r} for r in made({"kl/token_mean": None}).metrics]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    diagnosis = examine(run)
    assert diagnosis.notes == [
        "metrics.jsonl says schema 99, this tether reads 1: what it knows is judged."
    ]
    lack = diagnosis.not_judged["kl_explodes"]
    assert lack == "needs kl/token_mean, which the run does not have"


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a run: there is no config"):
        read_evidence(tmp_path)
    (tmp_path / "recipe.yaml").write_text("stage: rlhf\n")
    with pytest.raises(UserError, match="three stages; name the one of PPO"):
        read_evidence(tmp_path)


def test_a_file_that_is_a_folder_is_named(run):
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").mkdir()
    assert any(note.startswith("events.jsonl cannot be read") for note in examine(run).notes)


# Real runs, tiny


@pytest.mark.parametrize(
    ("rule", "fields", "reward"),
    [
        ("score_never_varies", {}, lambda response: 1.0),
        ("learning_rate_too_low", {"actor__lr": 1e-9}, distinct_letters),
        ("critic_explains_nothing", {}, lambda response: 1000 * distinct_letters(response)),
    ],
)
def test_a_trouble_made_on_purpose_is_named(tiny_config, rule, fields, reward):
    fields = {"train__iterations": 8, "data__heldout": None, **fields}
    config = api.as_config(changed(tiny_config, **fields))
    result = api.train(config, reward)
    assert rule in {finding.rule for finding in examine(result.run).findings}
