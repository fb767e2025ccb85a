"""A child that answers in JSON lines: limits, ends, forks and what its code leaves behind."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest

from tether.errors import UserError
from tether.support.child_process import ChildEnded, ChildFailed, ChildProcess, ChildTimedOut

MODULE = """
import json, os, subprocess, sys, time
from tether.errors import UserError
from tether.support.child_process import limit_memory, serve

def set_up(setup):
    if setup == "refuse":
        raise UserError("not this one")
    if setup == "slow":
        time.sleep(60)
    if setup == "little memory":
        limit_memory(64 << 20)

    def respond(line):
        request = json.loads(line)
        if request == "hang":
            time.sleep(60)
        elif request == "die":
            os._exit(7)
        elif request == "fork":
            yield {"pid": os.fork()}
        elif request == "print":
            print('{"number": 2}')
            os.write(1, b'{"number": 2}')
            yield {"printed": True}
        elif request == "junk":
            os.write(int(sys.argv[-1]), b"hello")
            yield {}
        elif request == "close":
            os.close(int(sys.argv[-1]))
            time.sleep(60)
        elif request == "fill":
            try:
                bytearray(256 << 20)
                yield {"filled": True}
            except MemoryError:
                yield {"filled": False}
        elif request == "inherit":
            code = (
                "import os, sys\\n"
                "fds = map(int, sys.argv[1:])\\n"
                "print([fd for fd in fds if os.path.exists(f'/proc/self/fd/{fd}')])"
            )
            found = subprocess.run([sys.executable, "-c", code, *sys.argv[-2:]], close_fds=False,
                                   capture_output=True, text=True)
            yield {"inherited": json.loads(found.stdout)}
        elif isinstance(request, int):
            for i in range(request):
                yield {"i": i}
        else:
            yield {"echo": request, "arguments": sys.argv}

    return respond

if __name__ == "__main__":
    serve(set_up)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / "echo_child.py").write_text(MODULE)
    path = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    children = []

    def start(setup=None, seconds=60.0, **options) -> ChildProcess:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        options = {"name": "the child", "environment": environment, **options}
        children.append(ChildProcess("echo_child", setup, seconds=seconds, **options))
        return children[-1]

    yield start
    for child in children:
        child.kill()


def test_requests_are_answered_in_order_and_on_no_command_line(start):
    child = start({"secret": 1})
    assert child.ask("é\n\ud800", 60.0)["echo"] == "é\n\ud800"
    assert "secret" not in str(child.ask("x", 60.0)["arguments"])
    child.send([json.dumps(3), json.dumps("last")])
    assert [child.receive(60.0).get("i") for _ in range(3)] == [0, 1, 2]
    assert child.receive(60.0)["echo"] == "last"


def test_megabytes_go_both_ways_without_waiting_for_each_other(start):
    child = start()
    texts = [str(i) * 100_000 for i in range(30)]
    child.send([json.dumps(text) for text in texts])
    assert [child.receive(60.0)["echo"] for _ in texts] == texts


@pytest.mark.parametrize(
    ("request_", "kind", "sentence"),
    [
        ("hang", ChildTimedOut, "the child took longer than 0.3 s"),
        ("die", ChildEnded, "the child's process ended with code 7"),
        ("junk", ChildFailed, "the child wrote into the pipe that its answers go through"),
        ("close", ChildFailed, "the child closed the pipe that its answers go through"),
    ],
)
def test_an_answer_that_cannot_come_is_one_sentence(start, request_, kind, sentence):
    child = start()
    began = time.monotonic()
    with pytest.raises(kind, match=sentence):
        child.ask(request_, 0.3 if request_ == "hang" else 60.0)
    assert time.monotonic() - began < 20
    child.kill()
    assert not child.usable


def test_an_answer_may_not_be_longer_than_agreed(start):
    child = start(max_answer_bytes=1 << 20)
    assert child.ask("x" * 10**6, 60.0)
    with pytest.raises(ChildFailed, match="wrote into the pipe"):
        child.ask("x" * 2 * 10**6, 60.0)


def test_a_setup_may_be_refused_or_take_too_long(start):
    with pytest.raises(UserError, match="not this one"):
        start("refuse")
    with pytest.raises(ChildTimedOut):
        start("slow", seconds=0.3)


def test_prints_do_not_pass_for_answers(start):
    child = start()
    assert child.ask("print", 60.0) == {"printed": True}


def test_a_fork_made_by_the_childs_code_answers_nothing(start):
    child = start()
    assert child.ask("fork", 60.0)["pid"] > 0
    time.sleep(0.2)  # for the copy to answer out of turn
    assert child.ask("x", 60.0)["echo"] == "x"


def test_programs_that_it_starts_do_not_inherit_the_pipes(start):
    assert start().ask("inherit", 60.0) == {"inherited": []}


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS counts from /proc")
def test_memory_is_limited_where_asked(start):
    assert start().ask("fill", 60.0) == {"filled": True}
    assert start("little memory").ask("fill", 60.0) == {"filled": False}


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_it_dies_with_its_parent_even_while_it_hangs(tmp_path, start):
    start()  # writes the module
    parent = textwrap.dedent("""
        import os, sys
        from tether.support.child_process import ChildProcess
        child = ChildProcess("echo_child", name="the child", seconds=60)
        child.send(['"hang"'])
        try:
            child.receive(0.3)
        except Exception:
            print(child.process.pid, flush=True)
            os._exit(1)
    """)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", parent],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    pid, deadline = int(done.stdout), time.monotonic() + 5
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_fork_of_the_parent_neither_uses_nor_kills_it(start):
    child = start()
    forked = os.fork()
    if forked == 0:
        usable = child.usable
        child.kill()
        os._exit(3 if usable else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    assert child.ask("x", 60.0)["echo"] == "x"
