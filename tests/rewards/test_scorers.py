"""Trap 17: a reward that raises, hangs, dies or returns rubbish never becomes a silent 0."""

import threading
import time

import pytest
from helpers import table

from tether.errors import UserError
from tether.rewards.functions import RewardPart
from tether.rewards.scorers import InProcessScorer, Verdict
from tether.rewards.workers import ChildScorer

FUNCTIONS = """
import ctypes, math, os, sys, time

def _raise(): raise RuntimeError("no idea")
def _hang(): time.sleep(60)
def _print():
    while True: print("x" * 1000)
def _noise():
    os.write(1, b"x" * 10**6); sys.stdout.write("\\n" * 10**5); sys.stderr.write("y" * 10**6)
    return 2.0

DEEDS = {
    "raise": _raise,
    "none": lambda: None,
    "nan": lambda: math.nan,
    "inf": lambda: -math.inf,
    "string": lambda: "1.0",
    "hang": _hang,
    "prints": _print,
    "_exit": lambda: os._exit(0),
    "exit": lambda: sys.exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "noise": _noise,
}

def reward(response, number):
    return DEEDS[response]() if response in DEEDS else number
"""

PROBLEMS = {
    "raise": "RuntimeError: no idea",
    "none": "returned None",
    "nan": "returned nan",
    "inf": "returned -inf",
    "string": "returned str",
    "hang": "took longer than 0.5 s",
    "prints": "took longer than 0.5 s",
    "_exit": "ended with code 0",
    "exit": "ended with code 3",
    "segfault": "ended with code -11",
}


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "deeds.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def child(reward_file):
    scorer = ChildScorer([RewardPart(f"{reward_file}:reward")], timeout_seconds=0.5)
    yield scorer
    scorer.close()


def rows(*deeds: str) -> list[dict]:
    return [{"response": deed, "number": i + 0.5} for i, deed in enumerate(deeds)]


@pytest.mark.parametrize("deed", PROBLEMS)
def test_the_child_names_the_row_that_failed_and_scores_the_others(child, deed):
    first, failed, *others = child.score(rows("fine", deed, "fine", "好"))
    assert first == Verdict(0.5)
    assert failed.score is None
    assert PROBLEMS[deed] in failed.problem
    assert others == [Verdict(2.5), Verdict(3.5)]


@table("deed", ["raise", "none", "nan", "inf", "string"])
def test_in_process_the_row_that_failed_is_named_and_the_others_scored(reward_file, deed):
    scope: dict = {}
    exec(reward_file.read_text(), scope)
    first, failed, last = InProcessScorer(scope["reward"]).score(rows("fine", deed, "fine"))
    assert (first, last) == (Verdict(0.5), Verdict(2.5))
    assert failed.score is None
    assert PROBLEMS[deed] in failed.problem


def test_failures_of_every_kind_in_one_batch_are_each_named(child):
    deeds = ["_exit", "nan", "fine", "segfault", "hang", "fine", "none"]
    verdicts = child.score(rows(*deeds))
    assert [v.score for v in verdicts] == [None, None, 2.5, None, None, 5.5, None]
    for deed, verdict in zip(deeds, verdicts, strict=True):
        assert (PROBLEMS[deed] in verdict.problem) if deed in PROBLEMS else verdict.problem is None


def test_megabytes_of_prints_do_not_reach_the_scores(child, capfd):
    assert child.score(rows("noise", "fine")) == [Verdict(2.0), Verdict(1.5)]
    assert capfd.readouterr() == ("", "")


def test_one_child_serves_many_batches(child):
    child.score(rows("fine"))
    process = child.workers[0].child.process.pid
    assert child.score(rows("fine", "raise", "fine"))[2] == Verdict(2.5)
    assert child.workers[0].child.process.pid == process


def test_more_rows_than_a_pipe_holds_are_all_scored(child):
    verdicts = child.score(rows(*(f"{i}" * 50 for i in range(4000))))
    assert [v.score for v in verdicts] == [i + 0.5 for i in range(4000)]


