"""The tree of errors a user can meet; each is two lines (what is wrong, what to do) and carries its exit code.

AlignError
  UsageError        2   wrong use: an argument, a key, a path
    ConfigError         a file of settings has a wrong key or value
    TargetError         the user's workload cannot be loaded or built
    DeviceError         a device or dtype that is not there
  TraceError        2   a trace cannot be read or written
    TraceBusyError      another writer holds the path
    TraceFormatError    not a trace, truncated, or of another version
  UndecidedError    3   a run failed or gave no stable answer
  InterruptedRun  130   the user pressed Ctrl-C, or the process was told to end
"""

from __future__ import annotations

from typing import ClassVar


class AlignError(Exception):
    """Root of all errors shown to a user: `problem` names the values, `remedy` says what to do."""

    exit_code: ClassVar[int] = 2

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n{self.remedy}"


class UsageError(AlignError):
    """An argument, key or path is wrong."""


class ConfigError(UsageError):
    """A settings file holds a wrong key or value."""


class TargetError(UsageError):
    """The user's workload cannot be found, loaded or built."""


class DeviceError(UsageError):
    """A device or dtype was asked for that is not there."""


class TraceError(AlignError):
    """A trace cannot be read or written."""


class TraceBusyError(TraceError):
    """Another process is writing the same trace."""


class TraceFormatError(TraceError):
    """The file is not a trace, is truncated, or has an unknown version."""


class UndecidedError(AlignError):
    """No answer can be given: a run failed, or its results are not stable."""

    exit_code = 3


class InterruptedRun(AlignError):  # noqa: N818 - not an error of anyone's
    """The user or the system asked the run to stop."""

    exit_code = 130
