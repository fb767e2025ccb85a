"""From turns to tables: medians, ratios, and whether each target is met."""

import statistics
from dataclasses import dataclass

from bench.blocks import Block, Check
from bench.protocol import Result
from bench.rounds import Turns
from tether.cli.terminal import table


@dataclass(frozen=True)
class Figure:
    """One side over all its turns."""

    seconds: float
    low: float
    high: float
    cpu_seconds: float | None  # processor time of all threads
    tokens: int
    peak_mib: float
    load: float
    reached: bool  # False: the seconds are those after which it was given up

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def figure(turns: list[Result]) -> Figure:
    seconds = [s for turn in turns for s in turn["seconds"] or [turn["curve"][-1][1]]]
    cpu = [s for turn in turns for s in turn.get("cpu_seconds", [])]
    return Figure(
        seconds=statistics.median(seconds),
        low=min(seconds),
        high=max(seconds),
        cpu_seconds=statistics.median(cpu) if cpu else None,
        tokens=turns[0]["tokens"],
        peak_mib=statistics.median(turn["peak_mib"] for turn in turns),
        load=statistics.median(turn.get("load", 0.0) for turn in turns),
        reached=all(turn["seconds"] for turn in turns),
    )


def figures(turns: Turns) -> dict[str, Figure]:
    return {side: figure(done) for side, done in turns.results.items() if done}


@dataclass(frozen=True)
class Verdict:
    """A check with its ratio. Where the larger side was given up, the ratio is a lower bound."""

    check: Check
    ratio: float | None
    bound: bool = False

    @property
    def met(self) -> bool | None:
        check, ratio = self.check, self.ratio
        if ratio is None or (check.at_least is None and check.at_most is None):
            return None
        if check.at_least is not None:
            return ratio >= check.at_least
        return ratio <= check.at_most and not self.bound

    def cells(self) -> list[str]:
        check = self.check
        wanted = ""
        if check.at_least is not None:
            wanted = f"at least {check.at_least:g}"
        elif check.at_most is not None:
            wanted = f"at most {check.at_most:g}"
        ratio = "not measured" if self.ratio is None else f"{'> ' * self.bound}{self.ratio:.2f}"
        return [ratio, wanted, {True: "yes", False: "NO", None: ""}[self.met]]


def verdict(check: Check, found: dict[str, Figure]) -> Verdict:
    large, small = (best(found, names, check.what) for names in (check.large, check.small))
    if large is None or small is None:
        return Verdict(check, None)
    match check.what:
        case "memory":
            return Verdict(check, large.peak_mib / small.peak_mib)
        case "rate":
            return Verdict(check, large.rate / small.rate)
        case "seconds" if not small.reached:  # ours was given up: nothing was shown
            return Verdict(check, 0.0)
        case "seconds":
            return Verdict(check, large.seconds / small.seconds, bound=not large.reached)


def best(found: dict[str, Figure], names: str | tuple[str, ...], what: str) -> Figure | None:
    """The side with the least, of those that were measured; None if a single one was not."""
    sides = [
        found[name] for name in ([names] if isinstance(names, str) else names) if name in found
    ]
    if what == "memory":
        return min(sides, key=lambda side: side.peak_mib, default=None)
    return min(sides, key=lambda side: (not side.reached, side.seconds), default=None)


def block_lines(block: Block, turns: Turns, gemm_rate: float | None) -> list[str]:
    """One block: a line per side, then its notes."""
    found, floors = figures(turns), {}
    if gemm_rate is not None:
        floors = {
            side.name: side.operations(side.job()) / gemm_rate
            for side in block.sides
            if side.operations is not None
        }
    head = ["", block.unit, "from – to", "CPU s", "peak MiB", "load"]
    rows = [[*head, "GEMM floor, s"] if floors else head]
    for side in block.sides:
        cells = _cells(found.get(side.name), block.unit)
        if floors:
            cells.append(f"{floors[side.name]:.2f}" if side.name in floors else "")
        rows.append([side.name, *cells])
    notes = [*block.notes, *(f"{name}: {why}" for name, why in turns.missing.items())]
    notes += [spent for side in block.sides if (spent := _spent(side.name, turns))]
    return [block.title, *table(rows).split("\n"), *(f"  {note}" for note in notes), ""]


def _spent(side: str, turns: Turns) -> str | None:
    """What a side had scored and spent of KL when it stopped, where it says so."""
    done = [turn for turn in turns.results[side] if turn.get("kl") is not None]
    if not done:
        return None
    score = statistics.median(turn["curve"][-1][2] for turn in done)
    kl = statistics.median(turn["kl"] for turn in done)
    iterations = ", ".join(str(turn["curve"][-1][0]) for turn in done)
    return (
        f"{side}: {score:.1%} at a KL of {kl:.2f} nats per response, after {iterations} iterations."
    )


def _cells(found: Figure | None, unit: str) -> list[str]:
    if found is None:
        return ["not measured", "", "", "", ""]

    def shown(seconds: float) -> str:
        return f"{found.tokens / seconds:.0f}" if unit == "tokens/s" else f"{seconds:.3g}"

    middle = shown(found.seconds) if found.reached else f"not in {found.seconds:.0f}"
    low, high = sorted((shown(found.low), shown(found.high)), key=float)
    cpu = "" if found.cpu_seconds is None else f"{found.cpu_seconds:.3g}"
    return [middle, f"{low} – {high}", cpu, f"{found.peak_mib:.0f}", f"{found.load:.1f}"]


def gemm_lines(found: Figure, title: str) -> list[str]:
    return [f"{title}: {found.rate / 1e9:.0f} GFLOP/s", ""]


def summary(measured: list[tuple[Block, Turns]]) -> list[str]:
    """All checks in one table."""
    rows = [["", "ratio", "wanted", "met"]]
    for block, turns in measured:
        found = figures(turns)
        if block.checks:
            rows.append([block.title, "", "", ""])
        rows += [[f"  {c.title}", *verdict(c, found).cells()] for c in block.checks]
    return table(rows).split("\n")
