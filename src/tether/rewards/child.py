"""The child process in which rewards run: rows in and verdicts out as JSON lines.

`python -m tether.rewards.child IN OUT` reads from file descriptor IN a line that says what to load,
then rows. For each row it answers on OUT once per part, in order, with {"score": number or null} or
{"error": sentence}, each with its number, so that no other line can pass for an answer. What the
functions print goes nowhere near that pipe. It imports no torch, so it starts in a blink and holds
little memory.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from tether.errors import UserError
from tether.rewards.functions import Reward, WrongType, describe, judge_row, load_reward
from tether.rewards.rules import warm_up

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """However the parent ends, a reward that hangs must not outlive it. (Linux only.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(rows_fd: int, verdicts_fd: int) -> None:
    die_with_parent()
    for fd in (rows_fd, verdicts_fd):
        os.set_inheritable(fd, False)  # programs that a reward starts have no use for them
    with os.fdopen(rows_fd, encoding="utf-8") as rows, os.fdopen(verdicts_fd, "w") as verdicts:
        number = 0

        def answer(verdict: dict) -> None:
            nonlocal number
            number += 1
            verdicts.write(json.dumps({**verdict, "number": number}) + "\n")
            verdicts.flush()

        try:
            loaded = [_load(**part) for part in json.loads(rows.readline())]
        except UserError as error:
            return answer({"refused": str(error)})
        answer({"ready": True})
        asked = os.getpid()
        for line in rows:
            for function, arguments in loaded:
                # Each part reads the row anew, so none can change what the next one sees.
                verdict = _judge(function, json.loads(line), arguments)
                if os.getpid() != asked:
                    os._exit(0)  # a copy that the reward forked: its answer would pass for the next
                answer(verdict)


def _load(kind: str, arguments: dict[str, Any]) -> tuple[Reward, dict[str, Any]]:
    warm_up(kind)
    return load_reward(kind), arguments


def _judge(function: Reward, row: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict:
    try:
        score, extras = judge_row(function, row, arguments)
        return {"score": score, "extras": extras} if extras else {"score": score}
    except Exception as error:  # a reward may raise anything; the parent names the row
        return {"error": describe(error), "wrong_type": isinstance(error, WrongType)}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
