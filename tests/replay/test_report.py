"""The report page: self-contained, readable in both colour schemes, opened in a real browser."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from kvpager.replay.report import PLOTS, find_browser, write_plots

from .commands import run, write_lines


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    rows = [
        {"timestamp": 100 * i, "input_length": 600, "output_length": 9, "hash_ids": [i % 7, 1000 + i]}
        for i in range(200)
    ]
    trace = write_lines(directory / "trace</script>.jsonl".replace("/", "_"), rows)
    options = (
        "--policy",
        "reserve,watermark",
        "--eviction",
        "lru",
        "--tenants",
        "round-robin:2",
        "--blocks",
        300,
        "--report",
        directory / "out.html",
    )
    done = run(trace, *options)
    assert done.returncode == 0, done.stderr
    return directory / "out.html"


def test_page_is_one_file_that_asks_for_nothing(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"(src|href)\s*=|@import|https?://(?!www\.w3\.org)", text)
    assert "prefers-color-scheme: dark" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.S)[1])  # type: ignore[index]
    assert [run["policy"] for run in data["runs"]] == ["reserve", "watermark"]
    assert data["eviction_curves"][0]["hit_percent"] == sorted(data["eviction_curves"][0]["hit_percent"])


def test_names_in_the_trace_cannot_end_the_data_or_hide_the_page(tmp_path: Path) -> None:
    names = ["</script><b>", "<!--<script>", "a&b"]
    rows = [
        {"input_length": 50, "output_length": 3, "timestamp": i, "tenant": names[i % 3]} for i in range(9)
    ]
    out = tmp_path / "out.html"
    assert run(write_lines(tmp_path / "trace.jsonl", rows), "--report", out).returncode == 0
    text = out.read_text()
    data = re.search(r'id="data">(.*?)</script>', text, re.S)
    assert data is not None
    assert "<" not in data[1]
    assert [tenant["tenant"] for tenant in json.loads(data[1])["runs"][0]["tenants"]] == names
    if find_browser() is not None:
        page = browser("--virtual-time-budget=3000", "--dump-dom", out.as_uri(), profile=tmp_path / "profile")
        assert 'data-ready="yes"' in page.stdout


def browser(*arguments: str, profile: Path) -> subprocess.CompletedProcess[str]:
    found = find_browser()
    if found is None:
        pytest.skip("no Chromium: install the distribution's package to open the report in a browser")
    fixed = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={profile}",
        "--enable-logging=stderr",
    )
    return subprocess.run(
        [found, *fixed, *arguments], capture_output=True, text=True, timeout=300, check=False
    )


def test_page_opens_without_an_error_and_draws_every_plot(page: Path, tmp_path: Path) -> None:
    done = browser("--virtual-time-budget=3000", "--dump-dom", page.as_uri(), profile=tmp_path)
    assert done.returncode == 0
    assert 'data-ready="yes"' in done.stdout, "the script ran to its end"
    assert not re.search(r"CONSOLE.*(Error|Uncaught)", done.stderr)
    for plot in PLOTS:
        figure = re.search(rf'<figure id="{plot}".*?</figure>', done.stdout, re.S)
        assert figure is not None, plot
        assert re.search(r"<path|<rect|<td", figure[0]), plot
    assert "NaN" not in done.stdout.split("<script")[0]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screenshot_has_ink_on_a_page_of_the_scheme(page: Path, tmp_path: Path, scheme: str) -> None:
    picture = tmp_path / "page.png"
    options = [f"--screenshot={picture}", "--window-size=1100,1400", page.as_uri()]
    if scheme == "dark":
        options.insert(0, "--blink-settings=preferredColorScheme=0")
    assert browser(*options, profile=tmp_path / "profile").returncode == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000, "an empty page compresses to a few kilobytes"


def test_png_directory_gets_one_picture_a_plot(page: Path, tmp_path: Path) -> None:
    if find_browser() is None:
        pytest.skip("no Chromium: install the distribution's package to take pictures of the plots")
    pictures = write_plots(page, tmp_path / "plots", plots=("memory", "latency"))
    assert [picture.stem for picture in pictures] == ["memory", "latency"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
