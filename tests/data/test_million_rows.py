"""A data file of a million rows: the first iteration is done within a minute, and not in silence.

It takes a minute and two idle cores: `make test-long` runs it.
"""

import json
import subprocess
import sys
import time
from itertools import pairwise

import pytest

ROWS = 1_000_000
SETTINGS = {"--train.iterations": 1, "--reward.kind": "exact_answer", "--run.dir": "run"}


@pytest.mark.long
def test_the_first_iteration_on_a_million_rows_is_done_within_a_minute(tmp_path):
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(ROWS):
            a, b = i % 100, i // 100 % 100
            row = {"prompt": f"{a}+{b}=?", "answer": str(a + b), "source": "made", "id": i}
            file.write(json.dumps(row) + "\n")
    words = [str(word) for pair in SETTINGS.items() for word in pair]
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "tether", "train", "--data.train", "rows.jsonl", *words],
        cwd=tmp_path, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = [(time.monotonic() - began, line) for line in process.stdout]
    assert process.wait() == 0
    seconds = next(at for at, line in lines if line.strip().startswith("1/1"))
    print(f"first iteration after {seconds:.1f} s")
    assert seconds < 60
    assert any(line.startswith("reading ") and "rows so far" in line for _, line in lines)
    moments = [at for at, line in lines if at <= seconds]
    silences = [b - a for a, b in pairwise(moments)]
    assert max(silences) < 15
