"""Every tensor torch can make has bits on the host, exactly, at the moment they were asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

from align.dumpers.dtypes import DTYPES
from align.dumpers.errors import UsageError
from align.dumpers.tensors import components, dtype_name, has_data, note_of, snapshot, to_raw

TORCH_NAMES = [name for name in DTYPES if hasattr(torch, name)]


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_every_dtype_keeps_its_bits(name: str) -> None:
    code = torch.randint(0, 256, (6, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensor = (code % 2).bool() if name == "bool" else code.view(getattr(torch, name))
    raw = to_raw(tensor)
    assert (raw.dtype, raw.shape) == (name, tuple(tensor.shape))
    assert raw.bits.tobytes() == (code % 2 if name == "bool" else code).numpy().tobytes()
    assert snapshot(tensor).wait().bits.tobytes() == raw.bits.tobytes()


def test_bfloat16_keeps_negative_zero_and_nan_payload() -> None:
    codes = torch.tensor([-32768, 0x7FC1, 0x7F80, 1], dtype=torch.int16)
    assert to_raw(codes.view(torch.bfloat16)).bits.tolist() == [0x8000, 0x7FC1, 0x7F80, 1]


def test_a_plain_tensor_is_viewed_without_a_copy() -> None:
    tensor = torch.zeros(3, requires_grad=True)
    raw = to_raw(tensor)
    tensor.data.fill_(7)
    assert raw.bits.tolist() == [7, 7, 7]


def test_a_snapshot_keeps_the_value_of_its_moment() -> None:
    tensor = torch.tensor([-1.0, 2.0])
    taken = snapshot(tensor)
    torch.nn.functional.relu(tensor, inplace=True)
    assert taken.wait().bits.tolist() == [-1.0, 2.0]


def test_a_snapshot_of_a_cache_view_survives_the_next_step() -> None:
    cache = torch.zeros(2, 4)
    cache[0] = 5
    taken = snapshot(cache[:1])
    cache.zero_()
    assert taken.wait().bits.tolist() == [[5, 5, 5, 5]]


def test_a_released_buffer_is_used_again_only_after_its_release() -> None:
    first, second = snapshot(torch.ones(100)), snapshot(torch.full((100,), 2.0))
    assert first.wait().bits[0] == 1
    first.release()
    third = snapshot(torch.full((100,), 3.0))
    assert (second.wait().bits[0], third.wait().bits[0]) == (2, 3)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: torch.tensor(3.5), 3.5),
        (lambda: torch.zeros(0, 2), np.zeros((0, 2))),
        (lambda: torch.arange(3.0).expand(2, 3), [[0, 1, 2], [0, 1, 2]]),
        (lambda: torch.arange(4.0).reshape(2, 2).T, [[0, 2], [1, 3]]),
        (lambda: torch.tensor([1 + 2j]).conj(), [1 - 2j]),
        (lambda: torch.tensor([1 + 2j]).conj().imag, [-2]),
        (lambda: torch.eye(2).to_sparse(), [[1, 0], [0, 1]]),
        (lambda: torch.eye(2).to_sparse_csr(), [[1, 0], [0, 1]]),
        (lambda: torch.eye(2).to_mkldnn(), [[1, 0], [0, 1]]),
        (lambda: torch.quantize_per_tensor(torch.tensor([1.0, 2.0]), 0.5, 3, torch.quint8), [1, 2]),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)]), [1, 0, 0]),
        (
            lambda: torch.nested.nested_tensor([torch.ones(1, 2), torch.zeros(2, 2)], layout=torch.jagged),
            [1, 1, 0, 0, 0, 0],
        ),
        (lambda: torch.nn.Parameter(torch.ones(2)), [1, 1]),
    ],
)
def test_unusual_tensors_have_their_stated_values(build: Callable[[], torch.Tensor], expected: object) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes and deprecations of torch
        tensor = build()
        for raw in (to_raw(tensor), snapshot(tensor).wait()):
            np.testing.assert_array_equal(raw.bits, np.asarray(expected))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: torch.ones(2), ""),
        (lambda: torch.ones(2, device="meta"), "no data"),
        (lambda: torch.eye(3).to_sparse(), "sparse_coo: 3 stored values, stored dense"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(1), 0.5, 3, torch.qint8),
            "qint8, stored dequantised: scale 0.5, zero point 3",
        ),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)]), "nested: 2 components, concatenated"),
    ],
)
def test_notes_say_what_is_unusual(build: Callable[[], torch.Tensor], words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert note_of(build()) == words


def test_a_sparse_tensor_too_large_to_be_dense_keeps_its_values() -> None:
    places, values = torch.tensor([[0, 5], [1, 2]]), torch.tensor([2.0, 3.0])
    tensor = torch.sparse_coo_tensor(places, values, (100_000, 100_000), check_invariants=True)
    assert to_raw(tensor).bits.tolist() == [2.0, 3.0]
    assert note_of(tensor).endswith("coalesced values stored, indices not")


def test_nested_components_can_be_stored_one_by_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(1), torch.zeros(2)])
    assert [tuple(part.shape) for part in components(nested)] == [(1,), (2,)]
    assert components(torch.ones(3))[0].shape == (3,)


def test_meta_and_fake_tensors_are_known_to_have_no_data() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(3)
    for ghost in (fake, torch.empty(3, device="meta")):
        assert not has_data(ghost)
        with pytest.raises(UsageError, match="no values"):
            to_raw(ghost)
        with pytest.raises(UsageError, match="no values"):
            snapshot(ghost)


def test_names_are_torchs_own() -> None:
    assert dtype_name(torch.zeros(1, dtype=torch.bfloat16)) == "bfloat16"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dtype_name(torch.quantize_per_tensor(torch.ones(1), 0.5, 3, torch.qint8)) == "qint8"


def test_packed_dtypes_are_stored_as_their_bytes() -> None:
    packed = torch.tensor([1, 255], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    raw = to_raw(packed)
    assert (raw.dtype, raw.bits.tolist()) == ("uint8", [1, 255])
