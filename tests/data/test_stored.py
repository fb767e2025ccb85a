"""Prompts that stay in a file: arrow that is memory-mapped, and the cache of tokenised ones."""

import json
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from helpers import changed, configured, table

from tether import api
from tether.config import DataSection
from tether.data.prompts import load_heldout, load_prompts
from tether.errors import UserError
from tether.ppo.roles import build_roles
from tether.run.directory import EVENTS
from tether.run.reader import read_lines

from .test_bulk import starter  # noqa: F401

ROWS = [{"prompt": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(50)]


def write_arrow(path, rows, batch=7, stream=False) -> str:
    columns = pa.Table.from_pylist(rows)
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, new(sink, columns.schema) as writer:
        writer.write_table(columns, max_chunksize=batch)
    return str(path)


def write_lines(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def columns_of(prompts):
    return (prompts.texts, prompts.ids, prompts.columns, prompts.messages)


@table("stream", [False, True])
def test_rows_of_an_arrow_file_are_those_of_json_lines(starter, tmp_path_factory, stream):  # noqa: F811
    folder = tmp_path_factory.mktemp("rows")
    mapped = write_arrow(folder / "rows.arrow", ROWS, stream=stream)
    plain = write_lines(folder / "rows.jsonl", ROWS)
    a, b = (
        load_prompts(path, DataSection(train=path), starter, ["answer"]) for path in (mapped, plain)
    )
    assert len(a) == len(b) == 50
    assert columns_of(a.first(9)) == columns_of(b.first(9))
    assert columns_of(a.rows([49, 0, 7, 0])) == columns_of(b.rows([49, 0, 7, 0]))
    drawn = a.window(3, 120, 0, shuffle=False)
    assert columns_of(drawn) == columns_of(b.window(3, 120, 0, shuffle=False))
    assert drawn.positions[:3] == [3, 4, 5]


def test_a_pass_over_an_arrow_file_has_every_row_once_in_a_new_order(starter, tmp_path):  # noqa: F811
    path = write_arrow(tmp_path / "rows.arrow", ROWS)
    prompts = load_prompts(path, DataSection(train=path), starter)
    passes = [prompts.window(50 * n, 50, 7, shuffle=True).positions for n in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(50))
    assert passes[0] != passes[1] != list(range(50))
    split = [prompts.window(at, 10, 7, shuffle=True).positions for at in range(0, 50, 10)]
    assert [position for part in split for position in part] == passes[0]


def test_files_in_memory_and_in_none_are_mixed_by_weight(starter, tmp_path):  # noqa: F811
    files = [
        {"path": write_lines(tmp_path / "a.jsonl", ROWS[:10]), "weight": 1},
        {"path": write_arrow(tmp_path / "b.arrow", ROWS[10:]), "weight": 3},
        {"path": write_lines(tmp_path / "c.jsonl", ROWS[5:9]), "weight": 1},
    ]
    data = DataSection(train=files)
    prompts = load_prompts(data.files("train"), data, starter)
    assert prompts.sizes == [10, 40, 4]
    drawn = prompts.window(0, 10, 0, shuffle=False)
    names = [path.rpartition("/")[2] for path in drawn.files]
    assert sorted(names) == ["a.jsonl"] * 2 + ["b.arrow"] * 6 + ["c.jsonl"] * 2
    for file, position, text in zip(names, drawn.positions, drawn.texts, strict=True):
        first = {"a.jsonl": 0, "b.arrow": 10, "c.jsonl": 5}[file]
        assert text == ROWS[first + position]["prompt"]


def broken_rows() -> list[dict]:
    rows = [dict(row) for row in ROWS]
    rows[3]["prompt"] = "1+" * 400  # too long
    rows[4]["prompt"] = ""
    rows[49]["prompt"] = "9" * 900
    return rows


@pytest.mark.parametrize("kind", ["arrow", "cache"])
def test_a_broken_row_is_met_when_it_is_drawn(starter, tmp_path, kind):  # noqa: F811
    if kind == "arrow":
        path, more, unit = write_arrow(tmp_path / "r.arrow", broken_rows()), {}, "row"
    else:
        path, unit = write_lines(tmp_path / "r.jsonl", broken_rows()), "line"
        more = {"cache": str(tmp_path / "cache")}
    data = DataSection(train=path, max_prompt_tokens=64, **more)
    prompts = load_prompts(path, data, starter)
    assert prompts.rows([0, 1, 2]).positions == [0, 1, 2]
    with pytest.raises(UserError, match=rf"{unit} 4: the prompt has \d+ tokens, more than data"):
        prompts.rows([2, 3])
    with pytest.raises(UserError, match=rf"{unit} 5: "):
        prompts.rows([4])

    skipping = load_prompts(path, data.model_copy(update={"on_bad_row": "skip"}), starter)
    assert skipping.rows([2, 3, 4, 5, 49]).positions == [2, 5, 5, 5, 0]
    told = skipping.newly_broken()
    assert [f"{unit} {n}:" in problem for n, problem in zip((4, 5, 50), told, strict=True)] == [
        True
    ] * 3
    assert skipping.newly_broken() == []


def test_a_file_without_a_single_good_row_is_refused(starter, tmp_path):  # noqa: F811
    path = write_arrow(tmp_path / "r.arrow", [{"prompt": ""}, {"prompt": ""}])
    data = DataSection(train=path, on_bad_row="skip")
    with pytest.raises(UserError, match=r"no rows that can be used; .*row 1: "):
        load_prompts(path, data, starter).first(1)
    empty = pa.Table.from_pylist([], pa.schema([("prompt", pa.string())]))
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, empty.schema):
        pass
    with pytest.raises(UserError, match="has no rows"):
        load_prompts(path, data, starter)


@pytest.mark.parametrize("content", [b"", b"not arrow at all", None])
def test_a_file_that_is_no_arrow_is_refused(starter, tmp_path, content):  # noqa: F811
    path = tmp_path / "r.arrow"
    whole = Path(write_arrow(tmp_path / "whole.arrow", ROWS)).read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(UserError, match=r"r\.arrow (cannot be read as arrow|has no rows)"):
        load_prompts(str(path), DataSection(train=str(path)), starter)
    with pytest.raises(UserError, match=r"gone\.arrow"):
        load_prompts(f"{tmp_path}/gone.arrow", DataSection(train="x.arrow"), starter)


@pytest.fixture
def cached(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", ROWS)
    return DataSection(train=path, heldout=path, cache=str(tmp_path / "cache"))


def test_a_cache_is_written_once_and_read_after(starter, cached, tmp_path, monkeypatch):  # noqa: F811
    plain = load_prompts(cached.train, cached.model_copy(update={"cache": None}), starter)
    first = load_prompts(cached.train, cached, starter)
    [file] = (tmp_path / "cache").iterdir()
    written = file.read_bytes(), file.stat().st_mtime_ns
    assert first.longest == plain.longest

    def refuse(*given):
        raise AssertionError("tokenised again")

    monkeypatch.setattr("tether.data.prompts.encode_prompts", refuse)
    again = load_prompts(cached.train, cached, starter)
    [heldout] = load_heldout(cached, starter).by_name.values()
    for prompts in (first, again, heldout):
        assert columns_of(prompts.rows(range(50))) == columns_of(plain.rows(range(50)))
    assert (file.read_bytes(), file.stat().st_mtime_ns) == written


def test_a_cache_follows_the_content_of_its_file(starter, cached, tmp_path):  # noqa: F811
    load_prompts(cached.train, cached, starter)
    write_lines(tmp_path / "rows.jsonl", ROWS[:7])
    assert len(load_prompts(cached.train, cached, starter)) == 7
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_a_cache_of_another_tokenizer_is_refused(starter, cached, byte_tokenizer):  # noqa: F811
    load_prompts(cached.train, cached, starter)
    with pytest.raises(UserError, match=r"belongs to another tokenizer; remove"):
        load_prompts(cached.train, cached, byte_tokenizer)


@table(
    "fields, name",
    [
        ({"system_prompt": "Be brief."}, r"data\.system_prompt"),
        ({"chat_template": False}, "chat template"),
    ],
)
def test_a_cache_of_other_fields_is_refused(starter, tmp_path_factory, fields, name):  # noqa: F811
    folder = tmp_path_factory.mktemp("cache")
    path = write_lines(folder / "rows.jsonl", ROWS)
    data = DataSection(train=path, cache=str(folder / "cache"))
    load_prompts(path, data, starter)
    with pytest.raises(UserError, match=f"belongs to another {name}; remove"):
        load_prompts(path, DataSection(train=path, cache=str(folder / "cache"), **fields), starter)


def test_a_cache_that_cannot_be_written_is_refused(starter, cached):  # noqa: F811
    data = cached.model_copy(update={"cache": "/proc/none"})
    with pytest.raises(UserError, match=r"cannot be written: .*another folder as data\.cache"):
        load_prompts(cached.train, data, starter)


def test_a_run_from_an_arrow_file_stops_and_goes_on_bit_for_bit(tiny_config, tmp_path):
    rows = [{"prompt": f"say {i}"} for i in range(30)] + [{"prompt": ""}]
    config = changed(
        tiny_config,
        data__train=write_arrow(tmp_path / "rows.arrow", rows),
        data__heldout=None,
        data__on_bad_row="skip",
        rollout__prompts=8,
        train__iterations=5,
        train__checkpoint_every=2,
    )

    def letters(response, **row):
        return float(len(set(response)))

    whole = api.train(changed(config, run__dir=str(tmp_path / "whole")), reward=letters).run
    api.train(changed(config, run__dir=str(tmp_path / "two"), train__iterations=3), reward=letters)
    two = api.train(
        changed(config, run__dir=str(tmp_path / "two")), reward=letters, resume=True
    ).run
    a, b = ((run / "metrics.jsonl").read_text() for run in (whole, two))
    assert a == b
    kinds = [line["kind"] for line in read_lines(whole / EVENTS)]
    assert kinds.count("bad_row") == 1


FIRST_BATCH = """
    import resource, sys, time
    began = time.perf_counter()
    from transformers import AutoTokenizer
    from tether import assets
    from tether.config import DataSection
    from tether.data.prompts import load_prompts
    model = assets.resolve("tether:starter")
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    prompts = load_prompts(sys.argv[1], DataSection(train=sys.argv[1]), tokenizer, ["answer"])
    batch = prompts.for_iteration(3, 64, 0, shuffle=True)
    assert len(set(batch.positions)) == 64
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(len(prompts), time.perf_counter() - began, peak)
"""


def first_batch(tmp_path, count: int) -> tuple[int, float, float]:
    """Rows, seconds to the first batch and MiB at the peak, in a process of its own."""
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.string())])
    path = tmp_path / "rows.arrow"
    piece = 100_000
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, count, piece):
            numbers = range(start, start + piece)
            columns = [[f"{i % 1000}+{i // 1000}=?" for i in numbers], [str(i) for i in numbers]]
            arrays = [pa.array(column) for column in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), max_chunksize=8192)
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FIRST_BATCH), str(path)],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return int(said[0]), float(said[1]), int(said[2]) / 1024


