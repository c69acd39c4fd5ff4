"""The CPU's own fused kernels: against float64, in every dtype and layout, and what they refuse."""

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from align.dumpers.errors import UsageError
from align.operators import _cpu, _loops, add_rms_norm, geglu, group_norm_silu, rms_norm, rotary, swiglu

LOW = (torch.bfloat16, torch.float16)
EVERY = (torch.float32, *LOW)
LAST = torch.channels_last
OPERATORS = {
    "rms_norm": rms_norm.RMS_NORM, "add_rms_norm": add_rms_norm.ADD_RMS_NORM,
    "group_norm_silu": group_norm_silu.GROUP_NORM_SILU, "swiglu": swiglu.SWIGLU, "geglu": geglu.GEGLU,
    "rotary": rotary.ROTARY,
}  # fmt: skip


def numbers(*shape, scale=1.0):
    return torch.randn(shape) * scale


def rms(x, weight, plus_one=False):
    return {"x": x, "weight": weight, "eps": 1e-6, "plus_one": plus_one, "dtype": None}


def summed(x1, x2, weight):
    return {"x1": x1, "x2": x2, "weight": weight, "eps": 1e-6, "plus_one": False, "dtype": None}


def group(x, groups, *, bare=False):
    weight, bias = (None, None) if bare else (numbers(x.shape[1]), numbers(x.shape[1]))
    return {"x": x, "groups": groups, "weight": weight, "bias": bias, "eps": 1e-5}


def gates(gate, up, act):
    return {"gate": gate, "up": up, "packed": None, "gate_first": True, "act": act}


def turn(x, angle):
    return {"x": x, "cos": angle.cos(), "sin": angle.sin(), "interleaved": False}


def cases():
    """(name, operator, arguments in float32)."""
    torch.manual_seed(1)
    return [
        ("one row", "rms_norm", rms(numbers(1, 7), numbers(7))),
        ("odd rows", "rms_norm", rms(numbers(3, 5, 129), numbers(129))),
        ("huge row", "rms_norm", rms(numbers(2, 300_001, scale=20.0), numbers(300_001))),
        ("transposed", "rms_norm", rms(numbers(2, 33, 20).transpose(1, 2), numbers(33))),
        ("sliced, strided weight", "rms_norm", rms(numbers(4, 80)[:, 3:70], numbers(134)[::2])),
        ("1 + weight", "rms_norm", rms(numbers(3, 64), numbers(64), plus_one=True)),
        ("no weight", "rms_norm", rms(numbers(3, 64), None)),
        ("sum", "add_rms_norm", summed(numbers(3, 65), numbers(65, 3).T, numbers(65))),
        ("sum of huge rows", "add_rms_norm", summed(numbers(1, 5000), numbers(1, 5000), numbers(5000))),
        ("maps", "group_norm_silu", group(numbers(2, 12, 5, 7), 4)),
        ("large mean", "group_norm_silu", group(numbers(1, 8, 9, 9) + 30.0, 2)),
        ("large map", "group_norm_silu", group(numbers(1, 4, 70, 71), 2, bare=True)),
        ("channels last", "group_norm_silu", group(numbers(3, 12, 9, 15).to(memory_format=LAST), 4)),
        ("channels last, large mean", "group_norm_silu", group(numbers(2, 8, 9, 9).to(memory_format=LAST) + 30.0, 2)),
        ("sequence", "group_norm_silu", group(numbers(2, 6, 11), 3)),
        ("no area", "group_norm_silu", group(numbers(5, 16), 2)),
        ("sliced map", "group_norm_silu", group(numbers(2, 8, 6, 9)[..., 1:8], 2)),
        ("apart", "swiglu", gates(numbers(3, 77, scale=3.0), numbers(3, 77), "silu")),
        ("wide range", "swiglu", gates(torch.linspace(-120, 120, 999), numbers(999), "silu")),
        ("halves of one", "swiglu", gates(*numbers(2, 3, 66).chunk(2, -1), "silu")),
        ("permuted", "swiglu", gates(numbers(5, 4, 6).permute(2, 0, 1), numbers(6, 5, 4), "silu")),
        ("erf", "geglu", gates(numbers(3, 3001, scale=3.0), numbers(3, 3001), "gelu")),
        ("erf, wide range", "geglu", gates(torch.linspace(-12, 30, 999), torch.ones(999), "gelu")),
        ("tanh", "geglu", gates(numbers(7, 31, scale=3.0), numbers(7, 31), "gelu_tanh")),
        ("heads", "rotary", turn(numbers(2, 6, 3, 16).transpose(1, 2), numbers(6, 16))),
        ("angles with a batch", "rotary", turn(numbers(2, 3, 5, 10), numbers(2, 1, 5, 10))),
        ("two axes", "rotary", turn(numbers(5, 8), numbers(5, 8))),
        ("five axes", "rotary", turn(numbers(2, 2, 3, 5, 8), numbers(5, 8))),
        ("every second row", "rotary", turn(numbers(2, 3, 10, 8)[:, :, ::2], numbers(5, 8))),
    ]  # fmt: skip


