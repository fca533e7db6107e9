"""The CUDA kernels on a device: sources from the package, compiled by CuPy's run-time compiler, cached.

Importing this module imports no CuPy and touches no device; the first call that needs one does.

    >>> from kvpager.attention import kernels
    >>> kernels.source_text("append_kv")[:2]
    '//'
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpager.attention._manifest import Instantiation, all_instantiations
from kvpager.errors import KvPagerError, MissingDependencyError

if TYPE_CHECKING:
    from kvpager.attention._launch import Launch

__all__ = [
    "INSTALL_HINT",
    "NoDeviceError",
    "all_instantiations",
    "compile_all",
    "compile_options",
    "cuda_status",
    "launch",
    "load_cupy",
    "require_device",
    "source_dir",
    "source_text",
]

INSTALL_HINT = "pip install 'kvpager[cuda13]'"
"""What brings CuPy, the run-time compiler and its headers."""

SHARED_BYTES_WITHOUT_OPT_IN = 48 * 1024

_NO_DEVICE = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice", "cudaErrorStubLibrary")
_lock = threading.Lock()
_modules: dict[tuple[int, str], Any] = {}
_functions: dict[tuple[int, str], Any] = {}


class NoDeviceError(KvPagerError, RuntimeError):
    """CuPy is there, but no CUDA device or driver is. Host arrays work without one."""


def source_dir() -> Path:
    """The folder of the kernel sources inside the installed package.

    Raises:
        MissingDependencyError: The package was installed without its kernels.
    """
    folder = Path(str(importlib.resources.files("kvpager"))) / "cuda"
    if not (folder / "include" / "kvpager" / "port.cuh").is_file():
        raise MissingDependencyError(f"the kernel sources are missing from {folder}: reinstall kvpager")
    return folder


def source_text(kernel: str) -> str:
    """The source of one kernel file, by its name without the ending."""
    return (source_dir() / f"{kernel}.cu").read_text(encoding="utf-8")


def load_cupy() -> Any:
    """Imports CuPy.

    Returns:
        The module.

    Raises:
        MissingDependencyError: CuPy is not installed; the text has the install command.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise MissingDependencyError(f"CuPy is needed for CUDA arrays: {INSTALL_HINT} ({error})") from error


def _require_device(cupy: Any) -> int:
    """The current device's number.

    Raises:
        NoDeviceError: There is no usable driver or device.
    """
    try:
        if cupy.cuda.runtime.getDeviceCount() == 0:
            raise NoDeviceError("no CUDA device is visible")
        return int(cupy.cuda.runtime.getDevice())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if any(name in str(error) for name in _NO_DEVICE):
            raise NoDeviceError(f"no CUDA device can be used: {error}") from error
        raise


def require_device() -> int:
    """The current device's number.

    Raises:
        MissingDependencyError: CuPy is missing.
        NoDeviceError: There is no usable driver or device.
    """
    return _require_device(load_cupy())


def compile_options(folder: Path, *, debug: bool = False) -> tuple[str, ...]:
    """Options of the run-time compiler, without the architecture.

    Args:
        folder: as `source_dir` gives it.
        debug: whether out-of-range block ids trap.

    Returns:
        The options.
    """
    options = ("-std=c++17", f"-I{folder / 'include'}")
    return (*options, "-DKV_DEBUG") if debug else options


def _function(cupy: Any, instantiation: Instantiation, device: int) -> Any:
    """The compiled kernel; a file is compiled for the instantiation asked for, and kept."""
    key = (device, instantiation.name)
    found = _functions.get(key)
    if found is not None:
        return found
    with _lock:
        found = _functions.get(key)
        if found is None:
            try:
                module = cupy.RawModule(
                    code=source_text(instantiation.kernel),
                    options=compile_options(source_dir()),
                    name_expressions=[instantiation.name],
                )
                found = module.get_function(instantiation.name)
            except Exception as error:
                if "NotFound" in type(error).__name__ or isinstance(error, ImportError):
                    raise MissingDependencyError(
                        f"CUDA's run-time compiler is needed: {INSTALL_HINT} ({str(error).splitlines()[0]})"
                    ) from error
                raise
            _modules[key] = module
            _functions[key] = found
    return found