def test_a_time_limit_is_a_rows_own_and_not_the_batchs(tmp_path):
    (tmp_path / "slow.py").write_text("import time\ndef f(): time.sleep(0.15); return 1\n")
    scorer = ChildScorer([RewardPart(f"{tmp_path}/slow.py:f")], timeout_seconds=0.5)
    assert scorer.score([{}] * 5) == [Verdict(1.0)] * 5
    scorer.close()


def test_a_row_that_is_half_a_character_spoils_no_other_row(child):
    """Data rows may hold lone surrogates, which UTF-8 cannot write."""
    assert child.score(rows("fine", "\ud800", "fine"))[0::2] == [Verdict(0.5), Verdict(2.5)]


def test_a_hung_child_and_what_it_forked_are_gone_after_its_row(tmp_path):
    (tmp_path / "forks.py").write_text(
        "import os, pathlib, time\n"
        "def f(path):\n"
        "    pid = os.fork()\n"
        "    if pid: pathlib.Path(path).write_text(str(pid))\n"
        "    time.sleep(60)\n"
    )
    scorer = ChildScorer([RewardPart(f"{tmp_path}/forks.py:f")], timeout_seconds=0.3)
    [verdict] = scorer.score([{"path": str(tmp_path / "pid")}])
    assert "took longer" in verdict.problem
    grandchild = (tmp_path / "pid").read_text()
    deadline = time.monotonic() + 5
    while _runs(grandchild) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(grandchild)


def _runs(pid: str) -> bool:
    """A zombie that nobody has reaped yet no longer runs."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_reward_that_cannot_be_loaded_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="not a file"):
        ChildScorer([RewardPart(f"{tmp_path}/nowhere.py:f")], 1.0).score([{}])


def test_a_copy_that_the_reward_forks_answers_for_no_row(tmp_path):
    """Both copies come back from the call; the second one's score would land on the next row."""
    (tmp_path / "twice.py").write_text(
        "import os\ndef f(number):\n    return number if number != 1 or os.fork() else 9.0\n"
    )
    scorer = ChildScorer([RewardPart(f"{tmp_path}/twice.py:f")], timeout_seconds=5.0)
    for _ in range(3):
        verdicts = scorer.score([{"number": n} for n in range(4)])
        assert [v.score for v in verdicts] == [0.0, 1.0, 2.0, 3.0]
        time.sleep(0.1)  # time for a copy to speak out of turn
    scorer.close()


def test_a_problem_is_told_on_one_line_of_readable_length(tmp_path):
    (tmp_path / "long.py").write_text("def f(): raise ValueError('no\\nway ' * 10**6)\n")
    scorer = ChildScorer([RewardPart(f"{tmp_path}/long.py:f")], timeout_seconds=5.0)
    [verdict] = scorer.score([{}])
    scorer.close()
    assert verdict.problem.startswith("ValueError: no way no way")
    assert len(verdict.problem) < 1000
    assert "\n" not in verdict.problem


LEAVES = """
import os, subprocess, sys, time

def helper():  # a program that holds what it inherits, in a session of its own
    code = "import time; time.sleep(8)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True, close_fds=False)

def copy():  # a fork of this very process, pipes and all, in a session of its own
    if os.fork() == 0:
        os.setsid()
        time.sleep(8)
        os._exit(0)

def reward(response, deed):
    if deed == "hang":
        time.sleep(60)
    if deed == "die":
        os._exit(7)
    if deed in ("helper", "copy"):
        globals()[deed]()
    return 1.0
"""


def in_time(seconds: float, work):
    """What `work` returns; a hang is a failed test and not a stuck one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, f"not done after {seconds:g} s"
    return found[0]


@pytest.mark.parametrize("left", ["helper", "copy"])
@pytest.mark.parametrize("end", ["hang", "die"])
def test_what_a_reward_leaves_behind_holds_no_pipe_up(tmp_path, left, end):
    """More than a pipe holds is still unsent when the child has to go."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    deeds = [left, end, *["fine"] * 60]
    rows = [{"response": "x" * 4000, "deed": deed} for deed in deeds]
    scorer = ChildScorer([RewardPart(f"{tmp_path}/leaves.py:reward")], timeout_seconds=0.5)
    began = time.monotonic()
    verdicts = in_time(6, lambda: scorer.score(rows))
    in_time(2, lambda: scorer.close() or True)
    assert time.monotonic() - began < 6
    wrong = {"hang": "took longer than 0.5 s", "die": "ended with code 7"}[end]
    assert wrong in verdicts[1].problem
    assert [v.score for v in verdicts] == [1.0, None] + [1.0] * 60


