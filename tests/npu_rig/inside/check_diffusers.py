"""diffusers calls torch_npu.npu_geglu by itself as soon as the package can be imported, with CPU tensors too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from align.dumpers.naming import walk_tensors
from align.session import Session
from align.settings import RunSettings

TARGETS = Path(__file__).with_name("targets.py")


def _surveyed(device: str) -> tuple[Session, torch.Tensor]:
    session = Session(RunSettings(target=f"{TARGETS}:unet", device=device, dtype="bfloat16"))
    result = session.survey().result
    return session, next(tensor for _, tensor in walk_tensors(result))


def test_the_plain_model_fails_on_a_cpu_and_its_reference_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    _, reference = _surveyed("cpu")
    model, inputs = _built()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="npu_geglu"):
        model(*inputs)
    activations = pytest.importorskip("diffusers.models.activations")
    monkeypatch.setattr(activations, "is_torch_npu_available", lambda: False)
    model = model.to(torch.bfloat16).float()
    with torch.no_grad():
        rounded = [x.bfloat16().float() if torch.is_tensor(x) else x for x in inputs]
        by_erf = model(*rounded).sample
    # npu_geglu is asked for the tanh formula; without torch_npu the model takes erf: close, not equal.
    error = float((reference - by_erf).norm() / by_erf.norm())
    assert 0 < error < 1e-3


def _built() -> tuple[torch.nn.Module, tuple[object, ...]]:
    import importlib.util

    spec = importlib.util.spec_from_file_location("rig_targets", TARGETS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, inputs = module.unet()
    return model, inputs


@pytest.mark.parametrize("device", ["cpu", "npu"])
def test_its_geglu_is_a_site_that_the_model_wrote_fused(device: str) -> None:
    session, _ = _surveyed(device)
    geglu = [planned for planned in session.sites if planned.site.operator == "geglu"]
    assert geglu
    assert all(planned.site.is_written_fused for planned in geglu)
    assert all((planned.kernel is not None) == (device == "npu") for planned in geglu)


def test_on_a_cpu_both_runs_take_the_unfused_form() -> None:
    session, reference = _surveyed("cpu")
    for plan in (session.baseline_plan(), session.candidate_plan()):
        outcome, _ = session.run(plan)
        result = next(tensor for _, tensor in walk_tensors(outcome.result)).float()
        assert float((result - reference).norm() / reference.norm()) < 4e-2
