"""The catalog on whole models: the demo, a transformers Llama, a diffusers UNet. Sites, same keys, same results."""

from collections import Counter

import pytest
import torch

from align.demo import build
from align.dumpers.naming import walk_tensors
from align.dumpers.survey import Survey
from align.dumpers.wire import Wire
from align.operators.registry import catalog, find_sites, site_of
from align.taps.substitute import Form, Substitute, Substitution

DEMO_SITES = {
    "rms_norm": 16, "rotary": 6, "attention": 9, "linear_act": 7, "conv_bn_act_add": 9, "group_norm_silu": 14,
    "quant_linear": 1, "geglu": 1, "resize_conv": 3,
}  # fmt: skip


LISTED = frozenset(DEMO_SITES) | {"layer_norm", "swiglu", "multi_head_attention"}


def listed():
    return tuple(operator for operator in catalog() if operator.name in LISTED)


def count_sites(graph):
    return Counter(match.operator.name for match in find_sites(graph, listed(), "cpu"))


def drive(demo, tap):
    with torch.no_grad(), Wire({"": demo.model}, [tap], sees_calls=True) as wire:
        torch.manual_seed(1)
        loop = demo.loop(demo.model, *demo.inputs, steps=2)
        try:
            while True:
                next(loop)
                wire.next_step()
        except StopIteration as end:
            return end.value


def fused(matches, graph, *, without=()):
    sites = []
    for match in matches:
        kernel = match.operator.kernels.get("cpu")
        step = graph.steps_of(match.calls[-1])[0]
        if (
            kernel is not None
            and match.operator.name not in without
            and not kernel.refuses(match.bound(graph, step), torch.float32)
        ):
            sites.append(Substitution(site_of(match, graph, torch.float32), match, Form.FUSED, kernel))
    return tuple(sites)


@pytest.fixture(scope="module")
def demo():
    workload, tap = build(), Survey()
    picture = drive(workload, tap)
    return workload, tap.graph, find_sites(tap.graph, catalog(), "cpu"), picture


def test_every_pattern_of_the_demo_is_found(demo):
    _, graph, _, _ = demo
    assert count_sites(graph) == DEMO_SITES


def test_demo_paints_the_same_picture_with_its_exact_sites_fused(demo, distance):
    workload, graph, matches, picture = demo
    sites = fused(matches, graph, without=("quant_linear",))
    tap = Substitute(sites)
    assert distance(drive(workload, tap), picture) < 1e-4
    assert set(tap.ran) == {item.site.name for item in sites}


def test_demo_paints_the_same_picture_with_every_site_unfused(demo, distance):
    workload, graph, matches, picture = demo
    sites = tuple(Substitution(site_of(match, graph, torch.float32), match, Form.UNFUSED) for match in matches)
    assert distance(drive(workload, Substitute(sites)), picture) < 1e-4


def test_int8_product_changes_the_demo_by_more_than_rounding(demo, distance):
    workload, graph, matches, picture = demo
    sites = tuple(item for item in fused(matches, graph) if item.match.operator.name == "quant_linear")
    assert distance(drive(workload, Substitute(sites)), picture) > 1e-3


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_llama_is_covered_and_agrees(attention, agrees_in_every_form):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
        use_cache=False,
    )
    found = agrees_in_every_form(transformers.LlamaForCausalLM(config), torch.randint(0, 100, (2, 9)))
    counts = count_sites(found.graph)
    assert counts == {"rms_norm": 5, "rotary": 4, "attention": 2, "linear_act": 2}


@pytest.mark.parametrize("by_hand", [False, True])
def test_unet_is_covered_and_agrees(by_hand, agrees_in_every_form):
    diffusers = pytest.importorskip("diffusers")
    from diffusers.models.attention_processor import AttnProcessor

    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        norm_num_groups=8,
    )
    if by_hand:
        model.set_attn_processor(AttnProcessor())
    found = agrees_in_every_form(model, torch.randn(1, 4, 8, 8), torch.tensor([5]), torch.randn(1, 7, 16))
    counts = count_sites(found.graph)
    assert counts == {
        "linear_act": 1,
        "group_norm_silu": 17,
        "layer_norm": 12,
        "attention": 8,
        "geglu": 4,
        "resize_conv": 1,
    }


def test_every_example_fits_its_operator():
    for operator in catalog():
        result = operator.unfused(**operator.example("cpu", torch.float32, 0))
        tensors = [tensor for _, tensor in walk_tensors(result)]
        assert tensors, operator.name
        assert all(tensor.isfinite().all() for tensor in tensors), operator.name
        assert operator.summary
        assert operator.rounding


def test_every_cpu_kernel_takes_float32_or_says_why_not():
    for operator in catalog():
        kernel = operator.kernels.get("cpu")
        if kernel is not None:
            reason = kernel.refuses(operator.example("cpu", torch.float32, 0), torch.float32)
            assert isinstance(reason, str)
            assert not reason or "float32" in reason or "no " in reason


def test_kernel_on_the_device_is_preferred_to_a_longer_match_without_one(survey):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    (match,) = survey(model, torch.randn(3, 8)).matches
    assert match.operator.name == "linear_act"


def test_bfloat16_run_with_fused_sites_keeps_every_name_and_dtype(survey, distance):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    found = survey(transformers.LlamaForCausalLM(config), torch.randint(0, 100, (2, 9)))
    found.model.to(torch.bfloat16)
    plain = found.run()
    for form in Form:
        other = found.run(form)
        assert other.idents == plain.idents
        assert other.output.dtype == torch.bfloat16
        assert distance(other.output, plain.output) < 2**-5
