"""The switches that change an Ascend NPU's numerics: how each is read and set, and until when that is possible.

Options of torch_npu go through its `set_option`; an empty value there means the chip's own default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from align.devices.base import DEFAULT, Flag, When, autocast, switch, variable
from align.dumpers.errors import UsageError

_CUBE = ("keep_dtype", "allow_fp32_down_precision", "use_fp16", "use_hf32", "use_fp32_add")
"""CubeMathType 0 to 4: what float32 products may be computed in; the last adds in groups for inner sizes over 2048."""

_VARIABLES: dict[str, tuple[tuple[str, ...], str]] = {
    # name: (values, what torch_npu does without it)
    "TORCH_NPU_USE_COMPATIBLE_IMPL": (("0", "1"), "0"),
    "INF_NAN_MODE_ENABLE": (("0", "1"), "1"),
    "INF_NAN_MODE_FORCE_DISABLE": (("0", "1"), "0"),
    "HCCL_DETERMINISTIC": (("false", "true", "strict"), "false"),
    "LCCL_DETERMINISTIC": (("0", "1"), "0"),
    "CLOSE_MATMUL_K_SHIFT": (("0", "1"), "0"),
    "ATB_MATMUL_SHUFFLE_K_ENABLE": (("0", "1"), "1"),
    "TASK_QUEUE_ENABLE": (("0", "1", "2"), "1"),
    "ASCEND_LAUNCH_BLOCKING": (("0", "1"), "0"),
    "TORCH_NPU_FALLBACK_CPU_DISABLE": (("0", "1"), "0"),
    "ACL_OP_INIT_MODE": (("0", "1", "2", DEFAULT), DEFAULT),
    "TORCH_NPU_LAZY_FUSION": (("False", "True"), "False"),
}
# Results are most exact at the default of every variable but these; "" is where it makes no difference to them.
_EXACT = {
    "CLOSE_MATMUL_K_SHIFT": "1", "ATB_MATMUL_SHUFFLE_K_ENABLE": "0", "TASK_QUEUE_ENABLE": "",
    "ASCEND_LAUNCH_BLOCKING": "", "TORCH_NPU_FALLBACK_CPU_DISABLE": "", "ACL_OP_INIT_MODE": "",
}  # fmt: skip


def npu_flags(npu: Any) -> Iterator[Flag]:
    """Every flag, given `torch.npu`."""
    yield autocast("npu")
    yield switch("npu.matmul.allow_hf32", npu.matmul, "allow_hf32", exact=False, narrows=True)
    yield switch("npu.conv.allow_hf32", npu.conv, "allow_hf32", exact=False, narrows=True)
    yield _cube_math_type(npu)
    yield Flag(
        "npu.jit_compile", ("on", "off"), "off", When.ANY_TIME,
        lambda: _jit_compile(npu),
        lambda value: npu.set_compile_mode(jit_compile=value == "on"),
    )  # fmt: skip
    yield _internal_format()
    yield from _before_first_operation(npu)
    for name, (values, usual) in _VARIABLES.items():
        yield variable("npu", name, values, usual, _EXACT.get(name, usual))


# -- options -----------------------------------------------------------------------------------------------------------


def _option(name: str) -> str:
    """The value torch_npu holds for an option; "" where nobody set it."""
    import torch_npu

    value = torch_npu._C._npu_getOption(name)
    return value.decode() if value else ""


def _set_option(name: str, value: str) -> None:
    import torch_npu

    torch_npu._C._npu_setOption({name: value})


def _cube_math_type(npu: Any) -> Flag:
    def read() -> str:
        kind = npu.matmul.cube_math_type
        return DEFAULT if kind is None else _CUBE[int(kind)]

    def write(value: str) -> None:
        if value == DEFAULT:
            _set_option("CUBE_MATH_TYPE", "")
        else:
            npu.matmul.cube_math_type = npu.CubeMathType(_CUBE.index(value))

    return Flag("npu.matmul.cube_math_type", (DEFAULT, *_CUBE), DEFAULT, When.ANY_TIME, read, write, narrows=True)


def _internal_format() -> Flag:
    """FRACTAL_NZ and its like, for tensors made from then on; torch.npu.config cannot be read, the option can."""
    return Flag(
        "npu.allow_internal_format", ("on", "off"), "off", When.ANY_TIME,
        lambda: "on" if _option("ALLOW_INTERNAL_FORMAT") == "enable" else "off",
        lambda value: _set_option("ALLOW_INTERNAL_FORMAT", "enable" if value == "on" else "disable"),
    )  # fmt: skip


def _jit_compile(npu: Any) -> str:
    # torch_npu's own question initialises the device, after which other flags can no longer be set.
    if not npu.is_initialized():
        return "on" if _option("jitCompile") == "enable" else "off"
    return "off" if npu.is_jit_compile_false() else "on"


# -- before the first operation ----------------------------------------------------------------------------------------


def _before_first_operation(npu: Any) -> Iterator[Flag]:
    for option, values, exact in (
        ("ACL_PRECISION_MODE", ("must_keep_origin_dtype", "allow_fp32_to_fp16"), "must_keep_origin_dtype"),
        ("ACL_OP_SELECT_IMPL_MODE", ("high_precision", "high_performance"), "high_precision"),
    ):
        name = f"npu.{option}"
        read = _reader(option)
        write = _latched(npu, name, read, lambda value, option=option: npu.set_option({option: value}))  # type: ignore[misc]
        yield Flag(name, (DEFAULT, *values), exact, When.BEFORE_FIRST_OP, read, write)
    name = "npu.mm_bmm_format_nd"

    def read_format() -> str:
        return "on" if npu.get_mm_bmm_format_nd() else "off"

    write = _latched(npu, name, read_format, lambda value: npu.set_mm_bmm_format_nd(value == "on"))
    yield Flag(name, ("on", "off"), "on", When.BEFORE_FIRST_OP, read_format, write)
    name = "npu.deterministic"
    yield Flag(
        name, ("on", "off"), "on", When.BEFORE_FIRST_OP, _deterministic,
        _latched(npu, name, _deterministic, lambda value: torch.use_deterministic_algorithms(value == "on")),
    )  # fmt: skip


def _deterministic() -> str:
    return "on" if torch.are_deterministic_algorithms_enabled() else "off"


def _reader(option: str) -> Callable[[], str]:
    return lambda: _option(option) or DEFAULT


def _latched(npu: Any, name: str, read: Callable[[], str], write: Callable[[str], Any]) -> Callable[[str], None]:
    """Set a value as long as that has an effect; asking for the one in force is always fine."""

    def guarded(value: str) -> None:
        if value == read():
            return
        if npu.is_initialized() or value == DEFAULT:
            raise UsageError(
                f"flag {name} is {read()!r} and can be set only before the first operation, not to {value!r} now",
                "run this plan in a process of its own",
            )
        write(value)

    return guarded
