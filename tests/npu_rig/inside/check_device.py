"""The simulated device answers what a device layer asks: name, memory, events, seeds, autocast, flags."""

from __future__ import annotations

import threading

import pytest
import torch
import torch_npu


def test_the_device_is_there_and_has_a_name() -> None:
    assert torch.npu.is_available()
    assert torch.npu.device_count() == 1
    assert torch.npu.get_device_name(0) == "Ascend910B2"
    assert torch.npu.get_device_properties(0).total_memory == 64 << 30
    assert torch_npu.npu.utils.get_cann_version() == "9.0.0"


def test_events_measure_real_time() -> None:
    start, end = torch.npu.Event(enable_timing=True), torch.npu.Event(enable_timing=True)
    start.record()
    x = torch.ones(256, 256, device="npu") @ torch.ones(256, 256, device="npu")
    end.record()
    torch.npu.synchronize()
    assert 0.0 < start.elapsed_time(end) < 60_000.0
    assert end.query()
    assert x[0, 0].item() == 256.0


def test_the_memory_peak_counts_what_was_allocated_and_can_be_reset() -> None:
    torch.npu.reset_peak_memory_stats()
    before = torch.npu.max_memory_allocated()
    x = torch.empty(1 << 20, dtype=torch.float32, device="npu")
    assert torch.npu.max_memory_allocated() - before >= x.numel() * 4
    assert torch.npu.memory_stats()["allocated_bytes.all.peak"] == torch.npu.max_memory_allocated()
    del x
    torch.npu.reset_peak_memory_stats()
    assert torch.npu.max_memory_allocated() == torch.npu.memory_allocated()


def test_fresh_memory_is_not_zero() -> None:
    torch.npu.empty_cache()
    assert torch.empty(3 << 20, device="npu").isnan().all().item()


def test_a_seed_fixes_the_numbers_and_a_state_can_be_restored() -> None:
    torch.npu.manual_seed(7)
    first, state = torch.randn(5, device="npu"), torch.npu.get_rng_state()
    second = torch.randn(5, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(second, torch.randn(5, device="npu"))
    torch.manual_seed(7)
    assert torch.equal(first, torch.randn(5, device="npu"))
    assert not torch.equal(first, second)


def test_device_draws_leave_the_cpu_generator_alone() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    torch.nn.functional.dropout(torch.ones(9, device="npu"), 0.5)
    torch.rand(3, device="npu")
    assert torch.equal(torch.rand(3), expected)


def test_dropout_keeps_the_share_it_should_and_its_gradient_matches() -> None:
    x = torch.ones(4000, device="npu", requires_grad=True)
    y = torch.nn.functional.dropout(x, 0.25)
    y.sum().backward()
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_lowers_linear_and_keeps_layer_norm_in_fp32(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4).npu()
    with torch.autocast("npu", dtype=dtype):
        y = layer(torch.ones(2, 4, device="npu"))
        z = torch.nn.functional.layer_norm(y, (4,))
    assert (y.dtype, z.dtype) == (dtype, torch.float32)


def test_precision_flags_can_be_set_and_read() -> None:
    assert torch.npu.conv.allow_hf32
    assert not torch.npu.matmul.allow_hf32
    torch.npu.conv.allow_hf32, torch.npu.matmul.allow_hf32 = False, True
    try:
        assert not torch.npu.conv.allow_hf32
        assert torch.npu.matmul.allow_hf32
    finally:
        torch.npu.conv.allow_hf32, torch.npu.matmul.allow_hf32 = True, False
    assert torch.npu.is_jit_compile_false()


def test_kernels_work_on_any_thread() -> None:
    x, results = torch.arange(6.0, device="npu"), []
    thread = threading.Thread(target=lambda: results.append((x * 2).sum().item()))
    thread.start()
    thread.join()
    assert results == [30.0]


def test_double_precision_becomes_single_on_this_device() -> None:
    # torch_npu's own doing: a float64 statistic must be taken on the host.
    assert torch.ones(2, device="npu").double().dtype is torch.float32
