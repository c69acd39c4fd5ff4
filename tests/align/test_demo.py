"""The built-in workload is deterministic, rounds as real networks do, and holds one harmful int8 choice."""

import ast
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import align.demo
from align.demo import Demo, TextToImage, build, difference_png, save_png
from align.demo.quantized import QuantLinear
from align.demo.tokenizer import decode, encode
from align.demo.weights import OUTLIER_CHANNELS
from align.dumpers.errors import UsageError

INT8_SITE = "denoiser.mid_mix.feed.proj"


class WideNoise(TorchFunctionMode):
    """Draw random tensors in float32 and round them, so that every dtype sees the same noise."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.randn:
            dtype = kwargs.pop("dtype")
            return func(*args, **kwargs, dtype=torch.float32).to(dtype)
        return func(*args, **kwargs)


class Ledger(TorchFunctionMode):
    """Note the name and the arguments of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func.__name__, args, result))
        return result


def paint(demo: Demo, model: TextToImage, dtype: torch.dtype, steps: int = 4) -> tuple[Tensor, list[Tensor]]:
    """Run the demo's loop on a model; return the picture and the latents after each step."""
    inputs = [given.to(dtype) if given.is_floating_point() else given for given in demo.inputs]
    latents: list[Tensor] = []
    torch.manual_seed(7)
    with torch.no_grad(), WideNoise():
        loop = demo.loop(model, *inputs, steps=steps)
        while True:
            try:
                latents.append(next(loop))
            except StopIteration as stop:
                return stop.value, latents


def narrow_and_wide(model: TextToImage, dtype: torch.dtype) -> tuple[TextToImage, TextToImage]:
    """Return the model in a narrow dtype, and those very weights in float32."""
    narrow = copy.deepcopy(model).to(dtype)
    return narrow, copy.deepcopy(narrow).to(torch.float32)


def relative_error(candidate: Tensor, reference: Tensor) -> float:
    return float((candidate.double() - reference.double()).norm() / reference.double().norm())


def run_in_int8(layer: QuantLinear, x: Tensor) -> Tensor:
    """Multiply as an int8 kernel does: one scale for the whole activation, integer sums, then both scales."""
    step = float(x.abs().max()) / 127
    whole = (x.double() / step).round().clamp(-127, 127)
    sums = whole @ layer.weight_int8.double().T
    return (sums * step * layer.scale.double() + layer.bias.double()).to(x.dtype)


@contextmanager
def int8_kernel(layer: QuantLinear) -> Iterator[None]:
    layer.forward = lambda x: run_in_int8(layer, x)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del layer.forward


def read(path: Path) -> npt.NDArray[Any]:
    """Return the levels of a picture file, [h, w, 3]."""
    with Image.open(path) as image:
        return np.asarray(image).astype(np.int64)


@pytest.fixture(scope="module")
def demo() -> Demo:
    return build()


@pytest.fixture(scope="module")
def narrow(demo: Demo) -> TextToImage:
    return narrow_and_wide(demo.model, torch.bfloat16)[0]


@pytest.fixture(scope="module")
def reference(demo: Demo) -> tuple[Tensor, list[Tensor]]:
    return paint(demo, narrow_and_wide(demo.model, torch.bfloat16)[1], torch.float32)


@pytest.fixture(scope="module")
def baseline(demo: Demo, narrow: TextToImage) -> tuple[Tensor, list[Tensor]]:
    return paint(demo, narrow, torch.bfloat16)


def test_the_same_seed_gives_the_same_picture_and_leaves_the_callers_generator_alone(demo: Demo) -> None:
    state = torch.get_rng_state()
    again = build()
    assert torch.equal(torch.get_rng_state(), state)
    first, _ = paint(demo, demo.model, torch.float32, steps=2)
    second, _ = paint(again, again.model, torch.float32, steps=2)
    assert torch.equal(first, second)


def test_prompt_and_seed_and_fresh_noise_all_change_the_picture(demo: Demo) -> None:
    usual, _ = paint(demo, demo.model, torch.float32, steps=2)
    other_prompt = build("a fox in the snow")
    other_seed = build(seed=1)
    for other in (other_prompt, other_seed):
        assert relative_error(paint(other, other.model, torch.float32, steps=2)[0], usual) > 0.02
    loops = [demo.loop(demo.model, *demo.inputs, steps=2) for _ in range(2)]
    with torch.no_grad():
        firsts = [next(loop) for loop in loops]
    assert not torch.equal(*firsts)


