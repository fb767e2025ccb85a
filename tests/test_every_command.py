"""Every command line of README and docs is run by a test, or says why it is not run here.

A line is marked on its page, by `<!-- not run here: why -->` above its block, or below, by its
first words, where another test runs the same. The others are run here, page by page, cut short: in
`make test` those that take no time, in `make test-long` all of them.
"""

import json
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tether as package
from tether.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *("README.md", "README.zh-CN.md", "CONTRIBUTING.md"),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
]
BLOCK = re.compile(r"((?:^ *<!-- .*? -->\n)?)^( *)```(\w*)\n(.*?)^\2```", re.DOTALL | re.MULTILINE)
COMMANDS = {command.name for command in app.registered_commands}

# By how a line begins: which test runs it, or why none does. Longer beginnings come first.
ELSEWHERE = {
    "make ": "targets are checked to exist; most of them are what CI runs",
    "python3 -m venv": "tests/test_wheel.py makes an environment",
    ". .venv/bin/activate": "changes a shell",
    "pip install": "tests/test_wheel.py installs the wheel",
    "torchrun ": "tests/dist/test_runs.py",
    "tether train arithmetic --launch.kind ray": "tests/dist/test_ray.py, or a cluster",
    "tether train mine.yaml --launch.kind ray": "needs a cluster",
    "tether train arithmetic --rollout.sampler vllm": "tests/rollout/test_vllm.py, make vllm",
    "tether eval out/model --recipe arithmetic --endpoint": "tests/cli/test_eval_endpoint.py",
    "vllm serve": "needs vLLM",
    "tether fetch smollm2": "needs the network",
    "tether train sentiment": "needs its weights; tests/tasks/test_real_models.py",
    "tether probe models/": "needs those weights",
    "tether generate 'We checked in": "needs those weights",
    "tether export runs/sentiment-001": "needs those weights",
    "tether train rlhf": "tests/stages/test_rlhf.py",
    "tether resume runs/rlhf-001": "tests/stages/test_rlhf.py",
    "tether train recipe.yaml --data.train nq_search": "tests/data/test_search_r1_rows.py",
    "tether serve-retriever": "a server: tests/cli/test_serve_retriever.py",
    "tether train --run.trackers": "tests/run: trackers",
    "tensorboard ": "a server of another project",
    "python -m tether.run.tracking.process": "tests/run: trackers",
    "cmp ": "tests/golden compares such files",
}
QUICK = ("kl", "examples", "init", "recipes", "runs")  # take no time
SHORT = {
    "--threads": "1",
    "--rollout.prompts": "4",
    "--rollout.samples_per_prompt": "2",
    "--actor.minibatch_rows": "8",
    "--train.iterations": "1",
    "--train.eval_prompts": "4",
}
STAGE_SHORT = {"--threads": "1", "--train.minibatch_rows": "2", "--train.passes": "1"}
NAMES = {"path/to/model": "tether:starter", "MODEL": "tether:starter", "RUN": "runs/mine-001"}
NAMES["QUESTION"] = json.loads(
    (ROOT / "src/tether/assets/arithmetic/train.jsonl").read_text("utf-8").splitlines()[0]
)["prompt"]  # one of that run's data


@dataclass(frozen=True)
class Line:
    page: str
    text: str
    marked: bool  # on the page
    answer: str  # the line below it

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def elsewhere(self) -> str | None:
        begins = sorted(ELSEWHERE, key=len, reverse=True)
        return next((ELSEWHERE[b] for b in begins if self.text.startswith(b)), None)

    @property
    def refusal(self) -> str | None:
        said = self.answer.removeprefix("tether: ")
        return said if said != self.answer else None


