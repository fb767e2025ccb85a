"""`tether kl` as a person meets it."""

import subprocess
import sys


def test_it_prints_both_directions_and_the_samples(tether):
    code, out, _ = tether("kl", "0.8,0.2", "0.7,0.3", "--samples", "1000", "--seed", "3")
    assert code == 0
    assert "KL(P‖Q) = 0.025732 nats = 0.037124 bits" in out
    assert "KL(Q‖P) = 0.028168 nats = 0.040637 bits" in out
    assert "from outcomes drawn from P (seed 3)" in out
    assert out.count(" k3  ") == 3  # for 10, 100 and 1000


def test_wrong_input_gets_one_sentence_and_code_2(tether):
    for words in (("a", "b"), ("0.5,0.6", "1,0"), ("-0.5,1.5", "1,0"), ("1", "1,0")):
        code, out, err = tether("kl", *words)
        assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_it_does_without_transformers():
    code = (
        "import sys; sys.argv = ['tether', 'kl', '0.8,0.2', '0.7,0.3', '--samples', '100']\n"
        "from tether.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
