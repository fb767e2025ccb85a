"""Where the shapes of annotated tensors are checked at run time, and where they are not."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"

# Their tests train whole runs for the sake of files, signals or pages; that the shapes are right
# in such runs is what the tests of the other folders check.
UNCHECKED = {"browser", "cli", "faults", "golden", "learning", "rewards", "run", "train", "view"}


def modules_with_shapes() -> list[str]:
    """Return the modules that write shapes; checking the others too costs a quarter of a run."""
    return [
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.glob("tether/**/*.py")
        if "jaxtyping" in path.read_text(encoding="utf-8")
    ]


def are_checked_in(test: Path) -> bool:
    return test.relative_to(TESTS).parts[0] not in UNCHECKED
