"""Run reward functions in child processes: several at a time, each row within a time limit.

What a row gets depends neither on the number of processes nor on which of them is faster: each
answer goes to the row that it is of, and a process that hangs or dies costs the row that made it.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tether.errors import UserError
from tether.rewards.functions import TIME_LIMIT, RewardPart, Row
from tether.rewards.scorers import Batch, PartScorer, Verdict
from tether.support.child_output import ChildOutput
from tether.support.child_process import Answer, ChildFailed, ChildProcess, ChildTimedOut
from tether.support.user_code import Sources

IMPORT_SECONDS = 120.0
GRACE_SECONDS = 2.0  # by which a process may be later than the time limit that it keeps itself
MAX_ANSWER_BYTES = 8 << 20
GIGABYTE = 1e9


@dataclass(frozen=True)
class Call:
    """A call of one part, on one row or on the rows of one prompt."""

    part: int
    places: range  # of the rows among those to score
    rows: Sequence[Row]

    def as_json(self) -> str:
        return json.dumps({"part": self.part, "rows": list(self.rows)})


class ChildScorer(PartScorer):
    """Run the parts of a reward in long-lived children, `workers` of them.

    When a row hangs or kills a child, a new child continues after that row. It runs the same
    reward: files that were edited since the first child started stop the run.
    """

    def __init__(
        self,
        parts: Sequence[RewardPart],
        timeout_seconds: float,
        import_seconds: float = IMPORT_SECONDS,
        workers: int = 1,
        concurrency: int = 1,
        memory_gigabytes: float | None = None,
    ) -> None:
        self.parts = parts
        self.output = ChildOutput()
        sources = Sources(part.kind for part in parts)
        setup = {
            "parts": [{"kind": part.kind, "arguments": dict(part.arguments)} for part in parts],
            "names": ", ".join(part.kind for part in parts),
            "seconds": timeout_seconds,
            "concurrency": concurrency,
            "memory_bytes": None if memory_gigabytes is None else int(memory_gigabytes * GIGABYTE),
        }

        def start() -> ChildProcess:
            sources.refuse_changed()
            return _start(setup, import_seconds, self.output)

        self.workers = [Worker(start, timeout_seconds, concurrency) for _ in range(workers)]
        self._pool: ThreadPoolExecutor | None = None
        self._kinds: list[tuple[bool, bool]] | None = None

    def verdicts(self, rows: Sequence[Row], batch: Batch) -> list[list[Verdict]]:
        for worker in self.workers:
            worker.stopped = False
        found: list[list[Verdict | None]] = [[None] * len(self.parts) for _ in rows]

        def keep(call: Call, verdicts: Sequence[Verdict]) -> None:
            for place, verdict in zip(call.places, verdicts, strict=True):
                found[place][call.part] = verdict

        in_turn, together = self._calls(rows, batch)
        if len(self.workers) == 1:
            [worker] = self.workers
            worker.answer_in_turn(in_turn, keep)
            worker.answer_together(together, keep)
        else:
            self._share_out(in_turn, together, keep)
        return [[v for v in verdicts if v is not None] for verdicts in found]

    def _share_out(
        self, in_turn: list[Call], together: list[Call], keep: "Callable[..., None]"
    ) -> None:
        """Let each worker take the next call when it is free, and an equal share of async ones.

        The threads live as long as the scorer: a child dies with the thread that started it.
        """
        self._pool = self._pool or ThreadPoolExecutor(len(self.workers), "reward")
        waiting, count = deque(in_turn), len(self.workers)

        def next_calls() -> Iterator[Call]:
            while True:
                try:
                    yield waiting.popleft()
                except IndexError:
                    return

        def work(number: int) -> None:
            worker = self.workers[number]
            for call in next_calls():
                worker.answer_in_turn([call], keep)
            worker.answer_together(together[number::count], keep)

        list(self._pool.map(work, range(count)))

    def _calls(self, rows: Sequence[Row], batch: Batch) -> tuple[list[Call], list[Call]]:
        """Return the calls of plain functions and those of async ones, in the order of the rows."""
        if self._kinds is None:
            self._kinds = self.workers[0].kinds()
        in_turn: list[Call] = []
        together: list[Call] = []
        for prompt in batch.prompts():
            single = [range(row, row + 1) for row in prompt]
            for places in (*single, prompt):
                for part, (is_async_, by_prompt) in enumerate(self._kinds):
                    if by_prompt == (places is prompt):
                        calls = together if is_async_ else in_turn
                        calls.append(Call(part, places, rows[places.start : places.stop]))
        return in_turn, together

    def close(self) -> None:
        for worker in self.workers:
            worker.stopped = True
            worker.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self.output.settle()

    def log_to(self, path: Path) -> None:
        self.output.keep_in(path)

    def printed(self) -> str:
        return self.output.newest


Keep = Callable[[Call, Sequence[Verdict]], None]


class Worker:
    """One child, started when it is needed and again after one that had to be ended."""

    def __init__(
        self, start: Callable[[], ChildProcess], timeout_seconds: float, concurrency: int
    ) -> None:
        self.start = start
        self.timeout_seconds = timeout_seconds
        self.concurrency = concurrency
        self.child: ChildProcess | None = None
        self.stopped = False

    def kinds(self) -> list[tuple[bool, bool]]:
        """Return of each part whether it is async, and whether it takes all rows of a prompt."""
        child = self._running()
        child.send([_request([])])
        try:
            return [(bool(a), bool(b)) for a, b in child.receive(self.timeout_seconds)["parts"]]
        except (ChildFailed, KeyError, TypeError, ValueError) as error:
            raise UserError(f"The reward does not start: {error}.") from None

    def answer_in_turn(self, calls: Sequence[Call], keep: Keep) -> None:
        """Answer calls of plain functions, one after the other."""
        done, asked = 0, None
        lines = [_request([call]) for call in calls]
        while done < len(calls):
            child = self._running()
            if child is not asked:
                child.send(lines[done:])
                asked = child
            call = calls[done]
            limit = self.timeout_seconds * len(call.rows)
            try:
                _, verdicts = _read(child.receive(limit), [call], child)
            except ChildFailed as error:
                verdicts = self._failed(call, error)
            keep(call, verdicts)
            done += 1

    def answer_together(self, calls: Sequence[Call], keep: Keep) -> None:
        """Answer calls of async functions, `concurrency` at a time.

        A child keeps the time limit of its calls itself. One that does not, because a coroutine
        blocks it, or that dies, was busy with the first of the calls that it has not answered:
        those are asked again one by one, and only the culprit fails.
        """
        waiting, one_by_one = list(calls), 0
        while waiting:
            asked = waiting[:1] if one_by_one else waiting
            one_by_one = max(0, one_by_one - 1)
            child = self._running()
            child.send([_request(asked)])
            limit = self.timeout_seconds * max(len(call.rows) for call in asked)
            answered: set[int] = set()
            try:
                while len(answered) < len(asked):
                    number, verdicts = _read(child.receive(limit + GRACE_SECONDS), asked, child)
                    keep(asked[number], verdicts)
                    answered.add(number)
            except ChildTimedOut:
                late = f"the reward took longer than {limit:g} s"
                answered |= self._abandon(asked, ChildTimedOut(late), keep)
            except ChildFailed as error:
                answered |= self._abandon(asked, error, keep)
            if len(answered) < len(asked):
                one_by_one = self.concurrency
            left = [call for number, call in enumerate(asked) if number not in answered]
            waiting = [*left, *waiting[len(asked) :]]

    def _abandon(self, asked: Sequence[Call], error: ChildFailed, keep: Keep) -> set[int]:
        """End the child; of a single call, it is that call that failed."""
        verdicts = self._failed(asked[0], error)
        if len(asked) > 1:
            return set()
        keep(asked[0], verdicts)
        return {0}

    def _running(self) -> ChildProcess:
        if self.stopped:
            raise ChildFailed("the reward was stopped")
        self.child = self.child or self.start()
        return self.child

    def _failed(self, call: Call, error: ChildFailed) -> list[Verdict]:
        """End the child, and return what is said of the rows of the call that failed."""
        self.close()
        late = TIME_LIMIT if isinstance(error, ChildTimedOut) else ""
        return [Verdict(None, f"{error}{late}")] * len(call.rows)

    def close(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            child.kill()


def _request(calls: Sequence[Call]) -> str:
    return f'{{"calls": [{", ".join(call.as_json() for call in calls)}]}}'


def _read(answer: Answer, asked: Sequence[Call], child: ChildProcess) -> tuple[int, list[Verdict]]:
    """Return the number of the call that was answered, and the verdicts of its rows."""
    try:
        number, answers = answer["call"], answer["answers"]
        verdicts = [Verdict.of_answer(one) for one in answers]
        if len(verdicts) == len(asked[number].rows):
            return number, verdicts
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        pass
    raise child.garbled() from None


def _start(setup: dict[str, object], seconds: float, output: ChildOutput) -> ChildProcess:
    try:
        with output.pipe() as pipe:
            return ChildProcess(
                "tether.rewards.child",
                setup,
                name="the reward",
                seconds=seconds,
                output=pipe,
                max_answer_bytes=MAX_ANSWER_BYTES,
            )
    except ChildTimedOut:
        raise UserError(
            f"The reward does not start: {setup['names']} took longer to import than "
            f"reward.import_timeout_seconds = {seconds:g}; raise it, or import less."
        ) from None
    except ChildFailed as error:
        raise UserError(f"The reward does not start: {error}.") from None
