"""pytest plugin: the three-way check inside a test suite, as the fixture and marker `align_check`.

    def test_block(align_check):
        align_check(model, inputs, policy="cann-l1", device="cpu", dtype="bfloat16")

    @pytest.mark.align_check(dtype="float16", limits={"head.*": 0.01})
    def test_model():
        return model, inputs

Nothing but pytest is imported until a test uses either; a suite that uses neither runs as without the plugin.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from align.reports.model import RunReport

NAME = "align_check"
_HELP = (
    f"{NAME}(**options): check the (model, inputs) that the test returns, fused, unfused and as a CPU FP32 reference; "
    "in a test that takes the fixture of that name: its default options"
)


class AlignCheck:
    """Check models within one test. Options given here win over the marker's."""

    def __init__(self, name: str, folder: Path, defaults: dict[str, Any]) -> None:
        self._name = name
        self._folder = folder
        self._defaults = defaults
        self._count = 0

    def __call__(self, model: Any, inputs: Any = (), *, candidate: Any = (), **options: Any) -> RunReport:
        """Run a model three ways and fail the test, with the reason, unless it stays within policy and limits.

        model      a module with its `inputs`; or (model, inputs), a function that returns it, or the text of a target
        candidate  your own fused variant: a module that takes the same inputs, or as for `model`; else the catalog's
        options    keys of align.toml such as policy, device, dtype, fuse, no_fuse, limits, min_speedup
        """
        __tracebackhide__ = True
        self._count += 1
        folder = self._folder / f"align-{self._count}"
        workload = _workload(model, inputs)
        variant = _workload(candidate, inputs) if candidate != () else ()
        return _run(self._name, folder, workload, variant, {**self._defaults, **options})


def _workload(model: Any, inputs: Any) -> Any:
    """A module gets the inputs; everything else brings its own."""
    return (model, inputs) if hasattr(model, "named_parameters") else model


def _run(name: str, folder: Path, workload: Any, candidate: Any, options: dict[str, Any]) -> RunReport:
    __tracebackhide__ = True
    from align.dumpers.errors import AlignError
    from align.gating.pytest_check import check_objects, failures

    try:
        checked = check_objects(name, folder, workload, candidate, options)
    except AlignError as exc:
        pytest.fail(f"align_check: {exc.problem}\n  {exc.remedy}")
    for text in failures(checked):
        pytest.fail(text)
    return checked.result.report


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known."""
    config.addinivalue_line("markers", _HELP)


@pytest.fixture
def align_check(request: pytest.FixtureRequest, tmp_path: Path) -> AlignCheck:
    """Check a model fused, unfused and as a CPU FP32 reference: `align_check(model, inputs, policy=..., dtype=...)`."""
    marker = request.node.get_closest_marker(NAME)
    return AlignCheck(request.node.name, tmp_path, dict(marker.kwargs) if marker is not None else {})


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give marked tests the fixture."""
    if (
        isinstance(item, pytest.Function)
        and item.get_closest_marker(NAME) is not None
        and NAME not in item.fixturenames
    ):
        item.fixturenames.append(NAME)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object | None:
    """Check what a marked test returns; a test that takes the fixture itself runs as any other."""
    __tracebackhide__ = True
    wanted = inspect.signature(pyfuncitem.obj).parameters
    if pyfuncitem.get_closest_marker(NAME) is None or NAME in wanted:
        return None
    made = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted if name in pyfuncitem.funcargs})
    if made is None:
        pytest.fail(f"a test marked {NAME} returns what is to be checked: (model, inputs)", pytrace=False)
    check = pyfuncitem.funcargs[NAME]
    assert isinstance(check, AlignCheck)
    try:
        check(made)
    except pytest.fail.Exception as exc:  # the test's own lines are not to blame: show the reason only
        pytest.fail(str(exc), pytrace=False)
    return True