def lines_of(page: str) -> list[Line]:
    """Return what a person types on a page, the words of one command on one line."""
    found = []
    for comment, indent, language, body in BLOCK.findall((ROOT / page).read_text("utf-8")):
        text = re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)
        lines = re.sub(r"\\\n\s*", "", text).splitlines()
        for line, following in zip(lines, [*lines[1:], ""], strict=True):
            typed = line.removeprefix("$ ") if language == "console" else line
            is_command = line.startswith("$ ") if language == "console" else language == "sh"
            if is_command and typed.strip() and not typed.startswith("#"):
                typed = re.sub(r"^.*\| (?=tether)", "", typed)
                found.append(Line(page, typed, "not run here:" in comment, following))
    return found


LINES = [line for page in PAGES for line in lines_of(page)]
RUN = [line for line in LINES if not line.marked and line.elsewhere is None]


def test_every_line_is_a_command_that_is_run_or_says_why_not():
    assert len(LINES) > 150
    unknown = [
        (line.page, line.text)
        for line in RUN
        if line.words[0] != "tether" or line.words[1] not in COMMANDS
    ]
    assert unknown == []


def test_every_make_target_on_a_page_exists():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [line for line in LINES if line.text.startswith("make ")]
    assert named
    for line in named:
        words = [word for word in line.words[1:] if "=" not in word]
        assert set(words) <= targets, line


def test_no_block_hides_commands_from_this_test():
    """A block without a language is not read, so it holds no command."""
    for page in PAGES:
        for _, _, language, body in BLOCK.findall((ROOT / page).read_text("utf-8")):
            assert language or not re.search(r"^(?:\$ )?tether \w", body, re.MULTILINE), page


def write_rows(path: str, made: list[dict]) -> None:
    if path.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(made), path)
    elif path.endswith(".csv"):
        names = list(made[0])
        table = [names, *([str(row[name]) for name in names] for row in made)]
        Path(path).write_text("".join(",".join(cells) + "\n" for cells in table))
    else:
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in made))


def blocks(page: str, language: str) -> list[str]:
    return [
        b for _, _, kind, b in BLOCK.findall((ROOT / page).read_text("utf-8")) if kind == language
    ]