CASES = {f"{operator}: {name}": (operator, arguments) for name, operator, arguments in cases()}


def cast(arguments, dtype):
    return {name: value.to(dtype) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def both(case, dtype):
    """The kernel's result, the unfused form's, and the formula's in float64 of the same rounded arguments."""
    operator, arguments = CASES[case]
    low = cast(arguments, dtype)
    entry = OPERATORS[operator]
    return entry.kernels["cpu"].run(**low), entry.unfused(**low), exact(operator, **cast(low, torch.float64))


def exact(operator, **a):
    if operator == "add_rms_norm":
        return exact("rms_norm", x=a.pop("x1") + a.pop("x2"), **a)
    if operator == "rms_norm":
        gain = 1.0 if a["weight"] is None else a["weight"] + (1.0 if a["plus_one"] else 0.0)
        return a["x"] / (a["x"].pow(2).mean(-1, keepdim=True) + a["eps"]).sqrt() * gain
    if operator == "group_norm_silu":
        return F.silu(F.group_norm(a["x"], a["groups"], a["weight"], a["bias"], a["eps"]))
    if operator == "rotary":
        return rotary.unfused(**a)
    gate = a["gate"]
    if a["act"] == "gelu":  # erfc keeps its digits where 1 + erf loses them
        return gate * 0.5 * torch.special.erfc(-gate * math.sqrt(0.5)) * a["up"]
    if a["act"] == "gelu_tanh":
        return gate * torch.sigmoid(math.sqrt(8 / math.pi) * (gate + 0.044715 * gate**3)) * a["up"]
    return gate * torch.sigmoid(gate) * a["up"]


def last_place(value, dtype):
    """The distance of neighbours around a value."""
    limits = torch.finfo(dtype)
    exponent = torch.floor(torch.log2(value.abs().double().clamp_min(limits.smallest_normal)))
    return torch.exp2(exponent) * limits.eps


@pytest.mark.parametrize("case", CASES)
def test_in_float32_a_kernel_is_within_a_millionth_of_float64(case):
    got, _, expected = both(case, torch.float32)
    assert got.shape == expected.shape
    assert got.dtype == torch.float32
    assert (got.double() - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("case", CASES)
def test_in_low_precision_a_kernel_rounds_once(case, dtype):
    got, unfused, expected = both(case, dtype)
    assert got.dtype == dtype
    assert unfused.dtype == dtype
    right = expected.to(torch.float32).to(dtype)
    off = (got.double() - right.double()).abs() / last_place(right, dtype)
    cancelled = expected.abs() < 1e-4 * expected.abs().max()  # a sum of products near zero keeps float32's own error
    assert float(off[~cancelled].max()) <= 1.0
    assert (got.double() - expected).norm() <= (unfused.double() - expected).norm() * 1.001


@pytest.mark.parametrize("dtype", LOW)
def test_every_16_bit_float_is_read_as_torch_reads_it(dtype):
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    got = torch.empty(len(values))
    _loops.convert(values.data_ptr(), _cpu._TAGS[dtype], got.data_ptr(), _cpu._TAGS[torch.float32], len(values))
    torch.testing.assert_close(got, values.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", LOW)
def test_every_kind_of_float32_is_stored_as_torch_stores_it(dtype):
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), dtype=torch.int64).to(torch.int32)
    values = torch.cat(
        (bits.view(torch.float32), torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 65519.99, 65520.0, 3.4e38]))
    )
    near = (torch.randn(200_000) * 10.0 ** torch.randint(-9, 6, (200_000,))).to(dtype).float()
    ties = near + last_place(near, dtype).float() / 2
    for rows in (values, ties):
        got = torch.empty(len(rows), dtype=dtype)
        _loops.convert(rows.data_ptr(), _cpu._TAGS[torch.float32], got.data_ptr(), _cpu._TAGS[dtype], len(rows))
        assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), rows.to(dtype).nan_to_num(7.0, 8.0, 9.0))
        assert torch.equal(got.isnan(), rows.isnan())


