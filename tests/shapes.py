"""Where the shapes of annotated tensors are checked at run time, and where they are not."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
SOURCE = TESTS.parent / "src"

# Elsewhere whole runs are trained for the sake of files, signals, pages or processes; that the
# shapes are right in such runs is what these tests check, and checking doubles the time of a run.
CHECKED = {"algo", "data", "models", "ppo", "rollout", "test_helpers.py"}
WHOLE_RUNS = {"models/test_lora_runs.py", "ppo/test_evaluate.py", "ppo/test_trpo.py"}


def modules_with_shapes() -> list[str]:
    """Return the modules that write shapes; checking the others too costs a quarter of a run."""
    return [
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.glob("tether/**/*.py")
        if "jaxtyping" in path.read_text(encoding="utf-8")
    ]


def are_checked_in(test: Path) -> bool:
    place = test.relative_to(TESTS)
    return place.parts[0] in CHECKED and place.as_posix() not in WHOLE_RUNS
