"""`tether kl` as a person meets it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


def test_it_prints_both_directions_and_the_samples(tether):
    code, out, _ = tether("kl", "0.8,0.2", "0.7,0.3", "--samples", "1000", "--seed", "3")
    assert code == 0
    assert "KL(P‖Q) = 0.025732 nats = 0.037124 bits" in out
    assert "KL(Q‖P) = 0.028168 nats = 0.040637 bits" in out
    assert "from outcomes drawn from P (seed 3)" in out
    assert out.count(" k3  ") == 3  # for 10, 100 and 1000


def test_it_speaks_chinese_with_the_same_numbers(tether):
    words = ("kl", "0.8,0.2", "0.7,0.3", "--samples", "1000", "--seed", "3")
    _, english, _ = tether(*words)
    code, chinese, _ = tether(*words, "--lang", "zh")
    assert code == 0
    assert "KL(P‖Q) = 0.025732 nat = 0.037124 比特" in chinese
    assert "从 P 采样估计 KL(P‖Q)（种子 3）" in chinese
    assert re.findall(r"-?\d+\.\d+", chinese) == re.findall(r"-?\d+\.\d+", english)
    assert not {"outcome", "sum", "nats", "bits", "samples", "mean"} & set(chinese.split())


def test_an_infinite_kl_is_told_in_chinese_too(tether):
    code, out, _ = tether("kl", "0.5,0.5", "1,0", "--samples", "10", "--lang", "zh")
    assert code == 0
    assert "KL(P‖Q) = ∞ nat = ∞ 比特" in out
    assert "KL(P‖Q) 为无穷大：结果 2 在 P 下的概率是 0.5，在 Q 下是 0。" in out


def test_wrong_input_gets_one_sentence_and_code_2(tether):
    for words in (("a", "b"), ("0.5,0.6", "1,0"), ("-0.5,1.5", "1,0"), ("1", "1,0")):
        code, out, err = tether("kl", *words)
        assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_it_does_without_transformers():
    code = (
        "import sys; sys.argv = ['tether', 'kl', '0.8,0.2', '0.7,0.3', '--samples', '100']\n"
        "from tether.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('transformers' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "False", ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_output_onto_a_full_disk_ends_with_one_sentence():
    command = [sys.executable, "-m", "tether", "kl", "0.5,0.5", "0.4,0.6"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("tether: The output of this command could not be written: no sp")
    assert ended.stderr.count("\n") == 1
