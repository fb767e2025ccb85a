"""One row of the fault table."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    number: str
    fault: str
    tries: int
    held: int
    remark: str = ""

    @property
    def holds(self) -> bool:
        return self.tries > 0 and self.held == self.tries


def tally(number: str, fault: str, problems: Iterable[str | None], remark: str = "") -> Row:
    """A row from one verdict a try: None if it held, else what was lost."""
    verdicts = list(problems)
    lost = [verdict for verdict in verdicts if verdict is not None]
    said = "; ".join([*([remark] if remark else []), *sorted(set(lost))[:3]])
    return Row(number, fault, len(verdicts), len(verdicts) - len(lost), said)
