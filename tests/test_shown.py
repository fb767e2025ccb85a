"""Objects show themselves in a notebook: what they say, and that text of a model stays text."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml
from browser.hostile import payloads
from helpers import f64, mask_of, sequences_of, table

import tether
from tether import plots
from tether.errors import UserError
from tether.ppo.estimates import Estimate
from tether.ppo.evaluate import Evaluation
from tether.run.compare import compare_runs
from tether.run.rows import Row, read_rows
from tether.support import html
from tether.train.training import Result
from tether.types import Experience

TAGS = {"p", "div", "table", "tr", "th", "td", "h4"}
STYLE = re.compile(r"[-a-z0-9:;.,() ]*")


class Reader(HTMLParser):
    """Collects the text, and everything that is not a plain table."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.wrong = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in TAGS:
            self.wrong.append(tag)
        for name, value in attrs:
            if name != "style" or not STYLE.fullmatch(value) or "url" in value:
                self.wrong.append((name, value))

    def handle_data(self, data):
        self.cells.append(data)

    def handle_comment(self, data):
        self.wrong.append(data)

    handle_decl = handle_pi = unknown_decl = handle_comment


def read(shown: str) -> list[str]:
    reader = Reader()
    reader.feed(shown)
    reader.close()
    assert reader.wrong == []
    return reader.cells


def row(text: str) -> Row:
    numbers = {name: [0.5, -1.0] for name in ("old_log_probs", "ref_log_probs", "kl", "advantages")}
    return Row(iteration=3, row=1, prompt=text, response=text, score=1.0, finish_reason="eos",
               response_tokens=[text, "b"], **numbers)  # fmt: skip


