"""Call functions of our own in a Python process of its own, started with environment variables of its own.

Invariant: the process lives as long as its `OwnProcess` is open, answers one call after the other, and keeps what its
functions keep; nothing of it can change this process. What the function raises, the caller gets.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from align.dumpers.errors import AlignError, UndecidedError


class OwnProcess:
    """A process that calls functions by name (`package.module:function`); arguments and results are pickled.

    variables  environment variables it starts with, beside those of this process; an empty one is left out
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this very interpreter, and our own module
                [sys.executable, "-m", "align.isolated", str(theirs.fileno())],
                env=_environment(variables), pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip
        self._pipe = Connection(ours.detach())

    def call(self, function: str, *arguments: Any) -> Any:
        """What the function returns there. Raises what it raises, and UndecidedError when the process dies."""
        try:
            self._pipe.send((function, arguments))
            is_good, value = self._pipe.recv()
        except (EOFError, OSError) as exc:
            code = self._process.wait()
            raise UndecidedError(
                f"the process that ran {function} died (exit code {code})",
                "its last words are above; run the plan without the flags that need a process of its own",
            ) from exc
        if not is_good:
            raise value
        return value

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> OwnProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    wanted = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": path, **variables}
    return {name: value for name, value in wanted.items() if value}


def serve(descriptor: int) -> None:
    """Answer calls that come through a socket until the other end closes it."""
    pipe = Connection(descriptor)
    while True:
        try:
            function, arguments = pipe.recv()
        except (EOFError, OSError):
            return
        pipe.send(_answer(function, arguments))


def _answer(function: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    module, _, name = function.partition(":")
    try:
        return True, getattr(import_module(module), name)(*arguments)
    except AlignError as exc:
        return False, exc
    except Exception as exc:
        return False, UndecidedError(f"{type(exc).__name__}: {exc}", "it was raised in a process of its own")


if __name__ == "__main__":
    serve(int(sys.argv[1]))