def test_the_loop_yields_once_a_step_and_returns_a_picture_between_0_and_1(
    reference: tuple[Tensor, list[Tensor]], demo: Demo
) -> None:
    picture, latents = reference
    assert len(latents) == 4
    assert len(paint(demo, demo.model, torch.float32, steps=3)[1]) == 3
    assert picture.shape == (1, 3, 96, 96)
    assert picture.min() >= 0
    assert picture.max() <= 1
    assert all(step.shape == (1, 4, 24, 24) for step in latents)


def test_the_picture_is_neither_flat_nor_noise(reference: tuple[Tensor, list[Tensor]]) -> None:
    picture = reference[0]
    neighbours = (picture[..., 1:] - picture[..., :-1]).abs().mean()
    assert picture.std() > 0.1
    assert neighbours < 0.2 * picture.std()


def test_the_model_is_ready_for_inference_with_float32_weights(demo: Demo) -> None:
    assert not demo.model.training
    assert [name for name, _ in demo.model.named_children()] == ["text_encoder", "denoiser", "decoder"]
    for weight in demo.model.parameters():
        assert weight.dtype is torch.float32
        assert not weight.requires_grad


def test_bfloat16_moves_the_picture_by_the_rounding_of_real_networks(
    baseline: tuple[Tensor, list[Tensor]], reference: tuple[Tensor, list[Tensor]]
) -> None:
    assert baseline[0].dtype is torch.bfloat16
    assert 0.003 < relative_error(baseline[0], reference[0]) < 0.03
    assert all(relative_error(step, wide) < 0.06 for step, wide in zip(baseline[1], reference[1], strict=True))


def test_float16_is_finite_and_several_times_nearer_than_bfloat16(demo: Demo) -> None:
    narrow, wide = narrow_and_wide(demo.model, torch.float16)
    picture, _ = paint(demo, narrow, torch.float16, steps=1)
    assert picture.isfinite().all()
    assert 1e-5 < relative_error(picture, paint(demo, wide, torch.float32, steps=1)[0]) < 0.003


def test_every_activation_stays_far_from_the_float16_limit(demo: Demo) -> None:
    peaks: list[float] = []
    hooks = [
        module.register_forward_hook(lambda _module, _given, result: peaks.append(float(result.abs().max())))
        for module in demo.model.modules()
    ]
    paint(demo, demo.model, torch.float32, steps=2)
    for hook in hooks:
        hook.remove()
    assert max(peaks) < 1000


def test_the_model_has_one_int8_layer_and_its_input_has_outlier_channels(demo: Demo) -> None:
    layers = {path: module for path, module in demo.model.named_modules() if isinstance(module, QuantLinear)}
    assert list(layers) == [INT8_SITE]
    seen: list[Tensor] = []
    hook = layers[INT8_SITE].register_forward_pre_hook(lambda _module, given: seen.append(given[0]))
    paint(demo, demo.model, torch.float32, steps=1)
    hook.remove()
    size = seen[0].square().mean(dim=(0, 1)).sqrt()
    ordinary = [channel for channel in range(len(size)) if channel not in OUTLIER_CHANNELS]
    assert size[list(OUTLIER_CHANNELS)].min() > 30 * size[ordinary].median()


def test_the_int8_layer_is_the_calls_to_mul_linear_on_an_int8_tensor(narrow: TextToImage) -> None:
    layer = narrow.get_submodule(INT8_SITE)
    with torch.no_grad(), Ledger() as ledger:
        layer(torch.ones(1, 2, 128, dtype=torch.bfloat16))
    (cast,) = [result for name, args, result in ledger.calls if name == "to" and args[0].dtype is torch.int8]
    (product,) = [result for name, args, result in ledger.calls if name == "mul" and args[0] is cast]
    assert [name for name, args, _ in ledger.calls if any(given is product for given in args)] == ["linear"]
    assert sum(any(given is cast for given in args) for _, args, _ in ledger.calls) == 1


