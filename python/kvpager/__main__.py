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
    """Runs the command line; Ctrl-C ends it without a traceback, from the moment on that it is heard."""
    # A parent that ignores Ctrl-C for its background jobs means it.
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if is_heard:
            signal.signal(signal.SIGINT, _end_or_raise)
        from kvpager.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if is_heard:  # while the interpreter ends there is nobody to catch an exception
            signal.signal(signal.SIGINT, signal.SIG_DFL)


if __name__ == "__main__":
    main()
