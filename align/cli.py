"""The command line: gathers the commands, and turns every ending into an exit code.

Imports nothing heavy until a command runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn, cast

# Before torch is imported anywhere: a torch_npu without CANN must not break `import torch`; the npu device loads it.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

import typer

from align.commands.bisect import bisect
from align.commands.compare import compare
from align.commands.gate import gate
from align.commands.machine import doctor, init, ops
from align.commands.profile import profile
from align.commands.run import run
from align.commands.traces import import_dump, report, show
from align.dumpers.errors import AlignError

app = typer.Typer(
    name="align",
    help="Find which fusion or precision choice changed a model's numbers, and say what it is worth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for name, command in {
    "run": run, "bisect": bisect, "gate": gate, "compare": compare, "show": show, "report": report,
    "profile": profile, "ops": ops, "doctor": doctor, "init": init, "import": import_dump,
}.items():  # fmt: skip
    app.command(name)(cast("Callable[..., None]", command))


def main() -> NoReturn:
    """Run the command line; a user's mistake ends in two lines on stderr and its exit code, without a traceback."""
    try:
        ended = app(standalone_mode=False)  # click hands back the code of an Exit, and a command's None
        code = ended if isinstance(ended, int) else 0
    except AlignError as exc:
        sys.stderr.write(f"align: {exc.problem}\n       {exc.remedy}\n")
        code = exc.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(
            "align: interrupted; what was finished is kept\n       run the same command again to start over\n"
        )
        code = 130
    except BrokenPipeError:
        code = 0
    except Exception as exc:
        code = _foreign(exc)
    sys.exit(code)


def _foreign(exc: Exception) -> int:
    """Click's own errors in its own words (it imports lazily, so they are recognised by what they can do)."""
    if hasattr(exc, "exit_code") and not hasattr(exc, "show"):
        return int(exc.exit_code)
    if hasattr(exc, "show"):
        exc.show()
        return 2
    raise exc


if __name__ == "__main__":
    main()
