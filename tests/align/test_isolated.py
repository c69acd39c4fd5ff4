"""A process of its own: its variables, its errors, its death, and a whole role run in one."""

import os

import pytest

from align.dumpers.errors import UndecidedError, UsageError
from align.isolated import OwnProcess


def test_a_process_has_its_variables_keeps_its_state_and_hands_back_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALIGN_NOTE", "here")
    with OwnProcess({"ALIGN_NOTE": "there", "TERM": ""}) as process:
        assert process.call("os:getenv", "ALIGN_NOTE") == "there"
        assert process.call("os:getenv", "TERM") is None
        process.call("os:putenv", "A", "b")
        assert process.call("os:getpid") == process.call("os:getpid") != os.getpid()
        with pytest.raises(UndecidedError, match="TypeError"):
            process.call("os:getenv")
        with pytest.raises(UsageError, match="unknown device 'tpu'"):
            process.call("align.devices.select:select_device", "tpu")
        with pytest.raises(UndecidedError, match=r"os:_exit died \(exit code 7\)"):
            process.call("os:_exit", 7)
    assert os.environ["ALIGN_NOTE"] == "here"


def test_a_candidate_whose_flag_holds_from_process_start_runs_in_a_process_of_its_own(tiny, align) -> None:  # type: ignore[no-untyped-def]
    ended = align(
        "run", tiny, "--device", "cpu", "--dtype", "float32", "--flag", "cpu.env.ONEDNN_MAX_CPU_ISA=AVX2", "--out", "r"
    )
    assert ended.code == 0, ended.err
    assert "candidate ran in a process of its own: cpu.env.ONEDNN_MAX_CPU_ISA=AVX2" in ended.out.replace("\n", "")
    from align.dumpers.store import Trace

    told = {}
    for role in ("baseline", "candidate"):
        with Trace.open(f"r/{role}.h5") as trace:
            told[role] = dict(trace.header.environment)["cpu.env.ONEDNN_MAX_CPU_ISA"]
    assert told == {"baseline": "default", "candidate": "AVX2"}


def test_a_flag_that_does_not_exist_is_named_before_anything_runs(tiny, align) -> None:  # type: ignore[no-untyped-def]
    ended = align("run", tiny, "--device", "cpu", "--flag", "cpu.onednm=off", "--out", "r")
    assert (ended.code, ended.err.splitlines()[0]) == (2, "align: cpu has no flag 'cpu.onednm'")