def launch(launches: list[Launch], stream: Any = None) -> None:
    """Runs launches in order on a stream.

    Args:
        launches: as `kvpager.attention._launch` makes them.
        stream: a CuPy stream; None: the caller's current one.

    Raises:
        MissingDependencyError: CuPy or the run-time compiler is missing.
        NoDeviceError: There is no device.
    """
    cupy = load_cupy()
    device = _require_device(cupy)
    for item in launches:
        function = _function(cupy, item.instantiation, device)
        if item.shared_bytes > SHARED_BYTES_WITHOUT_OPT_IN:
            function.max_dynamic_shared_size_bytes = item.shared_bytes
        function(
            item.grid, (item.threads, 1, 1), (item.arguments,), shared_mem=item.shared_bytes, stream=stream
        )


def compile_all(instantiations: list[Instantiation] | None = None) -> int:
    """Compiles kernels now instead of at their first call, e.g. before a graph is captured.

    Args:
        instantiations: which; None: all of `all_instantiations()`.

    Returns:
        How many are ready.

    Raises:
        MissingDependencyError: CuPy or the run-time compiler is missing.
        NoDeviceError: There is no device.
    """
    cupy = load_cupy()
    device = _require_device(cupy)
    wanted = all_instantiations() if instantiations is None else instantiations
    for instantiation in wanted:
        _function(cupy, instantiation, device)
    return len(wanted)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _cupy_version() -> str | None:
    """The version of whichever CuPy distribution is installed."""
    for name in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _probe(read: Any) -> tuple[Any, str | None]:
    """A value, or why it cannot be read."""
    try:
        return read(), None
    except Exception as error:
        return None, _first_line(error)


def _devices(cupy: Any) -> list[dict[str, object]]:
    runtime = cupy.cuda.runtime
    found: list[dict[str, object]] = []
    for number in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(number)
        name = properties["name"]
        found.append(
            {
                "id": number,
                "name": name.decode() if isinstance(name, bytes) else str(name),
                "compute_capability": f"{properties['major']}.{properties['minor']}",
                "memory_bytes": int(properties["totalGlobalMem"]),
                "multiprocessors": int(properties["multiProcessorCount"]),
            }
        )
    return found


def cuda_status() -> dict[str, object]:
    """What of CUDA is there, for `kvpager doctor`. Never raises, never needs a device.

    Returns:
        `cupy` (version or None), `driver`, `runtime`, `nvrtc` (versions or None), `devices` (a list of dicts
        with id, name, compute_capability, memory_bytes, multiprocessors), `kernels` (how many there are),
        `usable` (whether they can run), and `missing`: a list of dicts with `what`, `reason`, `install`.
    """
    status: dict[str, object] = {"cupy": _cupy_version(), "driver": None, "runtime": None, "nvrtc": None}
    missing: list[dict[str, str]] = []
    devices: list[dict[str, object]] = []
    _, sources_fault = _probe(source_dir)
    if sources_fault:
        missing.append({"what": "kernel sources", "reason": sources_fault, "install": "pip install kvpager"})
    cupy, fault = _probe(load_cupy)
    if cupy is None:
        missing.append({"what": "CuPy", "reason": fault or "", "install": INSTALL_HINT})
    else:
        driver, _ = _probe(cupy.cuda.runtime.driverGetVersion)
        status["driver"] = driver or None
        status["runtime"], _ = _probe(cupy.cuda.runtime.runtimeGetVersion)
        nvrtc, fault = _probe(lambda: ".".join(map(str, cupy.cuda.nvrtc.getVersion())))
        status["nvrtc"] = nvrtc
        if nvrtc is None:
            missing.append(
                {"what": "NVRTC (run-time compiler)", "reason": fault or "", "install": INSTALL_HINT}
            )
        found, fault = _probe(lambda: _devices(cupy))
        devices = found or []
        if not devices:
            reason = fault or "no device is visible"
            install = "install an NVIDIA driver for CUDA 13 (release 580 or newer)"
            missing.append({"what": "CUDA device", "reason": reason, "install": install})
    status |= {"devices": devices, "kernels": len(all_instantiations()), "missing": missing}
    status["usable"] = not missing
    return status
