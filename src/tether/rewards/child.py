"""The child process in which rewards run: `python -m tether.rewards.child IN OUT`.

The setup is a list of reward parts. Each further request is a row, and each part answers it, in
order, with {"reward": {"response", "turns", "tokens"} or null, "parts", "extras"} or {"error":
sentence}. Imports no torch, so that it starts fast and holds little memory.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tether.errors import describe
from tether.rewards.functions import Reward, judge_row, load_reward
from tether.rewards.rules import warm_up
from tether.rewards.values import WrongType
from tether.support.child_process import Answer, Respond, serve


def load_parts(parts: list[dict[str, Any]]) -> Respond:
    """Return the function that answers a row with the verdict of every part."""
    loaded = [(_load(part["kind"]), part["arguments"]) for part in parts]

    def judge(line: str) -> Iterator[Answer]:
        for function, arguments in loaded:
            # Each part parses the row anew, so none can change what the next one sees.
            yield _judge(function, json.loads(line), arguments)

    return judge


def _load(kind: str) -> Reward:
    warm_up(kind)
    return load_reward(kind)


def _judge(function: Reward, row: Mapping[str, Any], arguments: Mapping[str, Any]) -> Answer:
    try:
        return asdict(judge_row(function, row, arguments))
    except WrongType as error:
        return {"error": str(error), "wrong_type": True}
    except Exception as error:  # a reward may raise anything; the parent names the row
        return {"error": describe(error)}


if __name__ == "__main__":
    serve(load_parts)
