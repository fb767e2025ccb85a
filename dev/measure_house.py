"""Measure the shape of the source: `python dev/measure_house.py [OTHER_CHECKOUT]`.

Prints modules, their median length, modules with a single importer, tether's own frames from the
command to a token's loss, and how often the prose says "a token" for "per token" or "is no" for
"is not a". With OTHER_CHECKOUT both are printed side by side, the other one first. `--files
NAME=COMMIT..COMMIT` also lists the source files that a change touched. These are measures of a
shape, not limits.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
IMPORT = re.compile(r"(?:from|import) (tether(?:\.\w+)+)")
UNIT = "token|row|turn|cell|process|step|prompt|response|iteration|command|run"
COUNTED = "losses|numbers?|values?|rewards?|scores?|samples|one|tokens|nats|files?|lines?|rows?"
TIC = re.compile(rf"\b(?:{COUNTED}) an? (?:{UNIT})\b|\b(?:is|was|are) no [a-z]+")

# Trains one small iteration by the command, stops in the first policy loss and prints the stack.
TO_THE_LOSS = """
import sys, traceback
from pathlib import Path
import tether
from tether.cli.main import main

package = str(Path(tether.__file__).parent)

class Reached(BaseException): ...

def stop_in_the_loss(frame, event, argument):
    code = frame.f_code
    if event != "call" or "clip" not in code.co_name or "policy" not in code.co_name:
        return
    if not code.co_filename.endswith("algo/losses.py"):
        return
    sys.setprofile(None)
    for entry in traceback.extract_stack(frame):
        if entry.filename.startswith(package) and not entry.name.startswith("<"):
            file = Path(entry.filename).relative_to(package).with_suffix("")
            print("FRAME", file.as_posix().replace("/", ".") + "." + entry.name, flush=True)
    raise Reached

sys.argv = ["tether", "train", "arithmetic"]
for field, value in {"run.dir": "run", "train.iterations": 1, "train.eval_every": 0, "threads": 1,
                     "rollout.prompts": 4, "rollout.max_response_tokens": 4,
                     "actor.minibatch_rows": 4, "critic.minibatch_rows": 4}.items():
    sys.argv += ["--" + field, str(value)]
sys.setprofile(stop_in_the_loss)
try:
    main()
except Reached:
    pass
"""


def source_files(checkout: Path) -> list[Path]:
    return sorted((checkout / "src" / "tether").rglob("*.py"))


def measure_files(checkout: Path) -> dict[str, object]:
    """Return counts that need nothing but the text of the source."""
    texts = {path: path.read_text(encoding="utf-8") for path in source_files(checkout)}
    importers: dict[str, set[Path]] = {}
    for path, text in texts.items():
        for name in set(IMPORT.findall(text)):
            importers.setdefault(name, set()).add(path)
    docs = [path.read_text(encoding="utf-8") for path in checkout.glob("docs/**/*.md")]
    lengths = [text.count("\n") for text in texts.values()]
    return {
        "modules": len(texts),
        "  of them an __init__ of one line or none": sum(
            path.name == "__init__.py" and length < 2
            for path, length in zip(texts, lengths, strict=True)
        ),
        "median lines": statistics.median_high(lengths),
        "median lines without these": statistics.median_high([n for n in lengths if n > 1]),
        "lines": sum(lengths),
        "modules with a single importer": sum(len(who) == 1 for who in importers.values()),
        "the tic in src": sum(len(TIC.findall(text)) for text in texts.values()),
        "the tic in docs": sum(len(TIC.findall(text)) for text in docs),
    }


def frames_to_the_loss(checkout: Path) -> list[str]:
    """Return tether's own functions on the stack inside the first policy loss of a run."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "XDG_CACHE_HOME": folder}
        ended = subprocess.run(
            [sys.executable, "-c", TO_THE_LOSS],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
    found = [line.split()[1] for line in ended.stdout.splitlines() if line.startswith("FRAME ")]
    if not found:
        sys.exit(f"{checkout}: no run reached its policy loss.\n{ended.stdout}{ended.stderr}")
    return found


def touched_files(commits: str) -> list[str]:
    """Return the files of src/tether that a range of commits changed."""
    command = ["git", "-C", str(HERE), "diff", "--name-only", commits, "--", "src/tether"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("other", nargs="?", type=Path, help="a checkout to compare with")
    parser.add_argument("--files", action="append", default=[], metavar="NAME=COMMIT..COMMIT")
    options = parser.parse_args()
    checkouts = [HERE] if options.other is None else [options.other.resolve(), HERE]
    counts = [measure_files(checkout) for checkout in checkouts]
    frames = [frames_to_the_loss(checkout) for checkout in checkouts]
    for count, stack in zip(counts, frames, strict=True):
        count["frames from the command to a token's loss"] = len(stack)
    for name in counts[0]:
        print(f"{name:<44}" + "".join(f"{count[name]:>8}" for count in counts))
    for checkout, stack in zip(checkouts, frames, strict=True):
        print(f"\nframes of {checkout.name}:", *stack, sep="\n  ")
    for change in options.files:
        name, _, commits = change.partition("=")
        files = touched_files(commits)
        print(f"\n{name} touches {len(files)} files:", *files, sep="\n  ")


if __name__ == "__main__":
    main()
