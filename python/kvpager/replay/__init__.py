"""Real workloads: readers that stream them, and the driver that runs them through the scheduler."""

from kvpager.replay.columns import Columns
from kvpager.replay.formats import FORMATS, detect_format, open_trace
from kvpager.replay.trace import Trace

__all__ = ["FORMATS", "Columns", "Trace", "detect_format", "open_trace"]
