"""One self-contained page with interactive plots of a comparison, and its plots as pictures."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvpager.errors import KvPagerError, MissingDependencyError
from kvpager.replay.run import without_timings
from kvpager.replay.study import Study
from kvpager.replay.trace import Trace
from kvpager.replay.watch import UNWATCHED, Watch

__all__ = [
    "NO_BROWSER",
    "PLOTS",
    "eviction_curves",
    "find_browser",
    "plots_of",
    "write_plots",
    "write_report",
]

PLOTS = ("summary", "memory", "batch", "latency", "policies", "burst", "tenants", "eviction")
"""The figures of the page, by their id."""

NO_BROWSER = "--png needs a Chromium: install the package chromium of the distribution"

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")


def write_report(
    path: Path, runs: list[dict[str, Any]], trace: Trace, study: Study, curves: list[dict[str, Any]]
) -> None:
    """Writes the page.

    Args:
        path: the file.
        runs: the runs of the study.
        trace: the workload.
        study: what was run.
        curves: hit rates by cache size, see `eviction_curves`.
    """
    settings = study.settings
    data = {
        "trace": trace.name,
        "settings": "".join(
            (
                f"{settings.blocks:,} blocks of {settings.block_size} tokens, arrivals {settings.arrivals}, ",
                f"reuse {'on' if settings.reuse else 'off'}.",
                " Interrupted: the figures are of what had run." if any(_cut(runs, study)) else "",
                *(f" {note}." for note in trace.notes),
            )
        ),
        "runs": [without_timings(run) for run in runs],
        "eviction_curves": curves,
    }
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    # Inside a script element "</script" ends it and "<!--" changes what ends it: no "<" is left.
    path.write_text(page.replace("@DATA@", json.dumps(data).replace("<", "\\u003c")), encoding="utf-8")


def _cut(runs: list[dict[str, Any]], study: Study) -> Iterator[bool]:
    """What a study that was stopped lacks."""
    yield len(runs) < len(study.planned())
    yield from (run["interrupted"] for run in runs)


def eviction_curves(study: Study, watch: Watch = UNWATCHED) -> list[dict[str, Any]] | None:
    """Hit rates of index and pool alone at an eighth to four times the study's blocks, by eviction policy.

    Returns:
        `eviction`, `blocks[]` and `hit_percent[]` of each; empty for a workload without prefix ids, None if
        it was asked to stop.
    """
    if not study.settings.reuse or study.open().hash_block == 0:
        return []
    sizes = [max(1, int(study.settings.blocks * factor)) for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4)]
    curves = []
    for eviction in study.evictions:
        hits = []
        for blocks in sizes:
            part = replace(study, settings=replace(study.settings, blocks=blocks), evictions=(eviction,))
            found = replace(part, sequential=True).run_policies(watch)
            if not found or found[0]["interrupted"]:
                return None
            run = found[0]
            hits.append(100 * run["hit_blocks"] / max(1, run["lookup_blocks"]))
        curves.append({"eviction": eviction, "blocks": sizes, "hit_percent": hits})
    return curves


def plots_of(runs: list[dict[str, Any]], curves: list[dict[str, Any]]) -> list[str]:
    """The figures that a page of these runs has: those without anything to show are left out.

    Args:
        runs: the runs.
        curves: hit rates by cache size.
    """
    timed = any(run.get("timeline") for run in runs)
    there = dict.fromkeys(PLOTS, timed) | {
        "summary": True,
        "burst": any(run.get("burst") for run in runs),
        "tenants": any(len(run.get("tenants", ())) > 1 for run in runs),
        "eviction": bool(curves),
    }
    return [plot for plot in PLOTS if there[plot]]


def find_browser() -> str | None:
    """Path of a Chromium, if there is one."""
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


def write_plots(report: Path, directory: Path, *, plots: Sequence[str] = PLOTS) -> list[Path]:
    """Takes a picture of each plot of a page, with a headless Chromium.

    Args:
        report: the page.
        directory: where the pictures go; made if it is not there.
        plots: which of them.

    Raises:
        MissingDependencyError: without a Chromium.
        KvPagerError: if the browser fails.
    """
    browser = find_browser()
    if browser is None:
        raise MissingDependencyError(NO_BROWSER)
    directory.mkdir(parents=True, exist_ok=True)
    pictures = []
    for plot in plots:
        picture = directory / f"{plot}.png"
        with tempfile.TemporaryDirectory() as profile:
            command = [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                f"--user-data-dir={profile}",
                f"--screenshot={picture.resolve()}",
                "--window-size=1120,480",
                f"{report.resolve().as_uri()}#{plot}",
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0 or not picture.is_file():
            raise KvPagerError(f"{browser} could not take {picture}: {done.stderr.strip()[-200:]}")
        pictures.append(picture)
    return pictures
