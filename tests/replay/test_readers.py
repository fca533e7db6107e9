"""Trace readers: real files give the known statistics, bad input is named by file, line and reason."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kvpager.errors import InvalidArgumentError
from kvpager.replay import Columns, Trace, open_trace

from .commands import run, write_lines

ROW = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def whole(trace: Trace) -> Columns:
    columns = Columns()
    for part in trace.requests:
        columns.arrival.extend(part.arrival)
        columns.prompt_tokens.extend(part.prompt_tokens)
        columns.output_tokens.extend(part.output_tokens)
        columns.session.extend(part.session)
        columns.hash_ids.extend(part.hash_ids)
    return columns


def quantile(values: Iterable[int], share: float) -> int:
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))]


@pytest.mark.parametrize(
    ("name", "form", "count", "prompt_p50", "output_p50"),
    [
        ("mooncake_conversation_trace.jsonl.gz", "mooncake", 12031, 6909, 350),
        ("AzureLLMInferenceTrace_conv.csv.gz", "azure", 19366, 1020, 129),
        ("arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv.gz", "lengths", 28257, 2730, 167),
        ("claude_code_sessions_A.tar.xz", "sessions", 7344, 91902, 208),
    ],
)
def test_real_traces_have_their_known_statistics(
    shared_dir: Path, name: str, form: str, count: int, prompt_p50: int, output_p50: int
) -> None:
    trace = open_trace(str(shared_dir / "traces" / name))
    assert trace.format == form
    columns = whole(trace)
    assert len(columns) == count
    assert quantile(columns.prompt_tokens, 0.5) == prompt_p50
    assert quantile(columns.output_tokens, 0.5) == output_p50
    assert list(columns.arrival) == sorted(columns.arrival)


def test_servegen_draws_are_seeded(shared_dir: Path) -> None:
    path = str(shared_dir / "traces" / "servegen_deepseek-r1_clients_A.tar.xz")
    first, again, other = (whole(open_trace(path, seed=seed, requests=500)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len(first) == 500
    assert quantile(first.output_tokens, 0.5) > quantile(first.prompt_tokens, 0.5), (
        "reasoning answers at length"
    )


def test_generated_lengths_follow_the_published_quantiles() -> None:
    columns = whole(open_trace("generate:reasoning", requests=20000))
    for share, prompt, output in ((0.5, 208, 783), (0.9, 2109, 3222), (0.99, 26101, 12087)):
        assert quantile(columns.prompt_tokens, share) == pytest.approx(prompt, rel=0.1)
        assert quantile(columns.output_tokens, share) == pytest.approx(output, rel=0.1)


def test_request_lists_of_benchmark_clients_are_read(tmp_path: Path) -> None:
    rows: list[Any] = [
        {"prompt_token_ids": [1, 2, 3], "max_tokens": 7, "arrival_time": 0.5},
        {"timestamp": 1500, "input_length": 10, "output_length": 2, "session_id": "s"},
        {"timestamp": 1600, "turns": [{"isl": 4, "osl": 1}, {"isl": 9, "osl": 3, "delay": 100}]},
    ]
    columns = whole(open_trace(str(write_lines(tmp_path / "requests.jsonl", rows))))
    assert list(columns.prompt_tokens) == [3, 10, 4, 9]
    assert list(columns.arrival) == [0.5, 1.5, 1.6, 1.6]
    assert list(columns.session) == [0, 1, 2, 2]


BAD_ROWS = [
    ("{", "truncated"),
    ('{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "invalid character"),
    (ROW | {"input_length": -5}, "prompt length is -5, expected 1 to 16777216 tokens"),
    (ROW | {"output_length": 0}, "output length is 0"),
    (ROW | {"input_length": 2**40, "hash_ids": [1]}, "prompt length is 1099511627776"),
    (ROW | {"output_length": 2**40}, "output length is 1099511627776"),
    (ROW | {"input_length": 1.5}, "Expected `int`"),
    (ROW | {"timestamp": -1}, "arrival time is -0.001"),
    (ROW | {"hash_ids": [1]}, "1 hash ids contradict a prompt of 600 tokens"),
    (ROW | {"hash_ids": [2, 1]}, "hash id 2 follows the start here and id 1 before"),
    (ROW | {"hash_ids": [1, 1]}, "hash id 1 follows id 1 here and the start before"),
    ({"timestamp": 0}, "missing required field"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_bad_line_is_named_by_file_line_and_reason(tmp_path: Path, row: Any, reason: str) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [ROW, row, ROW | {"hash_ids": [1, 3]}])
    with pytest.raises(InvalidArgumentError) as caught:
        whole(open_trace(str(path), format_name="mooncake"))
    assert f"{path}: line 2: " in str(caught.value)
    assert reason in str(caught.value)
    skipping = open_trace(str(path), format_name="mooncake", skip_bad=True)
    assert len(whole(skipping)) == 2
    assert skipping.bad.count == 1


@pytest.mark.parametrize("start", [0, 1_700_000_000_000])
def test_time_of_another_age_is_refused(tmp_path: Path, start: int) -> None:
    """Ten years after the first request, in milliseconds; the first one may be anywhen."""
    row = {"input_length": 5, "output_length": 5, "hash_ids": [1]}
    times = (start, start + 315_360_000_000, start + 315_360_001_000)
    trace = write_lines(tmp_path / "trace.jsonl", [row | {"timestamp": time} for time in times])
    with pytest.raises(InvalidArgumentError, match=r"trace.jsonl: line 3: time is .* s after the first"):
        whole(open_trace(str(trace)))
    assert len(whole(open_trace(str(trace), skip_bad=True))) == 2


def test_time_that_goes_back_is_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [ROW | {"timestamp": 9000}, ROW | {"timestamp": 3000}])
    with pytest.raises(InvalidArgumentError, match=r"line 2: time goes back: 3 s after 9 s"):
        whole(open_trace(str(path)))


def test_truncated_gzip_is_refused_or_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    rows = [ROW | {"hash_ids": [2 * i, 2 * i + 1]} for i in range(3000)]
    data = gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(InvalidArgumentError, match=r"line \d+: the compressed file is damaged"):
        whole(open_trace(str(path)))
    trace = open_trace(str(path), skip_bad=True)
    assert 0 < len(whole(trace)) < 3000
    assert trace.bad.count >= 1


BAD_TABLES = [
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,1,2\nyesterday,1,2\n", 3, "yesterday"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1\n", 2, "column 3 is missing"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1,nan\n", 2, "'nan'"),
    ("prompt_len,output_len\n10,-4\n", 2, "output length is -4"),
    ("arrival,prompt_len,output_len\ninf,1,1\n", 2, "arrival time is inf"),
    ("a,b\n1,2\n", 1, "no columns of lengths"),
]


@pytest.mark.parametrize(("text", "line", "reason"), BAD_TABLES)
def test_bad_table_is_named_by_file_line_and_reason(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError) as caught:
        whole(open_trace(str(path)))
    assert f"{path}: line {line}: " in str(caught.value)
    assert reason in str(caught.value)


LINE = {"timestamp": 0, "prompt_len": 600, "output_len": 3}
BAD_REQUESTS = [
    ('{"timestamp": 0,', "truncated"),
    ('{"timestamp": NaN, "prompt_len": 5, "output_len": 3}', "invalid character"),
    ('{"timestamp": 1e999, "prompt_len": 5, "output_len": 3}', "out of range"),
    ("[1, 2]", "expected a JSON object"),
    (LINE | {"timestamp": -1}, "arrival time is -0.001"),
    (LINE | {"timestamp": "noon"}, "'timestamp' is 'noon'"),
    (LINE | {"prompt_len": -1}, "prompt length is -1"),
    (LINE | {"output_len": 2**40}, "output length is 1099511627776"),
    (LINE | {"output_len": 2.5}, "'output_len' is 2.5, expected a whole number"),
    (LINE | {"delay": -4}, "think time is -0.004"),
    (LINE | {"hash_ids": [9, 9]}, "hash id 9 follows id 9 here and the start before"),
    (LINE | {"prompt_len": None, "prompt": "text"}, "the prompt is text"),
    ({"timestamp": 0, "prompt_len": 4}, "no 'output_length'"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_REQUESTS)
def test_bad_request_line_is_named_by_file_line_and_reason(tmp_path: Path, row: Any, reason: str) -> None:
    path = write_lines(tmp_path / "requests.jsonl", [LINE, row, LINE])
    with pytest.raises(InvalidArgumentError) as caught:
        whole(open_trace(str(path)))
    assert str(caught.value).startswith(f"{path}: line 2: ")
    assert reason in str(caught.value)
    trace = open_trace(str(path), skip_bad=True)
    assert len(whole(trace)) == 2
    assert (trace.bad.count, trace.bad.first) == (1, str(caught.value))


TURN = {"t": 9, "in": 200, "out": 5, "hash_ids": [1, 2, 4], "think_time": 2}
BAD_TURNS = [
    ({"in": -5}, "request 2: prompt length is -5"),
    ({"in": 2**40}, "request 2: prompt length is 1099511627776"),
    ({"think_time": -1}, "request 2: think time is -1.0"),
    ({"think_time": float("nan")}, "invalid character"),
    ({"t": -50}, "request 2: time goes back: "),
    ({"hash_ids": [2, 1, 4]}, "request 2: hash id 2 follows the start here and id 1 before"),
    ({"hash_ids": [-1, 1]}, "request 2: a hash id is negative"),
    ({"in": "many"}, "Expected `int`, got `str`"),
]


@pytest.mark.parametrize(("turn", "reason"), BAD_TURNS)
def test_bad_session_is_named_by_file_request_and_reason(
    tmp_path: Path, turn: dict[str, Any], reason: str
) -> None:
    def write(name: str, second: dict[str, Any]) -> Path:
        first = {"t": 0, "in": 200, "out": 5, "hash_ids": [1, 2, 3]}
        path = tmp_path / name
        path.write_text(json.dumps({"block_size": 64, "requests": [first, second]}))
        return path

    write("good.json", TURN)
    bad = write("wrong.json", TURN | turn)
    with pytest.raises(InvalidArgumentError) as caught:
        whole(open_trace(str(tmp_path)))
    assert str(caught.value).startswith(f"{tmp_path}: wrong.json: ")
    assert reason in str(caught.value)
    trace = open_trace(str(tmp_path), skip_bad=True)
    assert len(whole(trace)) in (2, 3)
    assert trace.bad.count == 1
    with pytest.raises(InvalidArgumentError) as alone:
        whole(open_trace(str(bad)))
    assert str(alone.value).count("wrong.json") == 1, "the file is not said twice"


@pytest.mark.parametrize(
    ("table", "dataset", "reason"),
    [
        ("0,1\nlater,2", "{}", "trace.csv: line 2: 'later,2', expected a start and a rate"),
        ("0,1\n600,nan", "{}", "trace.csv: line 2: window 600.0 with rate nan"),
        ("0,-1", "{}", "trace.csv: line 1: window 0.0 with rate -1.0"),
        ("0,1", "{-4: 1.0}", "dataset.json: input_tokens from -4 to -4, expected 0 to 16777216"),
        ("0,1", f"{{{2**40}: 1.0}}", "dataset.json: input_tokens from 1099511627776"),
        ("0,1", f"{{{2**70}: 1.0}}", "too large"),
        ("0,1", "{4: -1.0}", "shares from -1.0 to -1.0 are no distribution"),
        ("0,1", "{4: ", "was never closed"),
    ],
)
def test_bad_client_is_named_by_file_line_and_reason(
    tmp_path: Path, table: str, dataset: str, reason: str
) -> None:
    def write(number: int, table: str, lengths: str) -> None:
        (tmp_path / f"chunk-{number}-trace.csv").write_text(table)
        period = {"input_tokens": lengths, "output_tokens": "{5: 1.0}"}
        (tmp_path / f"chunk-{number}-dataset.json").write_text(json.dumps({"0": period}))

    write(1, "0,1", "{4: 1.0}")
    write(2, table, dataset)
    with pytest.raises(InvalidArgumentError) as caught:
        whole(open_trace(str(tmp_path), requests=5))
    assert str(caught.value).startswith(f"{tmp_path}: client 2: ")
    assert reason in str(caught.value)
    trace = open_trace(str(tmp_path), requests=5, skip_bad=True)
    if dataset != "{}":
        assert len(whole(trace)) == 5
    assert trace.bad.count == 1


@pytest.mark.parametrize("share", [0.02, 0.1, 0.3])
def test_cut_off_client_set_says_so_when_bad_lines_are_skipped(tmp_path: Path, share: float) -> None:
    """Cut in its first file, in its first client, and later."""
    path = tmp_path / "clients.tar.xz"
    with tarfile.open(path, "w:xz") as archive:
        for number in range(6):
            draw = random.Random(number)
            lengths = str({length: draw.random() for length in range(1, 200)})
            period = {"input_tokens": lengths, "output_tokens": lengths}
            table = "\n".join(f"{600 * window},{draw.random()}" for window in range(100))
            for name, text in (("trace.csv", table), ("dataset.json", json.dumps({"0": period}))):
                entry = tarfile.TarInfo(f"chunk-{number}-{name}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    try:
        said = open_trace(str(path), skip_bad=True, requests=5).bad.first
    except InvalidArgumentError as error:
        said = str(error)
    assert said is not None
    assert str(path) in said
    assert "cut off" in said


def test_truncated_archive_is_refused_or_read_as_far_as_it_goes(tmp_path: Path) -> None:
    session = {"block_size": 64, "requests": [{"t": 0, "in": 200, "out": 5, "hash_ids": [1, 2, 3]}]}
    whole_file = io.BytesIO()
    with tarfile.open(fileobj=whole_file, mode="w:gz") as archive:
        for number in range(300):
            # Texts that do not compress to nothing, so that half of the bytes are about half of the members.
            noise = random.Random(number).randbytes(200).hex()
            content = json.dumps(session | {"id": noise}).encode()
            entry = tarfile.TarInfo(f"{number:03}.json")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    path = tmp_path / "sessions.tar.gz"
    path.write_bytes(whole_file.getvalue()[: len(whole_file.getvalue()) // 2])
    with pytest.raises(InvalidArgumentError, match=r"sessions.tar.gz: .*the archive is cut off"):
        open_trace(str(path))
    trace = open_trace(str(path), skip_bad=True)
    assert 50 < len(whole(trace)) < 250
    assert trace.bad.count >= 1


def test_command_names_the_bad_line_and_exits_with_2(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "trace.jsonl", [ROW, "not json", ROW | {"hash_ids": [1, 3]}])
    done = run(path, "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}: line 2: " in done.stderr
    assert done.stderr.count("\n") == 1
    skipped = run(path, "--json", "--skip-bad")
    assert skipped.returncode == 0
    (report,) = json.loads(skipped.stdout)["runs"]
    assert (report["finished"], report["skipped_lines"]) == (2, 1)


@pytest.mark.parametrize("name", ["none.jsonl", "generate:nothing"])
def test_missing_workload_is_one_line(name: str) -> None:
    done = run(name)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_empty_file_and_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    for path in (tmp_path / "empty.jsonl", tmp_path):
        with pytest.raises(InvalidArgumentError, match=str(tmp_path)):
            open_trace(str(path))
