"""What went wrong or was unusual."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    kind: str
    message: str
    row: int | None = None
