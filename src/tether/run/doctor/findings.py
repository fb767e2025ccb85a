"""What a rule finds, as plain data for the command and the page, and what it says of it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from tether.run.doctor.evidence import Point

PAGE = "docs/troubleshooting.md"


class Words(NamedTuple):
    """A sentence in English and in Chinese."""

    en: str
    zh: str


@dataclass(frozen=True)
class Reading:
    """A number that a finding rests on: how it was and how it is, or a single value."""

    name: str  # of a metric, or of what was counted
    last: Point
    first: Point | None = None

    def __str__(self) -> str:
        now = f"{self.last.value:.3g} at iteration {self.last.iteration}"
        if self.first is None:
            return f"{self.name} {now}"
        return f"{self.name} {self.first.value:.3g} at iteration {self.first.iteration}, {now}"


@dataclass(frozen=True)
class Finding:
    """One trouble: what it is, the numbers that show it, and what to change."""

    rule: str
    what: Words
    change: Words
    fields: tuple[str, ...]  # of the config, in the order in which to try them
    readings: tuple[Reading, ...]
    link: str  # docs/troubleshooting.md#anchor
    message: str | None = None  # of the event, where one says more than a number


@dataclass(frozen=True)
class Diagnosis:
    """All findings, gravest first, with what could not be judged and why."""

    findings: Sequence[Finding]
    judged: Sequence[str]  # rules that had what they need
    not_judged: dict[str, str]  # by rule: what is missing
    notes: Sequence[str]  # about the files

    def as_dict(self) -> dict[str, Any]:
        """Return plain lists and mappings, as `tether doctor --json` writes them."""
        found = []
        for finding in self.findings:
            record = asdict(finding)
            record["what"], record["change"] = finding.what._asdict(), finding.change._asdict()
            record["evidence"] = [str(reading) for reading in finding.readings]
            found.append(record)
        return {
            "findings": found,
            "judged": list(self.judged),
            "not_judged": dict(self.not_judged),
            "notes": list(self.notes),
        }
