"""Rows of JSON lines, CSV and parquet: what is read, and what is said of what cannot be."""

import datetime
import decimal
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tether.data.files import read_file, read_rows
from tether.errors import UserError

ROWS = [{"prompt": "1+1=?", "answer": "2"}, {"prompt": "你好, “you”\nthere", "answer": ""}]


def write(path, rows: list[dict]) -> str:
    """The rows by other writers than ours: json's, csv's quoting rules by hand, pyarrow's."""
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".csv":
            quoted = [
                [f'"{cell.replace(chr(34), chr(34) * 2)}"' for cell in r.values()] for r in rows
            ]
            lines = [",".join(rows[0]), *(",".join(cells) for cells in quoted)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "A.CSV", "rows"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    path = write(tmp_path / name.lower(), ROWS)
    assert read_rows(path) == ROWS


def test_the_place_of_a_row_is_its_line_and_in_parquet_its_row(tmp_path):
    """The second row of the CSV begins on line 3, and the third, after a quoted line end, on 5."""
    rows = [*ROWS, ROWS[0]]
    places = {
        name: [row.place.rpartition(", ")[2] for row in read_file(write(tmp_path / name, rows))]
        for name in ("a.jsonl", "a.csv", "a.parquet")
    }
    assert places["a.jsonl"] == ["line 1", "line 2", "line 3"]
    assert places["a.csv"] == ["line 2", "line 3", "line 5"]
    assert places["a.parquet"] == ["row 1", "row 2", "row 3"]


CSV_PROBLEMS = [
    (b"p,a\nx\n", 2, "1 cells, but the first line names 2 columns"),
    (b"p,a\nx,y,z\n", 2, "3 cells.*quote a cell that holds a comma"),
    (b"p,a\nx,y\n\n", 3, "empty"),
    (b'p,a\n"x"y,1\n', 2, "not CSV"),
    (b'p,a\nx,y\n"open,1\n', 3, "not CSV"),
    (b"p,a\nx,\xff\n", 2, "not UTF-8"),
]


@pytest.mark.parametrize(("content", "line", "reason"), CSV_PROBLEMS)
def test_a_broken_csv_row_is_named_by_its_line(tmp_path, content, line, reason):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.csv, line {line}: .*{reason}"):
        read_rows(str(path))


def test_the_rows_after_a_broken_csv_row_are_read(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfp,a\r\nx,1\r\n"bad"y,2\r\n\xff,3\r\nz,4\r\n')
    rows = list(read_file(str(path)))
    assert [row.columns for row in rows] == [{"p": "x", "a": "1"}, {}, {}, {"p": "z", "a": "4"}]
    assert [row.problem is None for row in rows] == [True, False, False, True]


@pytest.mark.parametrize(
    ("header", "reason"),
    [(b"p,\n", "no name"), (b"p,p\n", "two columns are called 'p'"), (b"\nx\n", "no name")],
)
def test_a_csv_header_without_clear_names_is_refused(tmp_path, header, reason):
    path = tmp_path / "a.csv"
    path.write_bytes(header + b"x,y\n")
    with pytest.raises(UserError, match=rf"a\.csv, line 1: .*{reason}.*names of the columns"):
        read_rows(str(path))


@pytest.mark.parametrize("cut", [0, 3, 40, -1])
def test_a_parquet_file_that_is_cut_off_is_refused_in_one_sentence(tmp_path, cut):
    path = tmp_path / "a.parquet"
    write(path, ROWS)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"a\.parquet cannot be read as parquet.*again") as refusal:
        read_rows(str(path))
    assert "\n" not in str(refusal.value)


def test_parquet_types_become_what_json_can_say_and_bytes_are_left_out(tmp_path):
    row = {
        "prompt": [{"role": "user", "content": "hi"}],
        "when": datetime.date(2020, 1, 2),
        "price": decimal.Decimal("1.50"),
        "nested": {"scores": [1.5, None], "on": True},
        "image": b"\x00",
        "images": [{"bytes": b"\x00"}],
    }
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    [read] = read_rows(str(path))
    assert read == {
        "prompt": [{"role": "user", "content": "hi"}],
        "when": "2020-01-02",
        "price": "1.50",
        "nested": {"scores": [1.5, None], "on": True},
    }
    json.dumps(read)


def test_a_parquet_text_that_is_not_utf8_breaks_its_own_row_only(tmp_path):
    raw = pa.array([b"good", b"\xff\xfe", b"fine"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, raw.buffers())  # not validated
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": text}), path)
    rows = list(read_file(str(path)))
    assert [row.columns for row in rows] == [{"prompt": "good"}, {}, {"prompt": "fine"}]
    assert "UTF-8" in str(rows[1].problem)


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    with pytest.raises(UserError, match=r"a\.parquet: two columns are called 'prompt'"):
        read_rows(str(path))


def test_positions_go_on_from_one_parquet_batch_to_the_next(tmp_path):
    path = write(tmp_path / "a.parquet", [{"number": i} for i in range(2500)])
    rows = list(read_file(path))
    assert [row.position for row in rows] == [row.columns["number"] for row in rows]
    assert len(rows) == 2500


def read_or_refuse(path: str) -> tuple[list[dict], str]:
    """The rows, or the sentence; anything else that is raised is a failure."""
    try:
        return read_rows(path), ""
    except UserError as refusal:
        return [], str(refusal)


@given(st.binary(max_size=80), st.sampled_from(["a.csv", "a.jsonl", "a.parquet"]))
def test_any_bytes_are_read_or_refused_in_one_sentence(tmp_path_factory, content, name):
    path = tmp_path_factory.mktemp("fuzz") / name
    path.write_bytes(content)
    rows, refusal = read_or_refuse(str(path))
    assert all(isinstance(row, dict) for row in rows)
    assert refusal == "" or name in refusal
    assert "\n" not in refusal


def test_a_parquet_file_with_a_flipped_byte_is_read_or_refused(tmp_path):
    path = tmp_path / "a.parquet"
    write(path, ROWS * 20)
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(150):
        spoilt = bytearray(whole)
        spoilt[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(spoilt)
        _, refusal = read_or_refuse(str(path))
        assert "\n" not in refusal


def test_a_parquet_time_beyond_pythons_is_a_bad_row_and_the_others_are_read(tmp_path):
    columns = {
        "t": pa.array([5, 2**62], pa.timestamp("us")),
        "d": pa.array([5, 10**7], pa.date32()),
        "s": pa.array([5, 2**62], pa.duration("s")),
        "n": pa.array([[{"a": 5}], [{"a": 2**62}]], pa.list_(pa.struct({"a": pa.timestamp("us")}))),
    }
    for name, times in columns.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.table({"prompt": ["a", "b"], name: times}), path)
        good, bad = read_file(str(path))
        assert good.problem is None, name
        assert good.columns["prompt"] == "a"
        assert "a time in it is beyond the year 9999" in str(bad.problem), name
        assert bad.place.endswith("row 2")
