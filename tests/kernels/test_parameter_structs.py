"""What Python packs is what the kernels read: offsets, widths, and refusal of what does not fit."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvpager.attention import _params as params
from kvpager.errors import InvalidArgumentError


def _probe_source() -> str:
    lines = ["#include <cstddef>", "#include <cstdio>", '#include "kvpager/params.cuh"', "int main() {"]
    for struct, dtype in params.STRUCTS.items():
        lines.append(f'  std::printf("{struct} %zu\\n", sizeof(kvpager::{struct}));')
        lines += [
            f'  std::printf("{struct}.{name} %zu\\n", offsetof(kvpager::{struct}, {name}));'
            for name in dtype.names or ()
        ]
    return "\n".join([*lines, "}"])


def test_python_packs_each_struct_exactly_as_the_compiler_lays_it_out(
    repository: Path, tmp_path: Path
) -> None:
    source, program = tmp_path / "probe.cpp", tmp_path / "probe"
    source.write_text(_probe_source(), encoding="utf-8")
    include = repository / "cuda" / "include"
    subprocess.run(["g++", "-std=c++17", f"-I{include}", str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    compiled = dict(line.split() for line in printed.splitlines())
    packed: dict[str, str] = {}
    for struct, dtype in params.STRUCTS.items():
        packed[struct] = str(dtype.itemsize)
        packed |= {f"{struct}.{name}": str(dtype.fields[name][1]) for name in dtype.names}
    assert packed == compiled


def _delta(**changes: object) -> np.ndarray:
    values: dict[str, object] = {
        "block_tables": 2**40,
        "deltas": 0,
        "count": 0,
        "table_stride": 3_000_000_000,
        "capacity": 7,
        "num_rows": 1,
        "max_blocks": 1,
    }
    return params.pack(params.DELTA, **(values | changes))


def test_numbers_are_passed_in_the_width_that_the_kernel_declares() -> None:
    packed = _delta()
    assert packed["table_stride"].itemsize == 8
    assert int(packed["table_stride"][0]) == 3_000_000_000
    assert packed["capacity"].itemsize == 4
    assert int(packed["capacity"][0]) == 7


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, True, None, 1.5, "1"])
def test_a_number_that_does_not_fit_its_width_is_refused(value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="capacity"):
        _delta(capacity=value)


def test_a_missing_or_unknown_field_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="unknown_field"):
        _delta(unknown_field=1)
    with pytest.raises(InvalidArgumentError, match="block_tables"):
        params.pack(params.DELTA, capacity=1)


def test_floats_are_four_bytes_and_must_be_numbers() -> None:
    assert params.ATTENTION.fields["scale"][0] == np.float32
    names = [name for name in params.ATTENTION.names if name != "scale"]
    zero = dict.fromkeys(names, 0)
    packed = params.pack(params.ATTENTION, scale=0.1, **zero)
    assert math.isclose(float(packed["scale"][0]), 0.1, rel_tol=1e-7)
    with pytest.raises(InvalidArgumentError, match="scale"):
        params.pack(params.ATTENTION, scale=True, **zero)
