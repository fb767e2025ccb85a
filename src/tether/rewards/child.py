"""The child process in which rewards run: `python -m tether.rewards.child IN OUT`.

The setup names the parts of the reward. Each further request is {"calls": [{"part", "rows"}, …]},
and each call is answered by {"call": its number, "answers": one per row}. One call alone may be of
a plain function; several are of async ones, which run at the same time, and the first to end is the
first to be answered. A request without calls is answered by what each part is. Imports no torch, so
that it starts fast and holds little memory.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from tether.rewards.functions import ReadyReward, load_reward
from tether.rewards.rules import warm_up
from tether.support.child_process import Answer, Respond, limit_memory, serve


def load_parts(setup: dict[str, Any]) -> Respond:
    """Return the function that answers calls."""
    parts = [_load(part["kind"], part["arguments"]) for part in setup["parts"]]
    if setup["memory_bytes"] is not None:
        limit_memory(setup["memory_bytes"])
    loop = asyncio.new_event_loop()

    def respond(line: str) -> Iterator[Answer]:
        calls = json.loads(line)["calls"]
        if not calls:
            yield {"parts": [[part.is_async, part.by_prompt] for part in parts]}
        elif parts[calls[0]["part"]].is_async:
            yield from _together(loop, parts, calls, setup["concurrency"], setup["seconds"])
        else:
            [call] = calls
            yield {"call": 0, "answers": parts[call["part"]].answers(call["rows"])}

    return respond


def _load(kind: str, arguments: dict[str, Any]) -> ReadyReward:
    warm_up(kind)
    return ReadyReward(load_reward(kind), arguments)


def _together(
    loop: asyncio.AbstractEventLoop,
    parts: list[ReadyReward],
    calls: list[dict[str, Any]],
    concurrency: int,
    seconds: float,
) -> Iterator[Answer]:
    """Answer calls of async functions, `concurrency` at a time, begun in their order."""
    asyncio.set_event_loop(loop)
    waiting, running = list(enumerate(calls)), set()
    while waiting or running:
        while waiting and len(running) < concurrency:
            number, call = waiting.pop(0)
            running.add(loop.create_task(_answered(number, parts[call["part"]], call, seconds)))
        done, running = loop.run_until_complete(
            asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        )
        for task in done:
            yield task.result()


async def _answered(number: int, part: ReadyReward, call: dict[str, Any], seconds: float) -> Answer:
    rows = call["rows"]
    return {"call": number, "answers": await part.answers_async(rows, seconds * len(rows))}


if __name__ == "__main__":
    serve(load_parts)
