"""The CPU's fused kernels: one compiled loop each, float32 inside, one rounding at the store.

A loop does units `first` to `last` of its work (rows, groups), so that threads can share it; what one unit gives does
not depend on the split. Sums run in float32 over blocks that fit the first cache, and over blocks in float64. Tensors
come as addresses with a tag for their type (see `_loop_numbers`), strides in elements.
"""

# numba's decorators carry no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from align.dumpers.dtypes import Array
from align.operators._loop_numbers import PLAIN, SUMS, at, gelu, gelu_tanh, load, silu, store

_BLOCK = 2048  # elements
_NONE = np.float32(0.0)


@njit(**PLAIN)
def convert(x: int, x_tag: Any, out: int, out_tag: Any, count: int) -> None:
    """out = x in another type, as every loop reads and rounds; no kernel needs it alone."""
    source, target = at(x, 0, count, x_tag), at(out, 0, count, out_tag)
    for i in range(count):
        store(target, i, load(source, i))


# -- root mean square --------------------------------------------------------------------------------------------------


@njit(**SUMS)
def _squares(x: Array) -> Any:
    total = _NONE
    for i in range(x.size):
        value = load(x, i)
        total += value * value
    return total


@njit(**SUMS)
def _squares_of_sum(x: Array, y: Array) -> Any:
    total = _NONE
    for i in range(x.size):
        value = load(x, i) + load(y, i)
        total += value * value
    return total


@njit(**PLAIN)
def _scale(squares: float, width: int, eps: float) -> Any:
    return np.float32(1.0 / np.sqrt(squares / width + eps))


@njit(**PLAIN)
def rms_norm(
    first: int, last: int, x: int, x_tag: Any, gain: int, gain_tag: Any, offset: Any, out: int, out_tag: Any,
    width: int, stride: int, eps: float,
) -> None:  # fmt: skip
    """out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * (gain + offset)."""
    factors = at(gain, 0, width, gain_tag)
    for row in range(first, last):
        source, target = at(x, row * stride, width, x_tag), at(out, row * width, width, out_tag)
        squares = 0.0
        for start in range(0, width, _BLOCK):
            squares += _squares(at(x, row * stride + start, min(_BLOCK, width - start), x_tag))
        scale = _scale(squares, width, eps)
        for i in range(width):
            store(target, i, load(source, i) * scale * (load(factors, i) + offset))


@njit(**PLAIN)
def add_rms_norm(
    first: int, last: int, x: int, y: int, x_tag: Any, gain: int, gain_tag: Any, offset: Any, out: int, out_tag: Any,
    width: int, eps: float,
) -> None:  # fmt: skip
    """As `rms_norm` of x + y, whose sum is not rounded."""
    factors = at(gain, 0, width, gain_tag)
    for row in range(first, last):
        left, right = at(x, row * width, width, x_tag), at(y, row * width, width, x_tag)
        target = at(out, row * width, width, out_tag)
        squares = 0.0
        for start in range(0, width, _BLOCK):
            place, count = row * width + start, min(_BLOCK, width - start)
            squares += _squares_of_sum(at(x, place, count, x_tag), at(y, place, count, x_tag))
        scale = _scale(squares, width, eps)
        for i in range(width):
            store(target, i, (load(left, i) + load(right, i)) * scale * (load(factors, i) + offset))


# -- group norm and SiLU -----------------------------------------------------------------------------------------------


@njit(**SUMS)
def _sum(x: Array) -> Any:
    total = _NONE
    for i in range(x.size):
        total += load(x, i)
    return total


@njit(**SUMS)
def _deviations(x: Array, middle: Any) -> tuple[Any, Any]:
    """Sum of x - middle and of its square."""
    total, squares = _NONE, _NONE
    for i in range(x.size):
        gap = load(x, i) - middle
        total += gap
        squares += gap * gap
    return total, squares


