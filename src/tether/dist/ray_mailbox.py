"""The mailbox between a command and the workers that Ray placed for it: an actor in a process of
its own. Workers' messages go to the command, and the command's signals to the workers."""

import signal
from typing import Any

from tether.dist.environment import launched_rank


class Mailbox:
    """Hold messages until they are taken. Lives for as long as the command does."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, Any]] = []
        self.number: int | None = None
        self.run_dir: str | None = None

    def put(self, kind: str, content: Any) -> None:
        self.messages.append((kind, content))

    def take(self) -> list[tuple[str, Any]]:
        """Return the messages since the last call."""
        messages, self.messages = self.messages, []
        return messages

    def send_signal(self, number: int) -> None:
        self.number = number

    def signal(self) -> int | None:
        return self.number

    def save_run_dir(self, run_dir: str) -> None:
        """Remember the run for workers that replace lost ones."""
        self.run_dir = run_dir

    def saved_run_dir(self) -> str | None:
        return self.run_dir


class WorkerMailbox:
    """A worker's side of the mailbox."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.is_first = launched_rank() == 0

    def arrive(self) -> None:
        self.actor.put.remote("arrived", launched_rank())

    def send(self, *message: Any) -> None:
        """Send a call of a watcher's method: its name and arguments."""
        self.actor.put.remote("message", message)

    def end(self, result: Any, error: Exception | None) -> None:
        self._wait(self.actor.put.remote("ended", (launched_rank(), result, error)))

    def save_run_dir(self, run_dir: str) -> None:
        self._wait(self.actor.save_run_dir.remote(run_dir))

    def saved_run_dir(self) -> str | None:
        """Return the directory of the run that earlier workers began; None for the first ones."""
        return self._wait(self.actor.saved_run_dir.remote())

    def signal(self) -> int | None:
        return self._wait(self.actor.signal.remote())

    @staticmethod
    def _wait(answer: Any) -> Any:
        import ray

        return ray.get(answer)


_mailbox: WorkerMailbox | None = None


def open_mailbox(actor: Any) -> WorkerMailbox:
    """Make this process a worker with a mailbox."""
    global _mailbox
    _mailbox = WorkerMailbox(actor)
    return _mailbox


def forwarded_signal() -> signal.Signals | None:
    """Return the signal that the command behind this worker was sent; None without one."""
    number = None if _mailbox is None else _mailbox.signal()
    return None if number is None else signal.Signals(number)
