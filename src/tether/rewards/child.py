"""The child process in which a reward runs: rows in and verdicts out as JSON lines.

`python -m tether.rewards.child KIND IN OUT` reads rows from file descriptor IN and answers each on
OUT with {"score": number or null} or {"error": sentence}. The function's own prints go nowhere
near that pipe. It imports no torch, so it starts in a blink and holds little memory.
"""

import ctypes
import json
import os
import signal
import sys

from tether.errors import UserError
from tether.rewards.function import Reward, call_reward, describe, load_reward

PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """However the parent ends, a reward that hangs must not outlive it. (Linux only.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(kind: str, rows_fd: int, verdicts_fd: int) -> None:
    die_with_parent()
    with os.fdopen(rows_fd, encoding="utf-8") as rows, os.fdopen(verdicts_fd, "w") as verdicts:

        def answer(verdict: dict) -> None:
            verdicts.write(json.dumps(verdict) + "\n")
            verdicts.flush()

        try:
            function = load_reward(kind)
        except UserError as error:
            return answer({"refused": str(error)})
        answer({"ready": True})
        asked = os.getpid()
        for line in rows:
            verdict = _judge(function, line)
            if os.getpid() != asked:
                os._exit(0)  # a copy that the reward forked: its answer would be taken for the next
            answer(verdict)


def _judge(function: Reward, line: str) -> dict:
    try:
        return {"score": call_reward(function, json.loads(line))}
    except Exception as error:  # a reward may raise anything; the parent names the row
        return {"error": describe(error)}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
