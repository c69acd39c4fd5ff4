"""Install the whole rig in this process: reference kernels, dispatcher entries, the call log."""

from __future__ import annotations

from importlib import import_module

FAMILIES = (
    "attention",
    "inference_attention",
    "norm",
    "activation",
    "rotary",
    "linear",
    "moe",
    "quant",
    "loss",
    "movement",
)


def install() -> None:
    """Load every family of kernels and register them; called once torch_npu has been imported."""
    for family in FAMILIES:
        import_module(f"npu_rig.kernels_{family}")
    dispatch = import_module("npu_rig.dispatch")
    dispatch.install()
    import_module("npu_rig.calls").write_at_exit()