JUNK = """
import os, sys
def reward(junk):
    if junk:
        os.write(int(sys.argv[-1]), eval(junk))  # where its process writes the scores
    return 1.0
"""


@pytest.mark.parametrize(
    "junk", [b"\n", b"hello\n", b"[1]\n", b'{"score": 9.0}\n', b"\xff\xfe", b"x" * (2 << 20)]
)
def test_junk_among_the_scores_costs_its_row_and_no_other(tmp_path, junk):
    (tmp_path / "junk.py").write_text(JUNK)
    rows = [{"junk": text} for text in ("", repr(junk), "", "")]
    scorer = ChildScorer([RewardPart(f"{tmp_path}/junk.py:reward")], timeout_seconds=5.0)
    verdicts = in_time(20, lambda: scorer.score(rows))
    scorer.close()
    assert [v.score for v in verdicts] == [1.0, None, 1.0, 1.0]
    assert "wrote into the pipe" in verdicts[1].problem


def test_arguments_of_any_size_reach_the_reward_and_no_command_line(tmp_path):
    (tmp_path / "large.py").write_text(
        "def f(table): return len(table) + ('secret' in open('/proc/self/cmdline').read())\n"
    )
    table = {f"{i}": "secret" for i in range(20_000)}  # beyond what a command line holds
    scorer = ChildScorer([RewardPart(f"{tmp_path}/large.py:f", {"table": table})], 5.0)
    assert [v.score for v in in_time(20, lambda: scorer.score([{}]))] == [20_000.0]
    scorer.close()


def test_a_slow_import_is_told_its_own_limit(tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(30)\ndef f(): return 1\n")
    scorer = ChildScorer([RewardPart(f"{tmp_path}/slow.py:f")], 10.0, import_seconds=0.5)
    with pytest.raises(UserError, match=r"longer to import than reward.import_timeout_seconds"):
        scorer.score([{}])


def test_what_a_reward_raises_is_told_with_file_and_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import json\n\ndef f(response):\n    return g(response)\n\ndef g(text):\n"
        "    return json.loads(text)['score']\n"
    )
    scorer = ChildScorer([RewardPart(f"{tmp_path}/mine.py:f")], 5.0)
    own, library = scorer.score([{"response": "[]"}, {"response": "{"}])
    scorer.close()
    assert own.problem.startswith("TypeError: list indices")
    assert own.problem.endswith("(mine.py, line 7, in g)")
    assert library.problem.startswith("JSONDecodeError")
    assert library.problem.endswith("(mine.py, line 7, in g)")  # ours, not deep inside json


def test_what_a_reward_prints_is_kept_and_steers_no_terminal(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import sys\ndef f(n):\n"
        "    print('row', n, '\\x1b[31mred')\n"
        "    sys.stderr.write('to stderr\\n')\n"
        "    return n\n"
    )
    scorer = ChildScorer([RewardPart(f"{tmp_path}/loud.py:f")], 5.0)
    scorer.score([{"n": 1}])
    scorer.output.keep_in(tmp_path / "reward.log")
    scorer.score([{"n": 2}])
    scorer.close()
    text = (tmp_path / "reward.log").read_text()
    expected = "".join(f"row {n} \\x1b[31mred\nto stderr\n" for n in (1, 2))
    assert text == expected
    assert scorer.output.newest == expected


def test_the_file_of_prints_keeps_the_newest_and_stays_small(tmp_path):
    prints = ChildScorer([], 1.0).output
    prints.keep_in(tmp_path / "reward.log")
    for number in range(3000):
        prints._take(f"{number:06d} " + "x" * 1000 + "\n")
    text = (tmp_path / "reward.log").read_text()
    assert len(text) <= 1.1 * 2**20
    assert text.startswith("[what was printed before")
    assert text.rstrip().endswith("x" * 100)
    assert "002999" in text
