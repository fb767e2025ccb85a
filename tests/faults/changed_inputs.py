"""R11: what a run is made from is changed while it is stopped, before its first checkpoint or after
it. Each change is refused by name, and nothing of the run is changed."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

from faults.interruptions import Bench, log_of
from faults.row import Row, tally
from faults.trials import AtCall, Signals
from faults.unreadable_checkpoints import files_of
from faults.world import World, make_world

WHEN = {"before": 2, "after": 4}  # iterations begun; a checkpoint is written after two


def append(text: str) -> Callable[[Path], None]:
    return lambda path: path.write_text(path.read_text() + text)


def flip_a_weight(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def forge_prompts(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["sha256"] = "0" * 64
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def other_learning_rate(path: Path) -> None:
    path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.002", 1))


# What is changed: in which file of the world, or of the run; how; and what the refusal names.
CHANGES = {
    "data": ("train.jsonl", append('{"prompt": "1+1=?", "answer": "2"}\n'), "data.train"),
    "config": ("RUN/config.yaml", other_learning_rate, "lr, 0.001 then"),
    "model": ("model/model.safetensors", flip_a_weight, "model.actor (model.safetensors"),
    "reward": ("reward.py", append("\n# other\n"), "reward.kind (reward.py"),
    "imported module": ("tastes.py", append("\nSCALE = 2\n"), "reward.kind (tastes.py"),
    "chat template": ("model/chat_template.jinja", append("!"), "chat_template.jinja"),
    "prompt ids": ("RUN/prompts.jsonl", forge_prompts, "token ids of the prompts"),
}
REWARD = """
import os, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from tastes import SCALE


def variety(response):
    return SCALE * len(set(response))
"""


def row_r11(world: World, folder: Path, tries: int, seed: int) -> Row:
    """One after the other, in a world of its own: the files are put back after each try."""
    mine = make_world(folder / "world")
    (mine.folder / "reward.py").write_text(REWARD)
    (mine.folder / "tastes.py").write_text("SCALE = 0.125\n")
    template = mine.model / "chat_template.jinja"
    if not template.exists():  # older versions of transformers keep it in tokenizer_config.json
        settings = json.loads((mine.model / "tokenizer_config.json").read_text())
        template.write_text(settings["chat_template"])
    bench = Bench(mine, folder, seed)
    runs = {}
    for when, iteration in WHEN.items():
        kill = AtCall(("tether.train.ppo:run_iteration",), iteration, Signals(signal.SIGKILL))
        runs[when] = folder / when
        assert bench.train(runs[when], sabotage=kill) == -signal.SIGKILL
    assert not (runs["before"] / "checkpoints").exists()
    cases = [(what, when) for what in CHANGES for when in WHEN][:tries]
    verdicts = [_attempt(bench, runs[when], what, when) for what, when in cases]
    fault = "data, config, model, reward, its imports, template or prompt ids changed"
    remark = "half before the first checkpoint, half after it"
    return tally("R11", fault, verdicts, remark)


def _attempt(bench: Bench, run: Path, what: str, when: str) -> str | None:
    name, change, named = CHANGES[what]
    of_run = name.startswith("RUN/")
    path = run / name.removeprefix("RUN/") if of_run else bench.world.folder / name
    kept = path.read_bytes()
    change(path)
    before = files_of(run)
    try:
        code, said = bench.resume(run), log_of(run).read_text()
        after = files_of(run)
    finally:
        path.write_bytes(kept)
    if code != 2 or "not be the same run" not in said or named not in said:
        return f"{what}, {when}: exit code {code}; it said: {said[-200:]}"
    return None if after == before else f"{what}, {when}: the run was changed"