def written(folder: Path, texts: dict | None = None, **config) -> Path:
    """A run of two iterations, whose texts are all the same."""
    run = folder / config.pop("name", "run")
    (run / "rollouts").mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump({"schema": 1, **config}))
    lines = [{"schema": 1, "iteration": i, "score/mean": i / 2, **(texts or {})} for i in (0, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = {"mean": 0.5, "low": 0.25, "high": 0.75, "count": 4, "binary": True}
    held = {"schema": 1, "iteration": 0, "sampled": one, "greedy": one, "kl": 0.0}
    (run / "evals.jsonl").write_text(json.dumps(held) + "\n")
    return run


@table("text", payloads())
def test_hostile_text_stays_text(text):
    cells = read(row(text)._repr_html_())
    assert any(cell == html.visible(text) or cell.endswith("…") for cell in cells)
    read(html.paragraph(text) + html.table([[text], [text]]))
    result = Result(Path("runs"), 1, {text: 1.0}, None, 0.0, None)
    read(result._repr_html_())


def test_hostile_names_and_settings_of_runs_stay_text(tmp_path):
    text = "<img src=x onerror=alert(1)>"
    left = written(tmp_path, {text: 1.0}, name="<b>left", reward={"kind": text})
    right = written(tmp_path, {text: 2.0}, name="right", reward={"kind": "exact_answer"})
    cells = read(compare_runs(left, right)._repr_html_())
    assert text in cells
    assert "exact_answer" in cells
    assert any("The tasks differ (reward.kind)" in cell for cell in cells)


def test_a_row_is_a_table_of_its_tokens_with_colours():
    shown = row("x")._repr_html_()
    cells = read(shown)
    assert cells[0] == "iteration 3, row 1: score 1, ended by eos"
    assert cells[2:7] == ["token", "old_log_probs", "ref_log_probs", "kl", "advantages"]
    assert cells[7:12] == ["x", "0.5", "0.5", "0.5", "0.5"]
    # 0.5 of a largest magnitude of 1: half of the strongest colour; -1: all of the other one.
    assert shown.count("rgba(36, 88, 179,0.28)") == 4
    assert shown.count("rgba(200, 80, 30,0.55)") == 4
    with pytest.raises(UserError, match="The row has no column 'values'; it has old_log_probs"):
        row("x").column("values")


@table(
    ("column", "expected"),
    [
        ([], []),
        ([0.0, 0.0], [0, 0]),
        ([1.0, -4.0, None, float("nan"), float("inf")], [0.25, -1, 0, 0, 0]),
    ],
)
def test_a_colour_is_a_share_of_the_largest(column, expected):
    assert html.tints(column) == expected


def test_an_experience_shows_shape_mean_and_range_over_the_tokens_that_count():
    sequences = sequences_of([([1], [2, 3]), ([1], [2])])
    mask = mask_of(sequences)
    cells = torch.where(mask, f64([[1.0, 2.0], [6.0, 99.0]]), 0.0).float()
    others = "sequences", "response_mask", "rows"
    names = [f for f in Experience.__dataclass_fields__ if f not in others]
    fields = dict.fromkeys(names, cells) | {"final_values": cells[:, 0]}
    shown = read(Experience(sequences=sequences, response_mask=mask, **fields)._repr_html_())
    assert shown[0] == "2 rows; 3 tokens count"
    at = shown.index("advantages")
    assert shown[at + 1 : at + 5] == ["2×2", "3", "1", "6"]
    at = shown.index("final_values")
    assert shown[at + 1 : at + 5] == ["2", "3.5", "1", "6"]


def test_a_result_shows_before_and_after():
    share = Estimate(0.5, 0.25, 0.75, 4, True)
    before = Evaluation(0, share, share, 0.0)
    after = Evaluation(5, share, Estimate(0.9, 0.8, 0.95, 4, True), 1.5)
    shown = read(Result(Path("runs/a"), 5, before, after, 12.4, None)._repr_html_())
    assert shown[0] == "5 iterations, 12 s of training; everything is in runs/a"
    assert shown[1:7] == [
        *("held-out", "before", "after"),
        *("sampled", "50.0% (25.0% – 75.0%)", "90.0% (80.0% – 95.0%)"),
    ]
    assert "after 5 iterations" in read(after._repr_html_())
    unknown = read(Result(Path("runs/a"), 0, None, None, 0.0, None)._repr_html_())
    assert len(unknown) == 1


def test_a_trace_shows_its_sections_and_is_plain_data(tiny_model_dir):
    found = tether.trace(
        "<script>alert(1)</script>", tiny_model_dir, reward=lambda response: 1.0,
        overrides={"rollout.max_response_tokens": 4},
    )  # fmt: skip
    cells = read(found._repr_html_())
    assert any("<script>" in cell for cell in cells)
    assert json.loads(json.dumps(found)) == found


def test_rows_of_a_run_without_any_or_of_another_iteration_say_so(tmp_path):
    run = written(tmp_path)
    with pytest.raises(UserError, match=r"holds no rows: there is nothing in rollouts/"):
        read_rows(run)
    (run / "rollouts/000004.jsonl").write_text(json.dumps(row("x")) + "\n")
    assert read_rows(run)[0].tokens == ["x", "b"]
    with pytest.raises(UserError, match=r"no rows of iteration 3; it has those of 4\."):
        read_rows(run, 3)
    (run / "rollouts/000004.jsonl").write_text("half a li\n")
    with pytest.raises(UserError, match=r"000004\.jsonl, line 1 is not a JSON object"):
        read_rows(run)


def test_curves_draw_what_is_there_and_say_what_is_not(tmp_path):
    one = written(tmp_path, name="one$x")
    two = written(tmp_path, name="two")
    (two / "metrics.jsonl").write_text('{"schema": 1, "iteration": 0, "score/mean": 0.5}\nbroken\n')
    figure = plots.curves(one, two, metrics=["score/mean", "kl/sequence_mean", "actor/entropy"])
    score, kl, *_ = figure.axes
    assert [list(line.get_ydata()) for line in score.lines] == [[0.0, 0.5], [0.5]]
    assert [line.get_marker() for line in score.lines] == ["None", "o"]
    assert [text.get_text() for text in score.get_legend().get_texts()] == [r"one\$x", "two"]
    assert [text.get_text() for text in kl.texts] == ["not in these runs"]
    figure.canvas.draw()

    drawn = plots.heldout(one)
    assert list(drawn.axes[0].lines[0].get_ydata()) == [0.5]
    (two / "evals.jsonl").unlink()
    empty = plots.heldout(two)
    assert [t.get_text() for t in empty.axes[0].texts] == ["no evaluations on held-out prompts"]

    bars = plots.tokens(row("a\n$"))
    assert [bar.get_height() for bar in bars.axes[0].patches] == [0.5, -1.0]
    bars.canvas.draw()


def test_a_run_of_another_schema_is_drawn_as_far_as_it_is_known(tmp_path):
    run = written(tmp_path)
    text = (run / "metrics.jsonl").read_text().replace('"schema": 1', '"schema": 0')
    (run / "metrics.jsonl").write_text(text)
    assert len(plots.curves(run).axes[0].lines) == 1
    shown = read(tether.diff(run, run)._repr_html_())
    assert any("metrics.jsonl says schema 0, this tether reads 1" in cell for cell in shown)


@table(
    ("wrong", "sentence"),
    [
        ("nowhere", "nowhere is not a folder"),
        (7, "int is not a run"),
    ],
)
def test_what_is_not_a_run_is_refused(wrong, sentence):
    with pytest.raises(UserError, match=sentence):
        plots.curves(wrong)


def test_without_matplotlib_a_sentence_stands_in_the_pictures_place(tmp_path, monkeypatch):
    run = written(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for drawn in (plots.curves(run), plots.heldout(run), plots.tokens(row("x"))):
        assert "draws with matplotlib, which is not installed" in repr(drawn)
        assert not hasattr(drawn, "_repr_html_")
        with pytest.raises(UserError, match="which is not installed"):
            drawn.savefig("x.png")
