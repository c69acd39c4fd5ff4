"""Give the simulated device kernels: aten on the host's CPU kernels, npu:: on our reference kernels.

Why the dispatcher and not a TorchDispatchMode: a mode belongs to one thread and must be entered by somebody, while
kernels registered for the device's own key (PrivateUse1) work on every thread, below autograd, autocast, inference
mode and any function or dispatch mode of the code under test, which cannot tell them from the real ones. What lies
above that key stays torch_npu's own: its autograd and autocast entries, its schemas, its C++ choice of kernels (so
F.scaled_dot_product_attention still arrives as npu::npu_fusion_attention_v3).

Invariant: an operator either has a kernel here or raises; nothing returns uninitialised memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from npu_rig import calls
from npu_rig.deviations import deviation
from npu_rig.memory import HostCall
from npu_rig.randomness import host_default_seeded, host_generator
from npu_rig.registry import KERNELS, Kernel

KEY = "PrivateUse1"
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

# These allocate, view or look at storage, or read one element, by calls that the stand-in runtime answers itself.
_NATIVE_ATEN = frozenset(
    [
        "empty.memory_format",
        "empty_strided",
        "empty_like",
        "new_empty_strided",
        "resize_",
        "resize_as_",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
        "is_set_to",
        "is_pinned",
        "_pin_memory",
        "record_stream",
        "_local_scalar_dense",
        "_to_copy",
        "_copy_from_and_resize",
        "scaled_dot_product_attention",
    ]
)
_NATIVE_NPU = frozenset(
    [
        "empty_with_format",
        "unsafe_empty_with_format",
        "empty_with_swapped_memory",
        "get_npu_format",
        "get_storage_size",
        "npu_change_data_ptr",
        "set_op_timeout_ms",
    ]
)
# torch sends an accelerator's convolution here instead of to a CPU kernel of the same name.
_RENAMED = {
    "convolution_overrideable": "convolution",
    "convolution_backward_overrideable": "convolution_backward",
}
_COMPOSED = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
# torch_npu's autograd entry of these calls a device kernel past the dispatcher: torch's own composition stands in.
_COMPOSED_AGAIN = ["fill_diagonal_", "one_hot", "slogdet", "lstm.input", "lstm.data", "gru.input"]
_libraries: list[torch.library.Library] = []


def install() -> None:
    """Register every kernel once; needs torch_npu imported."""
    if _libraries:
        return
    with warnings.catch_warnings():
        # torch says once that a kernel was registered before ours: replacing them is what we are here for.
        warnings.filterwarnings("ignore", message=".*[Oo]verriding a previously registered kernel")
        _install_aten()
        _install_npu()


def _install_aten() -> None:
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    native = _registered("aten")
    for name in sorted(native - _NATIVE_ATEN):
        overload = _overload("aten", name)
        if overload is not None and not _is_view(overload):
            _implement(library, name, _aten_kernel(overload, f"aten::{name}"))
    for name in sorted(_host_names() - native):
        overload = _overload("aten", name)
        if overload is not None and not _is_view(overload):
            _implement(library, name, _aten_kernel(overload, f"{calls.FALLBACK}aten::{name}"))

    for name in _COMPOSED_AGAIN:
        overload = _overload("aten", name)
        assert overload is not None
        library.impl(name, _composition(overload), f"Autograd{KEY}", allow_override=True)  # type: ignore[no-untyped-call]


def _composition(overload: torch._ops.OpOverload) -> Kernel:
    def run(*args: Any, **kwargs: Any) -> Any:
        return overload.decompose(*args, **kwargs)

    return run


def _install_npu() -> None:
    library = torch.library.Library("npu", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    for name in sorted(_registered("npu") - _NATIVE_NPU):
        known = KERNELS.get(name)
        _implement(library, name, _npu_kernel(known, name) if known else _absent_kernel(name))


def _implement(library: torch.library.Library, name: str, function: Kernel) -> None:
    library.impl(name, function, KEY, allow_override=True)  # type: ignore[no-untyped-call]


def _registered(namespace: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEY)
    return {name.removeprefix(f"{namespace}::") for name in names if name.startswith(f"{namespace}::")}


def _host_names() -> set[str]:
    """Names of aten operators that only a CPU kernel carries out, which torch_npu runs on the host through copies."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CPU")
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::") and not _is_composed(name)}


def _is_composed(name: str) -> bool:
    """Say whether torch builds the operator from others for any device, such as a structured one from its out= form."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in _COMPOSED)


def _overload(namespace: str, name: str) -> torch._ops.OpOverload | None:
    base, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    # torch_npu also registers its own operators under aten::, where no schema of that name exists.
    return getattr(packet, overload or "default", None)


def _is_view(overload: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in overload._schema.returns)


def _aten_kernel(overload: torch._ops.OpOverload, name: str) -> Kernel:
    base, _, kind = name.rpartition("::")[2].partition(".")
    target = _overload("aten", _RENAMED[base] + (f".{kind}" if kind else "")) if base in _RENAMED else overload
    assert target is not None
    takes_generator = any("Generator" in str(argument.type) for argument in overload._schema.arguments)
    seeded = torch.Tag.nondeterministic_seeded in overload.tags and not takes_generator

    run = deviation(name.partition("aten::")[2], target)

    def draw(*args: Any, **kwargs: Any) -> Any:
        with host_default_seeded():
            return run(*args, **kwargs)

    def draw_from(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _with_host_generator(overload, args, kwargs)
        return run(*args, **kwargs)

    return _on_host(name, draw_from if takes_generator else draw if seeded else run)


def _with_host_generator(
    overload: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    for place, argument in enumerate(overload._schema.arguments):
        if "Generator" not in str(argument.type):
            continue
        if place < len(args):
            return (*args[:place], host_generator(args[place]), *args[place + 1 :]), kwargs
        return args, {**kwargs, argument.name: host_generator(kwargs.get(argument.name))}
    return args, kwargs


def _npu_kernel(reference: Kernel, name: str) -> Kernel:
    return _on_host(f"npu::{name}", reference)


def _absent_kernel(name: str) -> Kernel:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"npu::{name} has no reference kernel on the rig: add one to tests/npu_rig/kernels_*.py"
        )

    return refuse


def _on_host(name: str, function: Callable[..., Any]) -> Kernel:
    """Wrap a function of host tensors into a kernel of device tensors that notes its name."""

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.note(name)
        call = HostCall()
        # No mode, subclass, autocast or autograd of the caller may see how the simulated device computes.
        with (
            torch._C.DisableTorchFunction(),
            torch._C._ExcludeDispatchKeyGuard(_AUTOCAST),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            lowered = [call.lower(value) for value in args]
            named = {key: call.lower(value) for key, value in kwargs.items()}
            results = function(*lowered, **named)
            call.store_resized()
            return call.lift(results)

    run.__name__ = name.replace("::", "_").replace(".", "_")
    return run
