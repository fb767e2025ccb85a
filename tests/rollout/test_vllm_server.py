"""vLLM's own server behind `tether eval --endpoint` (`make vllm`)."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from tether import api, assets

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vllm is not installed here; `make vllm` runs this"
)
STARTUP_SECONDS = 300
PROMPTS = {"train.eval_prompts": 100}


@pytest.fixture
def server(tmp_path):
    """The starter model, served on this machine's CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # As `vllm serve`, which looks for the name of a package that the CPU build has not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(assets.resolve("tether:starter")), "--served-model-name", "starter"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "256", "--kv-cache-memory-bytes", "200000000"]
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with (tmp_path / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, tmp_path / "log.txt")
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen, url: str, log: Path) -> None:
    began = time.monotonic()
    while time.monotonic() - began < STARTUP_SECONDS:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        try:
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    pytest.fail(log.read_text(errors="replace")[-3000:])


def test_a_served_model_scores_as_it_does_here(server):
    here = api.evaluate("tether:starter", overrides=PROMPTS)
    there = api.evaluate_endpoint(server, "starter", overrides=PROMPTS)
    assert there.greedy.mean == pytest.approx(here.greedy.mean, abs=0.01)  # a tie may fall apart
    assert not there.sampled.apart_from(here.sampled)
    assert there.kl is None
