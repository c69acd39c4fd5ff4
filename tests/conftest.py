"""What all tests share: small threads, no hub, and optional packages that CI promises to have."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    import torch

    torch.set_num_threads(min(2, torch.get_num_threads()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Where CI says that an optional package is there (ALIGN_EXPECTS=npu,ray), skipping for want of it is a failure."""
    report = yield
    expected = [name for name in os.environ.get("ALIGN_EXPECTS", "").split(",") if name]
    reason = str(report.longrepr[-1]).lower() if report.skipped and isinstance(report.longrepr, tuple) else ""
    missing = [name for name in expected if name in reason]
    if missing:
        report.outcome = "failed"
        report.longrepr = f"skipped though {missing[0]} is expected here: {reason}"
    return report
