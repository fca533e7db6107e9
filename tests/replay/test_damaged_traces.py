"""Traces that are damaged or written elsewhere: the file, the line and the reason, or counted and gone on."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from .commands import run, runs, write_lines

ROW = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
LENGTHS = "input_length,output_length\n" + "100,4\n" * 5


def one_error(path: Path, *options: str) -> str:
    """The one line on stderr, which names the file."""
    done = run(path, *options)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert str(path) in done.stderr
    return done.stderr


def test_skipped_lines_are_in_the_table_in_the_json_and_on_stderr(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "trace.jsonl", [ROW, "{broken", ROW, "[]"])
    table = run(trace, "--skip-bad")
    assert table.returncode == 0, table.stderr
    assert [line.split() for line in table.stdout.splitlines() if "skipped lines" in line] == [
        ["skipped", "lines", "2"]
    ]
    said = f"kvpager: 2 bad lines skipped, the first: {trace}: line 2: "
    assert table.stderr.startswith(said)
    as_json = run(trace, "--skip-bad", "--json", "--policy", "reserve,watermark")
    for figures in json.loads(as_json.stdout)["runs"]:
        assert (figures["skipped_lines"], figures["finished"]) == (2, 2)
        assert figures["first_skipped_line"].startswith(f"{trace}: line 2: ")
    assert as_json.stderr.startswith(said)


@pytest.mark.parametrize("rows", [2000, 40000])
def test_cut_off_gzip_is_counted_and_said_not_silently_short(tmp_path: Path, rows: int) -> None:
    lines = "".join(
        json.dumps(ROW | {"timestamp": i, "hash_ids": [2 * i, 2 * i + 1]}) + "\n" for i in range(rows)
    )
    whole = gzip.compress(lines.encode())
    trace = tmp_path / "trace.jsonl.gz"
    trace.write_bytes(whole[: len(whole) * 2 // 3])
    assert "the compressed file is damaged" in one_error(trace, "--sequential")
    done = run(trace, "--skip-bad", "--sequential")
    assert done.returncode == 0, done.stderr
    assert "1 bad line skipped, the first: " in done.stderr
    assert "the compressed file is damaged, nothing after this is read" in done.stderr


def test_trace_of_bad_lines_alone_says_why_it_is_empty(tmp_path: Path) -> None:
    trace = write_lines(tmp_path / "trace.jsonl", ["{broken", "{too"])
    text = one_error(trace, "--skip-bad")
    assert f"no requests in it: 2 bad lines skipped, the first: {trace}: line 1: " in text


@pytest.mark.parametrize("seed", range(6))
def test_random_bytes_are_an_error_that_names_the_file(tmp_path: Path, seed: int) -> None:
    noise = random.Random(seed).randbytes(1 << 18)
    for name, content in (("plain.csv", noise), ("noise.csv.gz", gzip.compress(noise))):
        trace = tmp_path / name
        trace.write_bytes(content)
        assert "line 1" in one_error(trace)
        for form in ("mooncake", "requests", "lengths", "azure"):
            assert "line" in one_error(trace, "--format", form)


@pytest.mark.parametrize("form", ["auto", "mooncake", "requests", "lengths", "azure"])
def test_deeply_nested_text_names_file_and_line(tmp_path: Path, form: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("[" * 200_000)
    assert "line 1" in one_error(trace, "--format", form)
    trace.write_text('{"a": ' * 200_000)
    assert "line 1" in one_error(trace, "--format", form)


def test_deeply_nested_session_names_the_file(tmp_path: Path) -> None:
    trace = tmp_path / "session.json"
    trace.write_text('{"block_size": 64, "requests": ' + "[" * 200_000)
    assert "session.json" in one_error(trace)


def test_damaged_cell_names_its_line(tmp_path: Path) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text(LENGTHS + '"' + "9" * 200_000 + '",3\n')
    assert "line 7: not CSV: field larger" in one_error(trace)
    done = run(trace, "--skip-bad", "--json")
    assert json.loads(done.stdout)["runs"][0]["finished"] == 5


@pytest.mark.parametrize("compressed", [False, True])
def test_byte_order_mark_of_utf_8_is_no_part_of_the_trace(tmp_path: Path, compressed: bool) -> None:
    for name, text in (("a.csv", LENGTHS), ("b.jsonl", f"{json.dumps(ROW)}\n" * 5)):
        content = text.encode("utf-8-sig")
        trace = tmp_path / (f"{name}.gz" if compressed else name)
        trace.write_bytes(gzip.compress(content) if compressed else content)
        (figures,) = runs(trace)
        assert (figures["finished"], figures["skipped_lines"]) == (5, 0)
    session = {"block_size": 64, "requests": [{"t": 0, "in": 100, "out": 2, "hash_ids": [1]}]}
    trace = tmp_path / "session.json"
    trace.write_text(json.dumps(session), encoding="utf-8-sig")
    assert runs(trace)[0]["finished"] == 1


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_wide_text_is_refused_with_what_to_do(tmp_path: Path, encoding: str) -> None:
    trace = tmp_path / "lengths.csv"
    trace.write_text("\ufeff" + LENGTHS if encoding == "utf-16-be" else LENGTHS, encoding=encoding)
    assert "line 1: UTF-16 or UTF-32 text; convert it to UTF-8" in one_error(trace)


def test_pipe_is_refused_for_it_cannot_be_read_twice() -> None:
    done = run("/dev/stdin")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot be read twice" in done.stderr
