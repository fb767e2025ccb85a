"""The desk between a command and the workers that Ray placed for it: an actor, where either side
leaves what the other shall know. What workers say goes to the command, and its signals to them."""

import signal
from typing import Any

from tether.dist.environment import launched_rank


class Mailbox:
    """Lives in a process of its own for as long as the command does."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.signal: int | None = None
        self.kept: Any = None

    def tell(self, kind: str, what: Any) -> None:
        self.told.append((kind, what))

    def take(self) -> list[tuple[str, Any]]:
        """What was told since the last time."""
        told, self.told = self.told, []
        return told

    def pass_on(self, number: int) -> None:
        self.signal = number

    def heard(self) -> int | None:
        return self.signal

    def keep(self, what: Any) -> None:
        """For those who start anew after a loss."""
        self.kept = what

    def found(self) -> Any:
        return self.kept


class WorkerMailbox:
    """A worker's line to the desk."""

    def __init__(self, desk: Any) -> None:
        self.desk = desk
        self.is_first = launched_rank() == 0

    def arrive(self) -> None:
        self.desk.tell.remote("here", launched_rank())

    def say(self, *message: Any) -> None:
        self.desk.tell.remote("said", message)

    def end(self, result: Any, error: Exception | None) -> None:
        self._ask(self.desk.tell.remote("ended", (launched_rank(), result, error)))

    def keep(self, what: Any) -> None:
        self._ask(self.desk.keep.remote(what))

    def found(self) -> Any:
        """What workers before these kept; None for the first ones."""
        return self._ask(self.desk.found.remote())

    def heard(self) -> int | None:
        return self._ask(self.desk.heard.remote())

    @staticmethod
    def _ask(answer: Any) -> Any:
        import ray

        return ray.get(answer)


_line: WorkerMailbox | None = None


def open_mailbox(desk: Any) -> WorkerMailbox:
    """This process is a worker from here on."""
    global _line
    _line = WorkerMailbox(desk)
    return _line


def forwarding_signals() -> signal.Signals | None:
    """The signal that the command behind this worker was sent; None where there is no such."""
    number = None if _line is None else _line.heard()
    return None if number is None else signal.Signals(number)
