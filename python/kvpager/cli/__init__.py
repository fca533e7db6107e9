"""The command line: one file a command, each with a `register(app)` that adds it.

Exit codes: 0 done, 1 a check failed, 2 wrong usage or input (one clear line on stderr), 130 ended by Ctrl-C.
"""

from __future__ import annotations

import csv
import importlib
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from kvpager.errors import KvPagerError

__all__ = ["app", "main"]

_UsageError: Any = typer.BadParameter.__base__
"""Every kind of wrong usage; typer names only this one of its kinds."""

COMMANDS = ("plan", "replay", "stress", "generate", "serve", "profile", "doctor")
"""Modules of this package, in the order of `--help`. They import what is heavy inside the call."""

app = typer.Typer(
    name="kvpager",
    help="The memory side of an LLM inference server.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: the boxes of the rich one cut option names and words off in a narrow terminal.
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from kvpager import __version__

        typer.echo(f"kvpager {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keeps `kvpager COMMAND` a group even while it has one command."""


for _name in COMMANDS:
    importlib.import_module(f"kvpager.cli.{_name}").register(app)


def main() -> None:
    """Runs the command line; bad input is one line on stderr and exit code 2, never a traceback."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(130)
    except SystemExit as ended:
        # Libraries turn a closed pipe into an exit of their own.
        if isinstance(ended.__context__, BrokenPipeError):
            _leave_pipe()
        raise
    except _UsageError as usage:
        if type(usage).__name__ == "NoArgsIsHelpError":
            usage.show()
            sys.exit(2)
        _fail(usage.format_message())
    except BrokenPipeError:
        _leave_pipe()
    except (KvPagerError, OSError, OverflowError, RecursionError, UnicodeError, csv.Error) as error:
        _fail(str(error))
    sys.exit(code if isinstance(code, int) else 0)


def _leave_pipe() -> NoReturn:
    """Whoever reads the output has seen enough, as `head` has: nothing more is written, nothing is wrong."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(0)


def _fail(text: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print(f"kvpager: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)