@njit(**PLAIN)
def _moments(x: int, x_tag: Any, place: int, size: int) -> tuple[float, float]:
    """Mean and variance; blocks are merged by Chan's formula (Chan, Golub, LeVeque 1979): a large mean does no harm."""
    done, mean, squares = 0, 0.0, 0.0
    while done < size:
        count = min(_BLOCK, size - done)
        part = at(x, place + done, count, x_tag)
        rough = np.float32(_sum(part) / np.float32(count))
        gaps, inside = _deviations(part, rough)
        rest = np.float64(gaps) / count
        step = np.float64(rough) + rest - mean
        squares += np.float64(inside) - rest * rest * count + step * step * (np.float64(done) * count / (done + count))
        mean += step * (np.float64(count) / (done + count))
        done += count
    return mean, squares / size


@njit(**PLAIN)
def group_norm_silu(
    first: int, last: int, x: int, x_tag: Any, gain: int, bias: int, gain_tag: Any, out: int,
    groups: int, channels: int, area: int, eps: float,
) -> None:  # fmt: skip
    """Groups `first` to `last` of all samples; a group is `channels` rows of `area` elements in one piece."""
    size = channels * area
    gains, biases = at(gain, 0, groups * channels, gain_tag), at(bias, 0, groups * channels, gain_tag)
    for group in range(first, last):
        mean, variance = _moments(x, x_tag, group * size, size)
        middle, scale = np.float32(mean), 1.0 / np.sqrt(variance + eps)
        for channel in range(channels):
            place = group * size + channel * area
            source, target = at(x, place, area, x_tag), at(out, place, area, x_tag)
            which = (group % groups) * channels + channel
            gain = scale * np.float64(load(gains, which))
            rest = (mean - np.float64(middle)) * gain
            factor, shift = np.float32(gain), np.float32(np.float64(load(biases, which)) - rest)
            for i in range(area):
                store(target, i, silu((load(source, i) - middle) * factor + shift))


@njit(**PLAIN)
def _add_rows(
    x: int, x_tag: Any, place: int, rows: int, stride: int, middle: Array, sums: Array, squares: Array
) -> None:
    """Add x - middle and its square to one sum a channel; in float32 over 64 rows, in float64 over these."""
    width = sums.size
    part, part_squares = np.empty(width, np.float32), np.empty(width, np.float32)
    for start in range(0, rows, 64):
        part[:] = _NONE
        part_squares[:] = _NONE
        for row in range(start, min(start + 64, rows)):
            source = at(x, place + row * stride, width, x_tag)
            for i in range(width):
                value = load(source, i) - middle[i]
                part[i] += value
                part_squares[i] += value * value
        for i in range(width):
            sums[i] += np.float64(part[i])
            squares[i] += np.float64(part_squares[i])


@njit(**PLAIN)
def group_norm_silu_rows(
    first: int, last: int, x: int, x_tag: Any, gain: int, bias: int, gain_tag: Any, out: int,
    groups: int, channels: int, area: int, eps: float,
) -> None:  # fmt: skip
    """As `group_norm_silu` with the channels innermost (channels-last memory): `area` rows of all channels a sample.

    Sums are taken about the first row's own values, channel by channel, so a large mean costs no digits.
    """
    whole = groups * channels
    gains, biases = at(gain, 0, whole, gain_tag), at(bias, 0, whole, gain_tag)
    group = first
    while group < last:
        sample, start = group // groups, group % groups
        stop = min(groups, start + last - group)
        width, place = (stop - start) * channels, sample * area * whole + start * channels
        about, sums, squares = np.empty(width, np.float32), np.zeros(width), np.zeros(width)
        head = at(x, place, width, x_tag)
        for i in range(width):
            about[i] = load(head, i)
        _add_rows(x, x_tag, place, area, whole, about, sums, squares)
        factor, shift = np.empty(width, np.float32), np.empty(width, np.float32)
        for inner in range(stop - start):
            span = range(inner * channels, (inner + 1) * channels)
            mean, variance = _merged(about, sums, squares, span, area)
            scale = 1.0 / np.sqrt(variance + eps)
            for i in span:
                product = scale * np.float64(load(gains, start * channels + i))
                about[i] = np.float32(mean)
                factor[i] = np.float32(product)
                rest = (mean - np.float64(about[i])) * product
                shift[i] = np.float32(np.float64(load(biases, start * channels + i)) - rest)
        for row in range(area):
            source, target = at(x, place + row * whole, width, x_tag), at(out, place + row * whole, width, x_tag)
            for i in range(width):
                store(target, i, silu((load(source, i) - about[i]) * factor[i] + shift[i]))
        group += stop - start


