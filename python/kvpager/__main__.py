"""The command `kvpager`, also as `python -m kvpager`."""

import sys


def main() -> None:
    """Runs the command line; Ctrl-C while its modules load ends it without a traceback."""
    try:
        from kvpager.cli import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
