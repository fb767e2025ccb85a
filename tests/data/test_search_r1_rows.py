"""Search-R1's own rows train as they are."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faults.searching_world import make_searching_world

from tether import api
from tether.config.load import load_config

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """A parquet of NQ rows in Search-R1's columns, and a recipe that names it."""
    folder = tmp_path_factory.mktemp("nq")
    world = make_searching_world(folder)
    (world.model / "chat_template.jinja").write_text(TEMPLATE)
    rows = [
        {
            "id": f"train_{i}",
            "question": f"question {i}?",
            "golden_answers": ["7", "seven"],
            "data_source": "nq",
            "prompt": [
                {"role": "user", "content": f"Example: <answer> 7 </answer>. Question: {i}?"}
            ],
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": ["seven", "7."]}, "style": "rule"},
            "extra_info": {"index": i, "split": "train"},
        }
        for i in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    corpus = folder / "corpus.jsonl"
    corpus.write_text('{"id": "1", "contents": "\\"k\\"\\nIt is 7."}\n')
    return world.recipe("nq", {"corpus": str(corpus)}), str(folder / "train.parquet")


def test_search_r1s_rows_are_checked_and_trained_on_as_they_are(recipe, tmp_path):
    path, data = recipe
    changes = {"data.train": data, "run.dir": str(tmp_path / "run")}
    plan = api.check(load_config(path, changes))
    assert plan.train_prompts == 4
    turns = "turns per row", "3", "with search; at most 64 tokens per observation"
    assert turns in plan.lines()
    api.train(load_config(path, changes))
    rows = [
        json.loads(line)
        for line in (tmp_path / "run/rollouts/000000.jsonl").read_text().splitlines()
    ]
    answered = {row["response"].endswith("<answer>7</answer>") for row in rows}
    assert True in answered
    for row in rows:
        # "7." is a target but for its full stop; the example in the prompt is worth nothing.
        assert row["score"] == float(row["response"].endswith("<answer>7</answer>"))
