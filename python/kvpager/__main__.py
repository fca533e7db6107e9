"""The command `kvpager`, also as `python -m kvpager`."""

import os
import signal
import sys
from types import FrameType


def _end_or_raise(number: int, frame: FrameType | None) -> None:
    """What Ctrl-C does: it ends an import on the spot, and raises `KeyboardInterrupt` anywhere else.

    An import runs callbacks (of its module locks) out of which no exception gets: one raised there is
    printed and forgotten, and the command would go on. While modules load there is nothing to save.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        frame = frame.f_back
    signal.default_int_handler(number, frame)


def main() -> None:
    """Runs the command line; Ctrl-C while its modules load ends it without a traceback."""
    # A parent that ignores Ctrl-C for its background jobs means it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_or_raise)
    try:
        from kvpager.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
