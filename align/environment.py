"""What a result depends on besides the model: versions, chip, threads, flags, and variables that change numerics."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch

import align
from align.devices.base import Device

# ALIGN_NOTE is free text of the user's own that every trace and report is to carry.
VARIABLES = (
    "ALIGN_NOTE", "ACL_OP_INIT_MODE", "ASCEND_HOME_PATH", "ASCEND_LAUNCH_BLOCKING", "ASCEND_RT_VISIBLE_DEVICES",
    "ATEN_CPU_CAPABILITY", "ATB_MATMUL_SHUFFLE_K_ENABLE", "CLOSE_MATMUL_K_SHIFT", "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES", "DNNL_DEFAULT_FPMATH_MODE", "HCCL_DETERMINISTIC", "INF_NAN_MODE_ENABLE",
    "INF_NAN_MODE_FORCE_DISABLE", "LCCL_DETERMINISTIC", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS", "ONEDNN_DEFAULT_FPMATH_MODE", "ONEDNN_MAX_CPU_ISA", "TASK_QUEUE_ENABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_NPU_FALLBACK_CPU_DISABLE",
    "TORCH_NPU_LAZY_FUSION", "TORCH_NPU_USE_COMPATIBLE_IMPL",
)  # fmt: skip


def describe_environment(device: Device) -> tuple[tuple[str, str], ...]:
    """(name, value) pairs: versions, chip, threads, flags in force, and the variables that are set."""
    pairs = [
        ("align", align.__version__),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("torch_npu", version_of("torch-npu")),
        ("numpy", version_of("numpy")),
        ("platform", platform.platform()),
        ("chip", device.name()),
        ("threads", str(torch.get_num_threads())),
    ]
    pairs.extend((name, flag.read()) for name, flag in sorted(device.flags().items()))
    pairs.extend((name, os.environ[name]) for name in VARIABLES if name in os.environ)
    return tuple((name, value) for name, value in pairs if value)


def version_of(distribution: str) -> str:
    """Version of an installed distribution, "" if it is not there."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
