"""The NPU's flags: all of them can be read, those that may be set any time are put back, late ones are refused."""

from __future__ import annotations

import pytest
import torch

from align.devices.base import When, process_environment
from align.devices.npu import Npu
from align.dumpers.errors import UsageError

ANY_TIME = sorted(name for name, flag in Npu().flags().items() if flag.when is When.ANY_TIME)


@pytest.mark.parametrize("name", ANY_TIME)
def test_a_flag_takes_every_value_and_is_put_back(name: str) -> None:
    flag = Npu().flags()[name]
    before = flag.read()
    for value in flag.values:
        with Npu().set_flags({name: value}):
            assert flag.read() == value
        assert flag.read() == before


def test_exact_float32_switches_hf32_off_and_only_what_can_be_set_now() -> None:
    exact = Npu().exact_flags()
    assert exact["npu.conv.allow_hf32"] == exact["npu.matmul.allow_hf32"] == "off"
    assert set(exact) == set(ANY_TIME)


@pytest.mark.parametrize(
    "name", ["npu.ACL_PRECISION_MODE", "npu.mm_bmm_format_nd", "npu.deterministic", "npu.env.TASK_QUEUE_ENABLE"]
)
def test_a_late_flag_is_an_error_unless_it_is_in_force(name: str) -> None:
    torch.ones(2).npu()
    flag = Npu().flags()[name]
    flag.write(flag.read())
    other = next(value for value in reversed(flag.values) if value != flag.read())
    with pytest.raises(UsageError, match="can be set"):
        flag.write(other)


def test_variables_become_the_environment_of_a_process() -> None:
    flags = {"npu.env.INF_NAN_MODE_ENABLE": "0", "npu.env.ACL_OP_INIT_MODE": "default", "npu.conv.allow_hf32": "on"}
    assert process_environment(flags) == {"INF_NAN_MODE_ENABLE": "0", "ACL_OP_INIT_MODE": ""}


def test_an_npu_computes_no_float64() -> None:
    assert Npu().why_no_dtype(torch.float64)
    assert Npu().why_no_dtype(torch.bfloat16) == ""
