"""examples/random_walks: the graph, the score of a walk, and the tokens."""

import importlib.util
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest
from helpers import table

from bench.protocol import stamp, stamp_with_children
from bench.walks import common

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "random_walks"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"walks_{name}", FOLDER / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def make():
    return load("make")


@pytest.fixture(scope="module")
def graph(make):
    return make.draw_graph()


EDGES = ["bc", "ca", "bd", "de", "ea", "aa"]  # b → c → a, or b → d → e → a


@table(
    ("response", "expected"),
    [
        ("ca", 1.0),  # 3 nodes, and 3 are the fewest
        ("dea", 6 / 7),
        ("caaa", 1.0),  # what comes after a is not read
        ("cb", 0.0),  # no such edge
        ("d", 0.0),  # does not arrive
        ("", 0.0),
        ("zz", 0.0),
    ],
)
def test_a_walk_is_scored_by_how_few_nodes_it_has(response, expected):
    optimality = load("reward").optimality
    assert optimality("b", response, EDGES, shortest=3) == pytest.approx(expected)


def test_every_walk_follows_the_edges_and_ends_at_the_goal_or_after_ten_nodes(graph):
    assert len(graph.walks) == 1000
    for walk in graph.walks:
        nodes = [ord(c) - ord("a") for c in walk]
        assert all(graph.edges[a, b] for a, b in pairwise(nodes))
        assert 0 not in nodes[:-1]
        assert nodes[-1] == 0 or len(nodes) == 10


def test_the_graph_has_trlxs_size_and_every_start(graph):
    assert graph.edges.shape == (21, 21)
    assert graph.starts == [chr(ord("b") + i) for i in range(20)]
    assert not graph.edges[1:].diagonal(1).any()  # no node leads to itself
    assert graph.edges[0].tolist() == [True] + [False] * 20


def test_shortest_paths_are_what_trying_all_walks_gives(graph):
    for start in range(1, 21):
        fewest = graph.shortest(start)
        assert 2 <= fewest < 10  # so that no score divides by 0
        shorter = {start}
        for _ in range(fewest - 2):
            shorter |= {b for a, b in product(shorter, range(21)) if graph.edges[a, b]}
        assert 0 not in shorter
        assert any(graph.edges[a, 0] for a in shorter)


def test_a_letter_is_a_token(make):
    tokenizer = make.build_tokenizer()
    assert tokenizer("bca")["input_ids"] == [1, 2, 0]
    assert tokenizer.decode([1, 2, 0]) == "bca"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (21, 22, 23)


def test_the_clock_counts_only_while_it_runs(monkeypatch):
    stamps = iter([(10.0, 1.0), (12.5, 2.0), (20.0, 5.0), (21.0, 5.5)])
    monkeypatch.setattr(common, "stamp_with_children", lambda: next(stamps))
    clock = common.Clock()
    clock.stop()  # it has not begun
    for _ in range(2):
        clock.start()
        clock.stop()
    assert (clock.seconds, clock.processor) == (3.5, 1.5)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what a child used")
def test_the_processor_time_of_a_running_child_is_counted():
    work = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", work], **pipes) as child:
        child.stdout.readline()
        assert stamp_with_children()[1] - stamp()[1] > 0.4
        child.communicate(b"\n")