def write_files() -> None:
    """The files that the pages show or speak of, in the current folder."""
    sums = [{"prompt": f"{a}+3=?", "answer": str(a + 3)} for a in range(10, 40)]
    talked = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in sums]
    write_rows("train.jsonl", talked)  # as TRL has them
    for name in ("test.jsonl", "my_prompts.jsonl", "test.csv"):
        write_rows(name, sums)
    graded = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "answer": row["answer"],
        }
        for row in sums
    ]
    for name in ("gsm8k.parquet", "train.parquet", "test.parquet"):
        write_rows(name, graded)
    talk = [{"prompt": row["prompt"], "response": row["answer"]} for row in sums[:6]]
    for name in ("talk.jsonl", "talk-heldout.jsonl"):
        write_rows(name, talk)
    judged = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": "no"} for r in sums[:6]]
    for name in ("pairs-heldout.jsonl", "more.jsonl"):
        write_rows(name, judged)
    write_rows("pairs.jsonl", [{**a, **b} for a, b in zip(judged, talk, strict=True)])
    Path("rewards.py").write_text(blocks("docs/from-trl.md", "python")[-1])
    Path("score.py").write_text(blocks("docs/from-verl.md", "python")[-1])
    [own] = [block for block in blocks("README.md", "python") if "# my_reward.py" in block]
    close = next(block for block in blocks("docs/running.md", "python") if "close_enough" in block)
    Path("my_reward.py").write_text(own + close)
    for name in ("mine.yaml", "recipe.yaml", "my-recipe.yaml"):
        Path(name).write_text(blocks("docs/running.md", "yaml")[0])
    write_rows(
        "prompts.jsonl",
        [json.loads(line) for line in blocks("docs/running.md", "json")[0].splitlines()],
    )
    Path("docs").symlink_to(ROOT / "docs")


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Runs a command in this process, in a folder with those files: (exit code, stderr)."""
    monkeypatch.chdir(tmp_path)
    write_files()

    def run(words: list[str]) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["tether", *words])
        with pytest.raises(SystemExit) as stop:
            package.cli.main.main()
        return stop.value.code or 0, capsys.readouterr().err

    return run


def shortened(words: list[str]) -> list[str]:
    """Return the words with names that exist here, and fields that make it quick."""
    command, *rest = [NAMES.get(word, word) for word in words]
    if command == "view":
        own = "-".join(["shown", *rest]).replace("/", "-")
        return [command, *rest, *([] if "--export" in rest else ["--export", own])]
    quick = {"train": SHORT, "eval": {"--train.eval_prompts": "4"}, "sft": STAGE_SHORT}
    fields = quick.get(command, STAGE_SHORT if command == "reward-model" else {})
    kept, left = [], iter(rest)
    for word in left:
        if word in fields:
            next(left, None)  # its value
        elif word.partition("=")[0] not in fields:
            kept.append(word)
    return [command, *kept, *[part for pair in fields.items() for part in pair]]


@pytest.mark.parametrize("page", sorted({line.page for line in RUN if line.words[1] in QUICK}))
def test_what_takes_no_time_is_run_as_it_stands(page, typed):
    for line in {line.text: line for line in RUN if line.page == page}.values():
        if line.words[1] in QUICK and ">" not in line.words:
            code, err = typed(line.words[1:])
            assert code == 0, (line, err)


@pytest.fixture(scope="module")
def made_runs(tmp_path_factory) -> Path:
    """The runs that pages speak of: of PPO, of SFT and of a reward model, as short as they go."""
    folder = tmp_path_factory.mktemp("runs")
    short = {name.removeprefix("--"): value for name, value in SHORT.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_files()
        config = package.load_config(
            "arithmetic", {**short, "run.dir": "ppo", "train.iterations": 2}
        )
        package.train(config, quiet=True)
        stage = {"threads": 1, "train": {"minibatch_rows": 2, "passes": 1}}
        data = {"train": "talk.jsonl"}
        package.sft(
            {**stage, "run": {"dir": "sft"}, "model": {"start": "tether:starter"}, "data": data}
        )
        data = {"train": "pairs.jsonl", "heldout": "more.jsonl"}
        package.reward_model(
            {**stage, "run": {"dir": "rm"}, "model": {"start": "sft"}, "data": data}
        )
    return folder


def place_runs(made: Path, words: list[str]) -> None:
    """Put the short runs where the words name some that are not there."""
    named = words[:2] if words[0] == "export" else words  # not where it is exported to
    for word in [word.removeprefix("model:") for word in named]:
        name = Path(*Path(word).parts[:2])
        if word.startswith(("runs/", "out/")) and not name.exists():
            kind = "sft" if "sft" in name.name else "rm" if name.name.startswith("r") else "ppo"
            shutil.copytree(made / kind, name)


@pytest.mark.long
@pytest.mark.parametrize("page", sorted({line.page for line in RUN}))
def test_every_command_of_a_page_runs(page, typed, made_runs, monkeypatch):
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115
    place_runs(made_runs, ["view", "runs/arithmetic-001"])  # a reader has trained by now
    texts = {line.text: line for line in RUN if line.page == page}
    for number, line in enumerate(texts.values()):
        command = line.words[1]
        if command in QUICK:
            if command != "init" or not Path(line.words[2]).exists():
                assert typed(line.words[1:])[0] == 0, line
            continue
        if line.refusal is not None:
            assert typed(line.words[1:]) == (2, f"tether: {line.refusal}\n"), line
            continue
        words = shortened(line.words[1:])
        place_runs(made_runs, words)
        if command in ("train", "sft", "reward-model"):
            words = own_directory(words, f"out/{number}")
        code, err = typed(words)
        found = {0, 1} if command == "doctor" else {0}  # 1: it found something in so short a run
        assert code in found, (line, words, err)


def own_directory(words: list[str], directory: str) -> list[str]:
    """Return the words with a run directory of the test's own, so that no name is taken."""
    kept, left = [], iter(words)
    for word in left:
        if word in ("--run.dir", "--run.name"):
            next(left, None)
        else:
            kept.append(word)
    return [*kept, "--run.dir", directory]