def test_threads_change_no_bit():
    x, weight = numbers(1024, 512).to(torch.bfloat16), numbers(512).to(torch.bfloat16)
    maps, last = numbers(2, 32, 80, 80), numbers(2, 32, 80, 80).to(memory_format=LAST)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            results.append((
                _cpu.rms_norm(x, weight, 1e-6), _cpu.gated("swiglu", x, x),
                _cpu.group_norm_silu(maps, 8, None, None, 1e-5), _cpu.group_norm_silu(last, 8, None, None, 1e-5),
            ))  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_mixed_dtypes_give_what_the_unfused_form_gives():
    x, weight = numbers(3, 64).to(torch.bfloat16), numbers(64)
    for arguments in (rms(x, weight), rms(x, weight) | {"dtype": torch.bfloat16}, rms(x, weight, plus_one=True)):
        got, expected = _cpu.rms_norm(**arguments), rms_norm.unfused(**arguments)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got.float(), expected.float(), rtol=2**-7, atol=0)
    angle = numbers(3, 64)
    assert _cpu.rotary(x, angle.cos(), angle.sin()).dtype == torch.float32


def test_layouts_are_kept():
    assert _cpu.group_norm_silu(numbers(2, 8, 3, 5).to(memory_format=LAST), 2, None, None, 1e-5).is_contiguous(
        memory_format=LAST
    )
    heads = numbers(2, 6, 3, 16).transpose(1, 2)
    assert _cpu.rotary(heads, numbers(6, 16), numbers(6, 16)).stride() == heads.stride()


def test_empty_inputs_give_empty_results():
    assert _cpu.rms_norm(numbers(0, 8), numbers(8), 1e-6).shape == (0, 8)
    assert _cpu.gated("swiglu", numbers(3, 0), numbers(3, 0)).shape == (3, 0)
    assert _cpu.rotary(numbers(0, 8), numbers(0, 8), numbers(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("loop", ["swiglu", "geglu", "geglu_tanh"])
def test_what_is_not_finite_stays_so(loop, dtype):
    gate = torch.tensor([math.inf, -math.inf, math.nan, 1.0, 1.0] * 9, dtype=dtype)
    up = torch.tensor([2.0, 2.0, 2.0, -math.inf, math.nan] * 9, dtype=dtype)
    expected = torch.tensor(
        [math.inf, math.nan, math.nan, -math.inf, math.nan] * 9, dtype=dtype
    )  # -inf * Phi: -inf * 0
    torch.testing.assert_close(_cpu.gated(loop, gate, up), expected, equal_nan=True)


def test_a_row_with_nan_is_nan_and_its_neighbours_are_not():
    x = numbers(3, 40)
    x[1, 7] = math.nan
    for dtype in EVERY:
        got = _cpu.rms_norm(x.to(dtype), None, 1e-6)
        assert got.isnan().all(-1).tolist() == [False, True, False]
        maps = _cpu.group_norm_silu(x.to(dtype).reshape(3, 2, 5, 4), 1, None, None, 1e-5)
        assert maps.isnan().flatten(1).all(-1).tolist() == [False, True, False]


def test_gradients_are_refused():
    with pytest.raises(UsageError, match="gradients"):
        _cpu.rms_norm(numbers(2, 4), numbers(4).requires_grad_(), 1e-6)


@pytest.mark.parametrize("name", OPERATORS)
def test_float64_is_refused_by_name_and_other_dtypes_are_taken(name):
    kernel, example = OPERATORS[name].kernels["cpu"], OPERATORS[name].example
    bound = example("cpu", torch.float32, 0)
    assert "float64" in kernel.refuses(bound, torch.float64)
    assert [kernel.refuses(bound, dtype) for dtype in EVERY] == ["", "", ""]


def test_where_numba_fails_a_site_is_refused_by_name(monkeypatch):
    def fail(*arguments):
        raise ImportError("no LLVM here")

    monkeypatch.setattr(_cpu, "_loop", lambda name: fail)
    refuses = _cpu.refusal(lambda **arguments: _cpu.rms_norm(**arguments), rms_norm.unfused, rms_norm.example)
    assert "no LLVM here" in refuses({}, torch.float32)


def test_the_catalog_alone_imports_no_numba():
    code = "import sys; from align.operators.registry import catalog; catalog(); sys.exit('numba' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}).returncode
        == 0
    )
