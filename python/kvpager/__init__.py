"""The memory side of an LLM inference server: paged KV cache, prefix reuse with tenants, admission."""

from kvpager._core import __version__

__all__ = ["__version__"]
