"""The child process in which rewards run: rows in and verdicts out as JSON lines.

`python -m tether.rewards.child PARTS IN OUT` reads rows from file descriptor IN. For each row it
answers on OUT once a part, in order, with {"score": number or null} or {"error": sentence}. What
the functions print goes nowhere near that pipe. It imports no torch, so it starts in a blink and
holds little memory.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

from tether.errors import UserError
from tether.rewards.function import Reward, call_reward, describe, load_reward
from tether.rewards.rules import warm_up

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """However the parent ends, a reward that hangs must not outlive it. (Linux only.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(parts: str, rows_fd: int, verdicts_fd: int) -> None:
    die_with_parent()
    with os.fdopen(rows_fd, encoding="utf-8") as rows, os.fdopen(verdicts_fd, "w") as verdicts:

        def answer(verdict: dict) -> None:
            verdicts.write(json.dumps(verdict) + "\n")
            verdicts.flush()

        try:
            loaded = [_load(**part) for part in json.loads(parts)]
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
        return {"score": call_reward(function, row, arguments)}
    except Exception as error:  # a reward may raise anything; the parent names the row
        return {"error": describe(error)}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
