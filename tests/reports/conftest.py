"""Loads the maker of sample reports, which lies beside the tests and in no package."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from align.reports.model import RunReport


@pytest.fixture(scope="session")
def samples() -> ModuleType:
    path = Path(__file__).with_name("sample_report.py")
    spec = importlib.util.spec_from_file_location("sample_report", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def unet(samples: ModuleType) -> RunReport:
    report = samples.report()
    assert isinstance(report, RunReport)
    return report
