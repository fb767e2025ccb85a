"""What-if against the files of real runs, bit for bit, and against slow loops at other settings."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from helpers import changed, distinct_letters, read_jsonl, table

import tether
from tether.config import UPDATE_KINDS
from tether.run.columns import WRITTEN
from tether.view.run_reader import Folder
from tether.view.settings import own_settings, samples_per_prompt
from tether.view.whatif import from_log, from_settings, stack_rows
from view.conftest import KINDS, client_of

LOGGED = ("kl", "token_level_scores", "token_level_rewards", "values", "advantages", "returns")


def float32_bits(numbers) -> list[int]:
    return np.asarray(numbers, dtype=np.float32).view(np.int32).tolist()


def file_rows(runs, kind: str, iteration: int = 1) -> dict[int, dict]:
    rows = read_jsonl(runs / kind / "rollouts" / f"{iteration:06d}.jsonl")
    return {row["row"]: row for row in rows}


def what_if(client, kind: str, row: int, iteration: int = 1, **settings) -> dict:
    """What-if with `section__field=value`."""
    path = f"/api/runs/{kind}/rollouts/{iteration}/{row}/whatif"
    answer = client.get(path, params={name.replace("__", "."): x for name, x in settings.items()})
    assert answer.status_code == 200, answer.text
    return answer.json()


def counts(row: dict) -> list[bool]:
    return [cell and row["usable"] for cell in row["response_mask"]]


def test_at_its_own_settings_every_row_equals_the_log_bit_for_bit(runs):
    compared, cells_with_kl, moving_betas = 0, 0, set()
    for kind in KINDS:
        run = Folder(runs).runs()[kind]
        config = run.read_config()[1]
        for iteration in (0, 1):
            rows = run.read_rollout(iteration)
            some = next(iter(rows.by_number.values()))
            own, samples = own_settings(config, some), samples_per_prompt(config)
            tensors = stack_rows(rows, samples)
            again = from_settings(tensors, own).columns
            for number, row in file_rows(runs, kind, iteration).items():
                slot, size = tensors.index_of[number], len(row["response_ids"])
                for name in (*LOGGED, "policy_advantages"):
                    recomputed = again[name][slot, :size].tolist()
                    assert float32_bits(recomputed) == float32_bits(row[name]), (kind, name)
                compared += 1
                cells_with_kl += sum(x != 0 for x in row["kl"])
            moving_betas.add((kind, own.kl.coef))
    assert compared >= 100
    assert cells_with_kl > 200
    assert len([b for k, b in moving_betas if k == "gae"]) == 2  # the controller moved it


@table("kind", KINDS)
def test_the_server_says_the_same_before_and_after_at_the_own_settings(client, runs, kind):
    row = next(iter(file_rows(runs, kind).values()))
    body = what_if(client, kind, row["row"])
    assert body["own"] is True
    assert body["before"] == body["after"]
    assert body["clip_before"] == body["clip_after"]
    assert body["totals"]["before"] == body["totals"]["after"]
    assert float32_bits(body["before"]["advantages"]) == float32_bits(row["advantages"])
    assert body["note"] is None


def mean_objective(client, runs, kind: str, iteration: int = 1) -> float:
    """The mean over rows of a row's mean objective, as the page has it at the run's settings."""
    means = []
    for number, row in file_rows(runs, kind, iteration).items():
        body = what_if(client, kind, number, iteration)
        assert body["own"] is True
        assert body["before"] == body["after"]
        assert all(row["response_mask"])
        means.append(sum(body["after"]["objective"]) / len(body["after"]["objective"]))
    return sum(means) / len(means)


TIGHT = {  # so that the bound binds in runs this short
    "clip": {"eps_low": 0.01, "eps_high": 0.01, "dual_clip": 1.02},
    "penalty": {"coef": 30.0, "target": 1e-4},
    "cispo": {"eps_low": 0.01, "eps_high": 0.01},
    "dppo": {"max_divergence": 1e-3},
}
UPDATES = {kind: {"kind": kind, **TIGHT.get(kind, {})} for kind in UPDATE_KINDS}


@pytest.fixture(scope="module")
def update_runs(tiny_view_config, tmp_path_factory):
    """One run of every kind of update: one epoch of equal minibatches, rows weighed alike.

    So the loss in the metrics is the mean over rows, each as its own minibatch saw it.
    """
    folder = tmp_path_factory.mktemp("updates") / "runs"
    for name, update in UPDATES.items():
        config = changed(
            tiny_view_config,
            run__dir=str(folder / name),
            actor__update=update,
            actor__aggregation="seq_mean_token_mean",
            actor__epochs=1,
        )
        tether.train(config, reward=distinct_letters)
    return folder


@table("kind", UPDATES)
def test_objectives_of_every_kind_of_update_are_the_loss_that_was_minimised(update_runs, kind):
    client = client_of(update_runs)
    metrics = read_jsonl(update_runs / kind / "metrics.jsonl")
    for iteration in (0, 1):
        rows = file_rows(update_runs, kind, iteration).values()
        assert any(row["new_log_probs"] != row["old_log_probs"] for row in rows)
        expected = -metrics[iteration]["actor/pg_loss"]
        found = mean_objective(client, update_runs, kind, iteration)
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    if kind == "penalty":
        first, second = (line["actor/penalty_coef"] for line in metrics)
        assert first != second, "its controller moved it"


@table("kind", UPDATES)
def test_every_field_of_an_update_that_its_loss_reads_can_be_changed(update_runs, kind):
    client = client_of(update_runs)
    controls = what_if(client, kind, 0)["controls"]
    controls = [control for control in controls if control["name"].startswith("actor.update.")]
    beside = {"trpo": 5, "penalty": 3}.get(kind, 0)  # fields of the step or of a controller
    fields = type(own_settings({"actor": {"update": {"kind": kind}}}).update).model_fields
    assert len(controls) == len(fields) - 1 - beside
    for control in controls:
        value = next((x for x in control["options"] or [] if x != control["value"]), 0.003)
        value = 1.003 if control["name"].endswith("dual_clip") else value
        changes = {control["name"].replace(".", "__"): value}
        bodies = [what_if(client, kind, row, **changes) for row in file_rows(update_runs, kind)]
        assert any(body["before"] != body["after"] for body in bodies), control["name"]


def test_the_exact_kl_of_a_penalty_is_said_to_be_missing(update_runs, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(update_runs / "penalty", folder / "penalty")
    config = (folder / "penalty" / "config.yaml").read_text()
    assert "estimator: k3\n    controller" in config
    (folder / "penalty" / "config.yaml").write_text(
        config.replace("estimator: k3\n    controller", "estimator: full\n    controller")
    )
    assert "which the file does not hold" in what_if(client_of(folder), "penalty", 0)["note"]


def test_an_update_of_another_version_has_no_objective_and_the_rest(update_runs, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(update_runs / "gspo", folder / "gspo")
    config = (folder / "gspo" / "config.yaml").read_text()
    (folder / "gspo" / "config.yaml").write_text(config.replace("kind: gspo", "kind: spsa"))
    body = what_if(client_of(folder), "gspo", 0, advantage__gamma=0.5)
    assert body["after"]["objective"] is None
    assert body["after"]["advantages"] != body["before"]["advantages"]
    assert "does not know the run's kind of update" in body["note"]


def test_objectives_are_multiplied_by_the_correction_weights(client, runs):
    """One epoch of equal minibatches, rows weighed alike: the log has the mean objective."""
    weights = [
        w for row in file_rows(runs, "corrected").values() for w in row["correction_weights"]
    ]
    assert min(weights) < 0.9
    assert max(weights) == pytest.approx(1.25)
    metrics = read_jsonl(runs / "corrected" / "metrics.jsonl")
    for iteration in (0, 1):
        expected = -metrics[iteration]["actor/pg_loss"]
        assert mean_objective(client, runs, "corrected", iteration) == pytest.approx(
            expected, abs=1e-5
        )


def test_the_page_shows_correction_weights_as_the_file_has_them(client, runs):
    for number, row in file_rows(runs, "corrected").items():
        columns = client.get(f"/api/runs/corrected/rollouts/1/{number}").json()["columns"]
        assert columns["correction_weights"] == row["correction_weights"]
    columns = client.get("/api/runs/gae/rollouts/1/0").json()["columns"]
    assert columns["correction_weights"] is None
    described = client.get("/api/runs/corrected").json()["columns"]
    assert {"en", "zh"} == described["correction_weights"].keys()


def without_column(runs, folder, kind: str, name: str):
    """A client of a copy of a run whose rows lack a column."""
    shutil.copytree(runs / kind, folder / kind)
    for path in (folder / kind / "rollouts").iterdir():
        rows = read_jsonl(path)
        lines = [json.dumps({k: v for k, v in row.items() if k != name}) for row in rows]
        path.write_text("\n".join(lines) + "\n")
    return client_of(folder)


@table("name", [c.name for c in WRITTEN])
def test_a_row_without_a_column_has_what_if_unless_it_needs_that_column(runs, tmp_path, name):
    client = without_column(runs, tmp_path / name, "corrected", name)
    body = what_if(client, "corrected", next(iter(file_rows(runs, "corrected"))))
    if name in ("rollout_log_probs", "correction_weights"):
        assert body["note"] is None
        assert None not in body["after"]["objective"]
    else:
        assert "lacks columns" in body["note"]
        assert body["after"]["objective"] is None


def test_the_runs_hold_what_the_comparison_is_about(runs):
    """Whitened and bare, truncated and ended, unusable rows, lengths that differ, partial files."""
    bare = file_rows(runs, "gae-bare").values()
    assert any(row["final_value"] != 0 for row in bare)
    assert all(row["policy_advantages"] == row["advantages"] for row in bare)
    gae = file_rows(runs, "gae").values()
    assert any(row["policy_advantages"] != row["advantages"] for row in gae)
    assert any(not row["usable"] for i in (0, 1) for row in file_rows(runs, "opo", i).values())
    assert any(row["greedy_score"] != 0 for row in file_rows(runs, "remax").values())
    assert len(file_rows(runs, "grpo")) == 6
    assert len({len(row["response_ids"]) for row in gae}) > 1


def test_beta_changes_a_reward_by_its_change_times_the_kl(client, runs):
    for row in file_rows(runs, "gae").values():
        body = what_if(client, "gae", row["row"], kl__in_reward__coef=row["beta"] + 0.7)
        for t, kl in enumerate(row["kl"]):
            change = body["after"]["token_level_rewards"][t] - row["token_level_rewards"][t]
            assert change == pytest.approx(-0.7 * kl, abs=2e-6)
        assert body["own"] is False


def slow_gae(rewards, values, final, mask, gamma, lam):
    """Column by column from the definition: a sum over all later one-step errors."""
    cells = [t for t, counts_here in enumerate(mask) if counts_here]
    errors = {}
    for i, t in enumerate(cells):
        following = values[cells[i + 1]] if i + 1 < len(cells) else final
        errors[t] = rewards[t] + gamma * following - values[t]
    advantages = [0.0] * len(rewards)
    for i, t in enumerate(cells):
        advantages[t] = sum((gamma * lam) ** j * errors[u] for j, u in enumerate(cells[i:]))
    return advantages, [errors.get(t, 0.0) for t in range(len(rewards))]


@table("kind", ["gae", "gae-bare"])
def test_gamma_and_lambda_give_what_a_slow_loop_gives(client, runs, kind):
    rows = file_rows(runs, kind)
    for number, row in rows.items():
        body = what_if(client, kind, number, advantage__gamma=0.8, advantage__lam=0.5)
        expected, errors = slow_gae(
            row["token_level_rewards"], row["values"], row["final_value"], counts(row), 0.8, 0.5
        )
        assert body["after"]["advantages"] == pytest.approx(expected, abs=1e-5)
        assert body["after"]["deltas"] == pytest.approx(errors, abs=1e-5)
        returns = [a + v for a, v in zip(expected, row["values"], strict=True)]
        assert body["after"]["returns"] == pytest.approx(returns, abs=1e-5)


def test_deltas_of_the_log_follow_from_its_rewards_and_values(client, runs):
    for number, row in file_rows(runs, "gae-bare").items():
        body = client.get(f"/api/runs/gae-bare/rollouts/1/{number}").json()
        _, errors = slow_gae(
            row["token_level_rewards"], row["values"], row["final_value"], counts(row), 1.0, 0.8
        )
        assert body["columns"]["deltas"] == pytest.approx(errors, abs=1e-5)


SLOW_KL = {
    "k1": lambda q: q,
    "abs": abs,
    "k2": lambda q: q * q / 2,
    "k3": lambda q: math.exp(-q) - 1 + q,
}


@table("name", SLOW_KL)
def test_another_kl_estimator_gives_its_own_formula(client, runs, name):
    for number, row in list(file_rows(runs, "gae").items())[:4]:
        body = what_if(client, "gae", number, kl__in_reward__estimator=name)
        expected = [
            SLOW_KL[name](old - ref)
            for old, ref in zip(row["old_log_probs"], row["ref_log_probs"], strict=True)
        ]
        assert body["after"]["kl"] == pytest.approx(expected, abs=1e-6)


def slow_clip(ratio, advantage, low, high, dual):
    """(objective, mark) of one token, by cases."""
    if advantage > 0 and ratio > 1 + high:
        return advantage * (1 + high), "high"
    if advantage < 0 and ratio < 1 - low:
        return advantage * (1 - low), "low"
    if dual is not None and advantage < 0 and ratio > dual:
        return advantage * dual, "dual"
    return advantage * ratio, ""


@table(("low", "high", "dual"), [(0.05, 0.08, 1.05), (0.2, 0.3, None), (0.01, 0.01, 1.02)])
def test_clips_and_objectives_are_those_of_the_cases(client, runs, low, high, dual):
    marks = set()
    for number, row in file_rows(runs, "gae").items():
        body = what_if(
            client,
            "gae",
            number,
            actor__update__eps_low=low,
            actor__update__eps_high=high,
            actor__update__dual_clip=dual or "none",
        )
        ratios = [
            math.exp(new - old)
            for new, old in zip(row["new_log_probs"], row["old_log_probs"], strict=True)
        ]
        cases = [
            slow_clip(r, a, low, high, dual)
            for r, a in zip(ratios, row["policy_advantages"], strict=True)
        ]
        assert body["after"]["ratio"] == pytest.approx(ratios, rel=1e-5)
        assert body["after"]["objective"] == pytest.approx([o for o, _ in cases], abs=1e-5)
        assert body["clip_after"] == [mark for _, mark in cases]
        assert body["totals"]["after"]["clipped"] == sum(mark != "" for _, mark in cases)
        assert body["totals"]["after"]["objective"] == pytest.approx(
            sum(o for o, _ in cases), abs=1e-4
        )
        marks |= {mark for _, mark in cases}
    assert marks >= {"", "high", "low"}
    assert ("dual" in marks) is (dual is not None)


def group_of(rows: dict[int, dict], number: int, samples: int = 3) -> list[dict]:
    first = number // samples * samples
    return [rows[first + i] for i in range(samples)]


def test_another_estimator_compares_a_row_with_its_group(client, runs):
    rows = file_rows(runs, "gae")
    for number, row in rows.items():
        body = what_if(client, "gae", number, advantage__estimator="rloo")
        group = group_of(rows, number)
        sums = [sum(r["token_level_rewards"]) for r in group]
        own = sum(row["token_level_rewards"])
        expected = own - (sum(sums) - own) / 2
        if len({r["score"] for r in group}) == 1:
            expected = 0.0
        assert body["after"]["advantages"] == pytest.approx([expected] * len(row["kl"]), abs=1e-5)
        assert body["after"]["returns"] == body["after"]["advantages"]  # no critic, no values
        assert body["after"]["policy_advantages"] == body["after"]["advantages"]


def test_whitening_moves_with_the_moments_of_the_logged_rows(client, runs):
    """With all rows in the file they are the true ones: numpy over every token says so."""
    rows = file_rows(runs, "gae")
    cells = []
    for row in rows.values():
        advantages, _ = slow_gae(
            row["token_level_rewards"], row["values"], row["final_value"], counts(row), 0.8, 0.5
        )
        cells += [a for a, c in zip(advantages, counts(row), strict=True) if c]
    mean, variance = np.mean(cells), np.var(cells, ddof=1)
    number, row = next(iter(rows.items()))
    body = what_if(client, "gae", number, advantage__gamma=0.8, advantage__lam=0.5)
    expected = [(a - mean) / math.sqrt(variance + 1e-8) for a in body["after"]["advantages"]]
    assert body["after"]["policy_advantages"] == pytest.approx(expected, abs=1e-4)
    assert f"{len(rows)} rows are in the file" in body["note"]
    assert "critic's values stay" in body["note"]


def test_a_missing_row_of_a_group_is_said(client, runs, tmp_path):
    shutil.copytree(runs / "grpo", tmp_path / "runs" / "grpo")
    path = tmp_path / "runs" / "grpo" / "rollouts" / "000001.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[1:]))
    number = int(read_jsonl(path)[0]["row"])
    body = what_if(client_of(tmp_path / "runs"), "grpo", number)
    assert "missing" in body["note"]


@table(
    ("query", "names"),
    [
        ("kl.in_reward.coef=-1", "kl.in_reward.coef"),
        ("kl.in_reward.coef=nan", "kl.in_reward.coef"),
        ("kl.in_reward.coef=inf", "kl.in_reward.coef"),
        ("kl.in_reward.coef=", "kl.in_reward.coef"),
        ("advantage.gamma=1.5", "advantage.gamma"),
        ("advantage.lam=x", "advantage.lam"),
        ("actor.update.eps_low=0", "actor.update.eps_low"),
        ("actor.update.eps_low=1.1", "actor.update.eps_low"),
        ("actor.update.eps_low=none", "actor.update.eps_low"),
        ("actor.update.eps_high=-2", "actor.update.eps_high"),
        ("actor.update.dual_clip=1", "actor.update.dual_clip"),
        ("actor.update.kind=gspo", "actor.update.kind"),
        ("advantage.estimator=sarsa", "advantage.estimator"),
        ("advantage.estimator=remax", "advantage.estimator"),  # no greedy responses in a gae run
        ("kl.in_reward.estimator=full", "kl.in_reward.estimator"),
        ("actor.lr=1", "actor.lr"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(client, runs, query, names):
    answer = client.get(f"/api/runs/gae/rollouts/1/0/whatif?{query}")
    assert answer.status_code == 400
    assert names in answer.json()["error"]


def test_a_run_without_critic_offers_no_gae(client):
    controls = what_if(client, "remax", 0)["controls"]
    [offered] = [c["options"] for c in controls if c["name"] == "advantage.estimator"]
    assert "gae" not in offered
    assert "remax" in offered


def test_a_run_by_an_estimator_of_another_version_is_shown_and_not_recomputed(runs, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(runs / "grpo", folder / "grpo")
    config = (folder / "grpo" / "config.yaml").read_text()
    (folder / "grpo" / "config.yaml").write_text(
        config.replace("estimator: grpo", "estimator: sarsa")
    )
    client = client_of(folder)
    number = next(iter(file_rows(runs, "grpo")))
    assert client.get(f"/api/runs/grpo/rollouts/1/{number}").status_code == 200
    refused = client.get(f"/api/runs/grpo/rollouts/1/{number}/whatif")
    assert refused.status_code == 400
    assert "sarsa" in refused.json()["error"]
    assert what_if(client, "grpo", number, advantage__estimator="rloo")["own"] is False


def test_the_logged_journey_of_a_row_holds_the_files_numbers(client, runs):
    for number, row in file_rows(runs, "gae").items():
        body = client.get(f"/api/runs/gae/rollouts/1/{number}").json()
        for name in ("rollout_log_probs", "old_log_probs", "new_log_probs", *LOGGED):
            assert float32_bits(body["columns"][name]) == float32_bits(row[name])
        assert body["tokens"] == row["response_tokens"]
        assert body["ids"] == row["response_ids"]
        assert body["mask"] == row["response_mask"]
        assert body["row"]["beta"] == row["beta"]
        assert body["row"]["whitening"] == row["whitening"]


def test_what_if_runs_on_one_thread(client, runs):
    what_if(client, "gae", 0)
    assert torch.get_num_threads() == 1


def test_from_log_keeps_logged_columns_as_they_are(runs):
    run = Folder(runs).runs()["gae"]
    config = run.read_config()[1]
    tensors = stack_rows(run.read_rollout(1), 3)
    stages = from_log(tensors, own_settings(config))
    assert stages.columns["advantages"] is tensors.columns["advantages"]


@table("field", ["actor.update.eps_high", "kl.in_reward.coef", "actor.update.dual_clip"])
def test_a_setting_beyond_float32_is_refused_and_not_a_fault(client, field):
    answer = client.get(f"/api/runs/gae/rollouts/1/0/whatif?{field}=1e39")
    assert answer.status_code == 400
    assert "at most 1e+30" in answer.json()["error"]


def test_a_config_beyond_float32_is_shown_as_far_as_it_goes(runs, tmp_path):
    folder = tmp_path / "runs"
    shutil.copytree(runs / "gae", folder / "gae")
    config = (folder / "gae" / "config.yaml").read_text()
    (folder / "gae" / "config.yaml").write_text(
        config.replace("eps_high: 0.08", "eps_high: 1.0e+39")
    )
    assert client_of(folder).get("/api/runs/gae/rollouts/1/0").status_code == 200