@njit(**PLAIN)
def _merged(about: Array, sums: Array, squares: Array, span: range, area: int) -> tuple[float, float]:
    """Mean and variance of some channels together, from each one's sums about a value of its own."""
    mean, inside = 0.0, 0.0
    for i in span:
        mean += np.float64(about[i]) + sums[i] / area
    mean /= len(span)
    for i in span:
        gap = np.float64(about[i]) + sums[i] / area - mean
        inside += squares[i] - sums[i] * sums[i] / area + area * gap * gap
    return mean, inside / (len(span) * area)


# -- gated activations -------------------------------------------------------------------------------------------------


@njit(**PLAIN)
def swiglu(
    first: int, last: int, gate: int, up: int, tag: Any, out: int, width: int, gate_stride: int, up_stride: int
) -> None:
    """out[row] = silu(gate[row]) * up[row]."""
    for row in range(first, last):
        gates, ups = at(gate, row * gate_stride, width, tag), at(up, row * up_stride, width, tag)
        target = at(out, row * width, width, tag)
        for i in range(width):
            store(target, i, silu(load(gates, i)) * load(ups, i))


@njit(**PLAIN)
def geglu(
    first: int, last: int, gate: int, up: int, tag: Any, out: int, width: int, gate_stride: int, up_stride: int
) -> None:
    """out[row] = gelu(gate[row]) * up[row], by Phi; rounded in a loop of its own: one for both lacks registers."""
    wide = np.empty(_BLOCK, np.float32)
    for row in range(first, last):
        for start in range(0, width, _BLOCK):
            count = min(_BLOCK, width - start)
            gates, ups = at(gate, row * gate_stride + start, count, tag), at(up, row * up_stride + start, count, tag)
            target = at(out, row * width + start, count, tag)
            for i in range(count):
                wide[i] = gelu(load(gates, i)) * load(ups, i)
            for i in range(count):
                store(target, i, wide[i])


@njit(**PLAIN)
def geglu_tanh(
    first: int, last: int, gate: int, up: int, tag: Any, out: int, width: int, gate_stride: int, up_stride: int
) -> None:
    """out[row] = gelu(gate[row]) * up[row], by the tanh formula."""
    for row in range(first, last):
        gates, ups = at(gate, row * gate_stride, width, tag), at(up, row * up_stride, width, tag)
        target = at(out, row * width, width, tag)
        for i in range(width):
            store(target, i, gelu_tanh(load(gates, i)) * load(ups, i))


# -- rotary embedding --------------------------------------------------------------------------------------------------


@njit(**PLAIN)
def rotary(
    first: int, last: int, x: int, x_tag: Any, cos: int, sin: int, angle_tag: Any, out: int, out_tag: Any,
    shape: tuple[int, int, int], x_strides: tuple[int, int, int], cos_strides: tuple[int, int, int],
    sin_strides: tuple[int, int, int], out_strides: tuple[int, int, int],
) -> None:  # fmt: skip
    """Turn the pairs (x[i], x[i + half]) of every row of a tensor of shape [rows / shape[1], shape[1], 2 half].

    `shape` is (middle, inner, half); a row's indices are row / (middle inner), row / inner % middle and row % inner.
    """
    middle, inner, half = shape
    for row in range(first, last):
        a, b, c = row // (middle * inner), row // inner % middle, row % inner
        source = at(x, a * x_strides[0] + b * x_strides[1] + c * x_strides[2], 2 * half, x_tag)
        target = at(out, a * out_strides[0] + b * out_strides[1] + c * out_strides[2], 2 * half, out_tag)
        cosines = at(cos, a * cos_strides[0] + b * cos_strides[1] + c * cos_strides[2], 2 * half, angle_tag)
        sines = at(sin, a * sin_strides[0] + b * sin_strides[1] + c * sin_strides[2], 2 * half, angle_tag)
        for i in range(half):
            one, two = load(source, i), load(source, i + half)
            store(target, i, one * load(cosines, i) - two * load(sines, i))
            store(target, i + half, two * load(cosines, i + half) + one * load(sines, i + half))
