"""docs/papers.md has a row per method, and the command of each row starts."""

import re
import shlex
from pathlib import Path

from test_docs_commands import SHORT, configure, folder, typed  # noqa: F401 (fixtures)

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
REFERENCE = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
ROWS = {
    method: (paper, shlex.split(command))
    for method, paper, command in re.findall(
        r"^\| ([^|]+?) \| ([^|]+?) \| `tether ([^`|]+)` \|$", PAGE, re.MULTILINE
    )
}
METHODS = {
    *("PPO-Clip", "PPO-Penalty", "TRPO", "GSPO", "CISPO", "DPPO", "dual clip"),
    "clip-higher (DAPO)",
    *("GAE", "GRPO", "Dr. GRPO", "RLOO", "ReMax", "OPO", "REINFORCE++"),
    *("KL in the reward", "adaptive KL controller", "k1", "k2", "k3"),
    *("on-policy distillation", "context distillation"),
    *("dynamic sampling (DAPO)", "overlong shaping (DAPO)", "truncated rows masked (DAPO)", "GDPO"),
    *("VAPO: two lambdas", "VAPO: lambda by length", "VAPO: value pretraining"),
    *("state masking (Search-R1)", "truncated importance correction"),
}


def options(words: list[str]) -> dict[str, str]:
    return dict(zip(words[2::2], words[3::2], strict=True))


def test_every_method_has_a_row_with_its_paper():
    assert set(ROWS) >= METHODS
    assert len(ROWS) == PAGE.count("| `tether train ")
    for method, (paper, _) in ROWS.items():
        assert re.search(r"\d{4}|the same (paper|note)", paper), method


def test_every_update_and_every_estimator_of_the_config_has_a_row():
    kinds = re.findall(r"^## `actor.update`, `kind: (\w+)`", REFERENCE, re.MULTILINE)
    [listed] = re.findall(r"^\| `advantage.estimator` \| string \| (.*?) \| `gae`", REFERENCE, re.M)
    given = [options(words) for _, words in ROWS.values()]
    assert len(kinds) >= 8
    assert set(kinds) <= {row.get("--actor.update.kind") for row in given}
    assert set(re.findall(r"\w+", listed)) <= {row.get("--advantage.estimator") for row in given}


def test_every_command_makes_a_valid_config_and_trains_one_iteration():
    for method, (_, words) in ROWS.items():
        assert words[0] == "train", method
        assert options(words)["--train.iterations"] == "1", method
        configure(words)


def test_a_row_with_a_group_estimator_and_a_loss_of_its_own_trains(typed):  # noqa: F811
    code, _, err = typed([*ROWS["RLOO"][1], *SHORT, "--run.dir", "out"])
    assert code == 0, err
