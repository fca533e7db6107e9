"""Fits the step-time model to measured steps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvpager.errors import InvalidArgumentError
from kvpager.replay.columns import BadLines
from kvpager.replay.tables import header
from kvpager.replay.text import cells_of, numbered_lines

__all__ = ["Calibration", "calibrate"]

COLUMNS = ("tokens", "context_tokens", "seconds")
MIN_STEPS = 8
ROUNDS = 50

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """Coefficients of `max(floor, per_token * tokens) + per_kv_token * context_tokens`, in seconds.

    Attributes:
        floor: shortest step.
        per_token: a token of the batch.
        per_kv_token: a token of context.
        steps: measured steps that were fitted.
        median_error: median of |predicted - measured| / measured.
        worst_error: its largest value.
    """

    floor: float
    per_token: float
    per_kv_token: float
    steps: int
    median_error: float
    worst_error: float

    @property
    def clock(self) -> tuple[float, float, float]:
        """The coefficients as a run takes them."""
        return self.floor, self.per_token, self.per_kv_token


def calibrate(path: Path) -> Calibration:
    """Fits the model to a CSV file with the columns `tokens`, `context_tokens`, `seconds`, one row a step.

    Steps are split into those that the floor bounds and those that the tokens bound, each part is fitted by
    least squares of the relative error, and the split is made again until it stays.

    Args:
        path: the file.

    Raises:
        InvalidArgumentError: with file, line and reason, or if the steps do not determine the model.
    """
    tokens, context, seconds = _read(path)
    bound_by_tokens = tokens > np.median(tokens)
    coefficients = np.zeros(3)
    for _ in range(ROUNDS):
        coefficients = _fit(path, tokens, context, seconds, bound_by_tokens)
        split = coefficients[1] * tokens > coefficients[0]
        if (split == bound_by_tokens).all():
            break
        bound_by_tokens = split
    floor, per_token, per_kv_token = (float(value) for value in coefficients)
    predicted = np.maximum(floor, per_token * tokens) + per_kv_token * context
    error = np.abs(predicted - seconds) / seconds
    return Calibration(
        floor, per_token, per_kv_token, len(seconds), float(np.median(error)), float(error.max())
    )


def _fit(
    path: Path, tokens: _Floats, context: _Floats, seconds: _Floats, bound_by_tokens: npt.NDArray[np.bool_]
) -> _Floats:
    columns = np.stack([~bound_by_tokens * 1.0, bound_by_tokens * tokens, context], axis=1)
    # Dividing a row by its measured time makes the residual a relative error.
    with np.errstate(over="ignore"):
        relative = columns / seconds[:, None]
    try:
        found, _, rank, _ = np.linalg.lstsq(relative, np.ones(len(seconds)), rcond=None)
    except np.linalg.LinAlgError as error:
        raise InvalidArgumentError(f"{path}: numbers so far apart fit no model: {error}") from error
    if rank < 3 or found[0] <= 0 or found[1] < 0 or found[2] < -1e-12:
        raise InvalidArgumentError(
            f"{path}: these steps do not determine the model (floor {found[0]:.3g}, token {found[1]:.3g}, "
            f"context token {found[2]:.3g} s): measure small and large batches at short and long contexts"
        )
    return np.asarray(np.maximum(found, 0.0), dtype=np.float64)


def _read(path: Path) -> tuple[_Floats, _Floats, _Floats]:
    names = header(path)
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise InvalidArgumentError(f"{path}: line 1: no column {missing[0]}")
    places = [names.index(name) for name in COLUMNS]
    bad = BadLines(path)
    rows = []
    lines = numbered_lines(path, bad)
    next(lines, None)
    for number, line in lines:
        try:
            cells = cells_of(line)
            values = [float(cells[place]) for place in places]
        except (ValueError, IndexError):
            values = [-1.0]
        if not all(0 <= value < float("inf") for value in values) or values[-1] <= 0:
            bad.report(number, f"expected {', '.join(COLUMNS)} as numbers, seconds above 0")
        rows.append(values)
    if len(rows) < MIN_STEPS:
        raise InvalidArgumentError(f"{path}: {len(rows)} steps, at least {MIN_STEPS} are needed")
    table = np.array(rows)
    return table[:, 0], table[:, 1], table[:, 2]