def test_the_int8_kernel_harms_its_layer_many_times_more_than_bfloat16_does(narrow: TextToImage) -> None:
    layer = narrow.get_submodule(INT8_SITE)
    assert isinstance(layer, QuantLinear)
    norm = narrow.get_submodule("denoiser.mid_mix.norm3")
    torch.manual_seed(3)
    with torch.no_grad():
        x = norm(torch.randn(1, 144, 128, dtype=torch.bfloat16))
        exact = x.double() @ (layer.weight_int8.double() * layer.scale.double()[:, None]).T + layer.bias.double()
        rounding = relative_error(layer(x), exact)
        harm = relative_error(run_in_int8(layer, x), exact)
    assert rounding < 0.01
    assert harm > 0.2
    assert harm > 20 * rounding


def test_the_int8_kernel_moves_the_picture_several_times_more_than_bfloat16_does(
    demo: Demo, narrow: TextToImage, baseline: tuple[Tensor, list[Tensor]], reference: tuple[Tensor, list[Tensor]]
) -> None:
    layer = narrow.get_submodule(INT8_SITE)
    assert isinstance(layer, QuantLinear)
    with int8_kernel(layer):
        candidate, _ = paint(demo, narrow, torch.bfloat16)
    assert relative_error(candidate, reference[0]) > 4 * relative_error(baseline[0], reference[0])


def test_int8_weights_come_back_within_half_a_step_of_each_row() -> None:
    layer = QuantLinear(16, 8)
    weight = torch.linspace(-1, 1, 128).reshape(8, 16).cos()
    layer.load_weight(weight)
    back = layer.weight_int8 * layer.scale[:, None]
    assert ((back - weight).abs() <= 0.5001 * layer.scale[:, None]).all()


def test_a_step_makes_a_few_hundred_calls(demo: Demo) -> None:
    with torch.no_grad(), Ledger() as ledger:
        loop = demo.loop(demo.model, *demo.inputs)
        next(loop)
        ledger.calls.clear()
        next(loop)
    assert 150 <= len(ledger.calls) <= 300


def test_a_prompt_comes_back_from_its_tokens() -> None:
    tokens = encode("café at dusk")
    assert tokens.shape == (1, 64)
    assert tokens.dtype is torch.int64
    assert decode(tokens) == "café at dusk"
    assert encode("x" * 500).shape == (1, 64)
    assert encode("").flatten()[:3].tolist() == [1, 2, 0]


def test_a_saved_picture_reads_back_to_the_nearest_of_255_levels(tmp_path: Path) -> None:
    picture = torch.linspace(-0.2, 1.2, 3 * 8 * 10).reshape(1, 3, 8, 10)
    save_png(picture.to(torch.bfloat16), tmp_path / "one.png")
    save_png(picture[0], tmp_path / "two.png")
    pixels = read(tmp_path / "two.png") / 255
    assert pixels.shape == (8, 10, 3)
    assert np.abs(pixels - np.clip(picture[0].permute(1, 2, 0).numpy(), 0, 1)).max() <= 0.5 / 255 + 1e-6
    assert read(tmp_path / "one.png").shape == (8, 10, 3)


def test_a_difference_picture_is_black_where_equal_and_white_where_far_or_nan(tmp_path: Path) -> None:
    reference = torch.full((3, 2, 4), 0.5)
    candidate = reference.clone()
    candidate[1, 0, 0] = 0.9
    candidate[2, 0, 1] = float("nan")
    candidate[0, 1, 3] = 0.52
    difference_png(candidate, reference, tmp_path / "difference.png")
    pixels = read(tmp_path / "difference.png")
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[0, 1].tolist() == [255, 255, 255]
    assert pixels[0, 2].tolist() == [0, 0, 0]
    assert 0 < pixels[1, 3].sum() < 3 * 255


def test_what_is_not_a_picture_is_refused_with_its_shape(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\[4, 24, 24\]"):
        save_png(torch.zeros(4, 24, 24), tmp_path / "latents.png")


@pytest.mark.parametrize("name", ["tokenizer", "text_encoder", "denoiser", "decoder", "quantized"])
def test_the_model_code_knows_nothing_of_the_tool(name: str) -> None:
    source = (Path(align.demo.__file__).parent / f"{name}.py").read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    imported = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {module.split(".")[0] for module in imported} <= {"math", "torch", "align"}
    assert all(module.startswith("align.demo.") for module in imported if module.split(".")[0] == "align")


def test_every_module_of_the_model_is_a_plain_torch_module(demo: Demo) -> None:
    for module in demo.model.modules():
        assert isinstance(module, nn.Module)
        assert type(module).__module__.startswith(("torch.nn.", "align.demo."))
