"""`--calibrate` finds the step-time model that measured steps came from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvpager.errors import InvalidArgumentError
from kvpager.replay.calibrate import calibrate

from .commands import run, runs


def measured(path: Path, *, noise: float, steps: int = 400) -> Path:
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 4000, steps)
    context = draw.integers(1, 500_000, steps)
    seconds = (np.maximum(6e-3, 5e-5 * tokens) + 3e-8 * context) * (1 + noise * draw.standard_normal(steps))
    rows = zip(tokens, context, seconds, strict=True)
    path.write_text("tokens,context_tokens,seconds\n" + "".join(f"{t},{c},{s:.9f}\n" for t, c, s in rows))
    return path


@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 1e-4), (0.05, 0.05)])
def test_fit_recovers_the_coefficients(tmp_path: Path, noise: float, tolerance: float) -> None:
    fit = calibrate(measured(tmp_path / "steps.csv", noise=noise))
    assert fit.floor == pytest.approx(6e-3, rel=tolerance)
    assert fit.per_token == pytest.approx(5e-5, rel=tolerance)
    assert fit.per_kv_token == pytest.approx(3e-8, rel=tolerance)
    assert fit.median_error <= noise + 1e-9


def test_replay_runs_on_the_fitted_clock(tmp_path: Path) -> None:
    steps = measured(tmp_path / "steps.csv", noise=0.0)
    options = ("--requests", 1, "--arrivals", "saturate", "--no-oracle")
    (fitted,) = runs("generate:chat", *options, "--calibrate", steps)
    (preset,) = runs("generate:chat", *options)
    assert fitted["steps"] == preset["steps"]
    assert fitted["virtual_time"] == pytest.approx(preset["virtual_time"] * 6 / 4.8, rel=0.05)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n", "line 1: no column tokens"),
        ("tokens,context_tokens,seconds\n1,2,x\n", "line 2: expected"),
        ("tokens,context_tokens,seconds\n1,2,nan\n", "line 2: expected"),
        ("tokens,context_tokens,seconds\n1,2,0\n", "seconds above 0"),
        ("tokens,context_tokens,seconds\n1,2,0.1\n", "1 steps, at least 8"),
        ("tokens,context_tokens,seconds\n" + "5,5,0.1\n" * 20, "do not determine the model"),
        (
            "tokens,context_tokens,seconds\n" + "1e300,5,1e-300\n1,5,1e-300\n" * 10,
            "so far apart fit no model",
        ),
    ],
)
def test_unusable_measurements_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError, match=reason):
        calibrate(path)
    assert run("generate:chat", "--requests", 1, "--calibrate", path).returncode == 2