@pytest.mark.long
def test_ten_million_prompts_give_a_first_batch_in_20_seconds_and_1_gib(tmp_path):
    rows, seconds, mebibytes = first_batch(tmp_path, 10_000_000)
    print(f"{rows} prompts: first batch after {seconds:.1f} s, {mebibytes:.0f} MiB at the peak")
    assert rows == 10_000_000
    assert seconds < 20
    assert mebibytes < 1024


def test_many_prompts_take_no_memory(starter, tmp_path):  # noqa: F811
    """A million rows are 40 MB of arrow; as lists they were 5.7 KB each."""
    schema = pa.schema([("prompt", pa.string())])
    path = str(tmp_path / "rows.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        batch = pa.RecordBatch.from_arrays(
            [pa.array([f"{i}+1=?" for i in range(10_000)])], schema=schema
        )
        for _ in range(100):
            writer.write_batch(batch)
    tracemalloc.start()
    prompts = load_prompts(path, DataSection(train=path), starter)
    drawn = prompts.for_iteration(5, 64, 0, shuffle=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(prompts) == 1_000_000
    assert len(set(drawn.positions)) == 64
    assert peak < 4_000_000  # a list of a million places would be 8 MB


def test_a_teacher_s_system_prompt_needs_all_prompts_in_memory(tiny_config, tmp_path):
    path = write_arrow(tmp_path / "rows.arrow", [{"prompt": "a"}])
    config = configured(tiny_config, data__train=path, model__reference_system_prompt="Be brief.")
    with pytest.raises(UserError, match=r"reads every prompt before the run"):
        build_roles(config, lambda response, **row: 1.0)
