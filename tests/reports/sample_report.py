"""Made-up but lifelike reports: a small UNet over four denoising steps whose int8 linear layer is at fault.

The errors are a random walk with a fixed seed, shaped as in real bfloat16 networks: rounding enters at every layer,
normalisation keeps it level, one bad layer lifts it, and the rest of the network inherits it.
Run as a script it writes the HTML page: `python tests/reports/sample_report.py page.html [nodes]`.
"""

from __future__ import annotations

import math
import random
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

from align.compare.model import (
    Comparison,
    Coverage,
    ErrorDetail,
    Judgement,
    Measures,
    NodeComparison,
    Pairing,
    Status,
    Verdict,
)
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.dumpers.model import NodeKey, NodeKind, OpClass, Statistics
from align.reports.model import (
    ChoiceRow,
    ChoiceState,
    Confidence,
    CulpritCard,
    NodeFloor,
    Quantiles,
    RoleRow,
    RunReport,
    Timing,
)
from align.reports.pages import NodePage
from align.reports.summary import node_rows, worst_first

LIMIT = 5.0
BAD = "unet.mid.attn.to_out"
BAD_SITE = f"quant_linear@{BAD}/linear#0"

# (name, op, type, op class, site's operator if the call is a site's output, whether a fusion swallows it)
_RESNET = [
    ("norm1", "group_norm", "torch.nn.functional.group_norm", OpClass.SENSITIVE, "", True),
    ("", "silu", "torch.nn.functional.silu", OpClass.ORDINARY, "group_norm_silu", False),
    ("conv1", "conv2d", "torch.conv2d", OpClass.ORDINARY, "", False),
    ("time", "linear", "torch.nn.functional.linear", OpClass.ORDINARY, "", False),
    ("norm2", "group_norm", "torch.nn.functional.group_norm", OpClass.SENSITIVE, "", True),
    ("", "silu", "torch.nn.functional.silu", OpClass.ORDINARY, "group_norm_silu", False),
    ("conv2", "conv2d", "torch.conv2d", OpClass.ORDINARY, "", False),
    ("", "add", "torch.Tensor.add", OpClass.ORDINARY, "", False),
]
_ATTENTION = [
    ("norm", "layer_norm", "torch.nn.functional.layer_norm", OpClass.SENSITIVE, "", False),
    ("to_q", "linear", "torch.nn.functional.linear", OpClass.ORDINARY, "", False),
    ("to_k", "linear", "torch.nn.functional.linear", OpClass.ORDINARY, "", False),
    ("to_v", "linear", "torch.nn.functional.linear", OpClass.ORDINARY, "", False),
    ("", "transpose", "torch.Tensor.transpose", OpClass.MOVEMENT, "", False),
    ("", "matmul", "torch.matmul", OpClass.SENSITIVE, "", True),
    ("", "softmax", "torch.softmax", OpClass.SENSITIVE, "", True),
    ("", "matmul", "torch.matmul", OpClass.SENSITIVE, "attention", False),
    ("to_out", "linear", "torch.nn.functional.linear", OpClass.ORDINARY, "", False),
]
_UP = [
    ("", "interpolate", "torch.nn.functional.interpolate", OpClass.MOVEMENT, "", True),
    ("conv", "conv2d", "torch.conv2d", OpClass.ORDINARY, "resize_conv", False),
]


def _blocks(scale: int) -> Iterator[tuple[str, list[tuple[str, str, str, OpClass, str, bool]], int, int]]:
    """(module path, calls, channels, side) of each block, in execution order."""
    for level in range(3):
        channels, side = 64 << level, 64 >> level
        for index in range(2 * scale):
            yield f"unet.down.{level}.resnets.{index}", _RESNET, channels, side
            if level:
                yield f"unet.down.{level}.attentions.{index}", _ATTENTION, channels, side
    yield "unet.mid.resnet1", _RESNET, 256, 16
    yield "unet.mid.attn", _ATTENTION, 256, 16
    yield "unet.mid.resnet2", _RESNET, 256, 16
    for level in (2, 1, 0):
        channels, side = 64 << level, 64 >> level
        for index in range(2 * scale):
            yield f"unet.up.{level}.resnets.{index}", _RESNET, channels, side
            if level:
                yield f"unet.up.{level}.attentions.{index}", _ATTENTION, channels, side
        yield f"unet.up.{level}.upsample", _UP, channels, side * 2


def measures(rel: float, spread: random.Random, shape: tuple[int, ...], epsilon: float = 2.0**-8) -> Measures:
    """Measures that hang together for a relative L2 error of `rel` on unit-variance values."""
    count = math.prod(shape)
    peak = rel * (4.0 + spread.random())
    index = tuple(spread.randrange(extent) for extent in shape)
    ulp = rel / epsilon
    return Measures(
        count=count,
        cosine_distance=rel * rel / 2,
        max_abs=peak,
        max_abs_index=index,
        rel_l2=rel,
        mare=rel * 90,
        mere=rel * 2.1,
        rmse=rel * 0.98,
        ulp_p50=round(ulp * 0.4),
        ulp_p99=round(ulp * 6),
        ulp_max=round(ulp * 300),
        share_close=max(0.0, 1.0 - 80 * rel),
        snr_db=-20 * math.log10(rel) if rel else math.inf,
        mare_normal=rel * 40,
        mere_normal=rel * 1.6,
        small_count=count // 200,
        small_errors=int(count // 200 * min(1.0, rel)),
        zero_rows=0,
        nan_candidate=0,
        nan_reference=0,
        inf_candidate=0,
        inf_reference=0,
        mismatched=0,
        mean_candidate=0.012 + rel / 9,
        mean_reference=0.012,
        min_candidate=-4.4 - rel,
        min_reference=-4.4,
        max_candidate=4.7 + rel,
        max_reference=4.7,
    )


def _with_nan(value: Measures) -> Measures:
    from dataclasses import replace

    return replace(value, nan_candidate=128, mismatched=128, max_candidate=math.nan)


def report(steps: int = 4, scale: int = 2, seed: int = 7) -> RunReport:
    """The report; `scale` multiplies the blocks of each level: 2 gives about 360 nodes a step."""
    noise = random.Random(seed)
    nodes: list[NodeComparison] = []
    verdicts: list[Verdict] = []
    floors: list[NodeFloor] = []
    choices: dict[str, ChoiceRow] = {}
    carried = (2.1e-3, 2.0e-3)
    for step in range(steps):
        base, cand = carried
        last: NodeKey | None = None
        for path, calls, channels, side in _blocks(scale):
            skip = last
            seen: dict[tuple[str, str], int] = {}
            for name, op, type_name, op_class, operator, is_swallowed in calls:
                where = f"{path}.{name}" if name else path
                call = seen.get((where, op), 0)
                seen[where, op] = call + 1
                key = NodeKey(where, op, call, step=step)
                is_bad = where == BAD
                if op_class is not OpClass.MOVEMENT:
                    base = math.hypot(base * (0.93 if "norm" in op else 0.995), 0.9e-3 * (0.6 + noise.random()))
                    cand = math.hypot(cand * (0.985 if "norm" in op else 0.998), 0.75e-3 * (0.6 + noise.random()))
                if is_bad:
                    cand = 0.15 + 0.02 * noise.random()
                site = f"{operator}@{key.call_name}" if operator else (BAD_SITE if is_bad else "")
                _add(
                    nodes,
                    verdicts,
                    noise,
                    key,
                    (op_class, type_name, (1, channels, side, side)),
                    (base, cand),
                    site,
                    is_swallowed,
                    tuple(
                        producer
                        for producer in {last: 0, skip: 0}
                        if producer is not None and (producer == last or op == "add")
                    ),
                )
                floors.append(NodeFloor(str(key), base * (1.6 + 0.3 * noise.random())))
                if site and site not in choices:
                    choices[site] = _choice(site, key, base, cand, noise)
                last = key
        carried = (base * 0.55, max(cand * 0.06, 1e-4))
    nodes, verdicts = _finish(nodes, verdicts, noise, steps, base, cand)
    return _report(tuple(nodes), tuple(verdicts), tuple(choices.values()), tuple(floors), steps)


def _add(nodes, verdicts, noise, key, what, errors, site, is_swallowed, producers) -> None:  # type: ignore[no-untyped-def]
    op_class, type_name, shape = what
    base, cand = errors
    order = len(nodes)
    fixed = {
        "key": key,
        "order": order,
        "kind": NodeKind.CALL,
        "op_class": op_class,
        "type_name": type_name,
        "dtype": "bfloat16",
        "shape": shape,
        "producers": producers,
        "site": site,
    }
    # Operators differ in how hard their outputs are to hit: the same factor for both runs, a little of each run's own.
    local = math.exp(noise.gauss(0.0, 0.22))
    base, cand = base * local * math.exp(noise.gauss(0.0, 0.05)), cand * local * math.exp(noise.gauss(0.0, 0.05))
    baseline = measures(base, noise, shape)
    if is_swallowed:
        nodes.append(NodeComparison(pairing=Pairing.FUSED_AWAY, baseline=baseline, **fixed))
        verdicts.append(Verdict(key, Status.FUSED_AWAY, why="inside a fused kernel: no tensor to compare"))
        return
    candidate = measures(cand, noise, shape)
    pairing = Pairing.FUSED_OUTPUT if site else Pairing.EXACT
    if key.path == "unet.up.1.attentions.1" and key.op == "matmul" and key.call == 1 and key.step == 3:
        candidate = _with_nan(candidate)
        verdict = Verdict(
            key, Status.NONFINITE, "nan", 128, 0, "128 NaN in the candidate where the reference is finite"
        )
    else:
        limit = 2.0 if op_class is OpClass.SENSITIVE else LIMIT
        excess = cand / base
        is_drift = excess > limit
        why = f"rel. L2 is {excess:.3g} times the baseline's, {limit:g} allowed"
        verdict = Verdict(key, Status.DRIFT if is_drift else Status.PASS, "rel_l2 ratio", excess, limit, why)
    nodes.append(NodeComparison(pairing=pairing, candidate=candidate, baseline=baseline, **fixed))
    verdicts.append(verdict)


def _choice(site: str, key: NodeKey, base: float, cand: float, noise: random.Random) -> ChoiceRow:
    operator, _, where = site.partition("@")
    kind = ChoiceKind.PRECISION if operator == "quant_linear" else ChoiceKind.FUSION
    choice = Choice(kind, "int8" if kind is ChoiceKind.PRECISION else operator, where)
    node = str(key)
    if "up.0.upsample" in where:
        return ChoiceRow(choice, ChoiceState.UNAVAILABLE, "the kernel wants an even number of channels per group", node)
    if "down.1.attentions.0" in where:
        return ChoiceRow(choice, ChoiceState.OFF, "switched off by --no-fuse", node, baseline_error=base)
    saved = {"attention": 1.9e-3, "group_norm_silu": 0.4e-3, "resize_conv": 1.1e-3}.get(operator, 0.21e-3)
    interior = {"attention": 8_388_608, "group_norm_silu": 524_288, "resize_conv": 2_097_152}.get(operator, 0)
    return ChoiceRow(choice, ChoiceState.ON, "", node, cand, base, interior, saved * (0.7 + 0.6 * noise.random()))


def _finish(nodes, verdicts, noise, steps, base, cand):  # type: ignore[no-untyped-def]
    """The decoder, a mismatched and a missing node, and the output."""
    last = nodes[-1].key
    fixed = {"kind": NodeKind.MODULE, "op_class": OpClass.ORDINARY, "dtype": "bfloat16", "shape": (1, 3, 128, 128)}
    image = NodeKey("decoder.conv_out", "forward", step=steps - 1)
    index = NodeKey("decoder.lookup", "argmax", step=steps - 1)
    gone = NodeKey("decoder.debug_tap", "forward", step=steps - 1)
    output = NodeKey("", "forward", step=steps - 1)
    tail = [
        (
            NodeComparison(
                image,
                0,
                type_name="Conv2d",
                pairing=Pairing.EXACT,
                candidate=measures(cand * 1.1, noise, (1, 3, 128, 128)),
                baseline=measures(base * 1.1, noise, (1, 3, 128, 128)),
                producers=(last,),
                **fixed,
            ),
            Status.DRIFT,
        ),
        (
            NodeComparison(
                index,
                0,
                type_name="torch.argmax",
                pairing=Pairing.EXACT,
                problem="shape 1x128 against 1x127",
                producers=(image,),
                kind=NodeKind.CALL,
                op_class=OpClass.EXACT,
                dtype="int64",
                shape=(1, 128),
            ),
            Status.MISMATCH,
        ),
        (
            NodeComparison(gone, 0, type_name="Identity", pairing=Pairing.MISSING, producers=(image,), **fixed),
            Status.MISSING,
        ),
        (
            NodeComparison(
                output,
                0,
                type_name="TextToImage",
                pairing=Pairing.EXACT,
                candidate=measures(cand * 1.1, noise, (1, 3, 128, 128)),
                baseline=measures(base * 1.1, noise, (1, 3, 128, 128)),
                producers=(image,),
                **fixed,
            ),
            Status.DRIFT,
        ),
    ]
    from dataclasses import replace

    for node, status in tail:
        nodes.append(replace(node, order=len(nodes)))
        why = {Status.MISMATCH: node.problem, Status.MISSING: "only in the reference"}.get(status, "")
        is_ratio = status is Status.DRIFT
        why = why or f"rel. L2 is {node.excess:.3g} times the baseline's, 5 allowed"
        verdicts.append(
            Verdict(
                node.key,
                status,
                "rel_l2 ratio" if is_ratio else "",
                node.excess if is_ratio else math.nan,
                LIMIT if is_ratio else math.nan,
                why,
            )
        )
    return nodes, verdicts


def _report(nodes, verdicts, choices, floors, steps) -> RunReport:  # type: ignore[no-untyped-def]
    output = nodes[-1]
    statuses = [verdict.status for verdict in verdicts]
    nbytes = sum(2 * math.prod(node.shape) for node in nodes)
    fused = statuses.count(Status.FUSED_AWAY)
    missing = statuses.count(Status.MISSING)
    hidden = sum(2 * math.prod(n.shape) for n, s in zip(nodes, statuses, strict=True) if s is Status.FUSED_AWAY)
    plans = [
        Plan("reference", "cpu", "float32"),
        Plan("baseline", "npu", "bfloat16"),
        Plan("candidate", "npu", "bfloat16", frozenset(row.choice for row in choices if row.state is ChoiceState.ON)),
    ]
    roles = [
        RoleRow(plan.role, plan, f"{plan.role}.h5", seconds, len(nodes), digest, digest)
        for plan, seconds, digest in zip(
            plans, (9.41, 4.2, 3.7), ("5d0c4f7ae1b2", "e3a1c09b77d4", "77b0f2c31a9e"), strict=True
        )
    ]
    bad = Choice(ChoiceKind.PRECISION, "int8", f"{BAD}/linear#0")
    return RunReport(
        workload="align.demo:build",
        folder="align-runs/2026-10-03T14-21-07",
        roles=tuple(roles),
        comparison=Comparison(
            nodes, Coverage(len(nodes), len(nodes) - fused - missing - 1, fused, missing, nbytes, nbytes - hidden), True
        ),
        judgement=Judgement(
            "cann-l1",
            verdicts,
            Status.DRIFT,
            f"the output's rel. L2 error is {output.excess:.3g} times the baseline's "
            f"({output.candidate.rel_l2:.3g} against "
            f"{output.baseline.rel_l2:.3g}), 5 allowed",
            (output.key,),
            (NodeKey(BAD, "linear"),),
        ),
        choices=choices,
        timing=Timing(
            Quantiles(0.4121, 0.4051, 0.4307, 20),
            Quantiles(0.3173, 0.3118, 0.3342, 20),
            1.2988,
            1.271,
            1.334,
            Confidence.FASTER,
            1.94e9,
            1.41e9,
            4.1e-6,
            len(nodes),
            ("rounds vary by 12 %: the first three were slower (clocks or heat)",),
            tuple(0.103 + 0.001 * i for i in range(steps)),
            tuple(0.079 + 0.0008 * i for i in range(steps)),
        ),
        culprits=(
            CulpritCard(
                (bad,),
                BAD_SITE,
                "local error 31 times the site's baseline in every step; "
                "toggled alone: output error 0.0418 with, 0.0029 without",
                "a few outlier channels carry the error: one scale for the whole tensor",
                0.0418,
                0.0029,
                3,
                3,
                2.1e-4,
                1.6e-4,
                2.7e-4,
            ),
        ),
        floors=floors,
        pictures=(
            ("reference", "reference.png"),
            ("baseline", "baseline.png"),
            ("candidate", "candidate.png"),
            ("difference x8", "difference.png"),
        ),
        files=("report.html", "report.json"),
        notes=("2 casts hard-coded in forward() were widened for the reference",),
        environment=(
            ("align", "0.1.0"),
            ("torch", "2.13.0"),
            ("torch_npu", "2.13.0rc1"),
            ("CANN", "8.3.RC1"),
            ("device", "Ascend 910B2, driver 25.2.0"),
            ("python", "3.11.2"),
            ("seed", "0"),
            ("ASCEND_LAUNCH_BLOCKING", "0"),
            ("PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"),
        ),
        command="align run --fused --baseline --device npu --dtype bfloat16 --steps 4",
    )


def pages(source: RunReport, limit: int = 60) -> tuple[NodePage, ...]:
    """Node pages for the worst nodes, with an error that sits in a few channels."""
    noise = random.Random(3)
    wanted = [row.node for row in worst_first(node_rows(source)) if row.status.is_fault and row.node.candidate]
    return tuple(_page(node, noise) for node in wanted[:limit])


def _page(node: NodeComparison, noise: random.Random) -> NodePage:
    assert node.candidate is not None
    assert node.baseline is not None
    hot = {5, 19, 20, 44}
    rows = []
    for row in range(64):
        lift = 12.0 if row in hot else 1.0
        rows.append(
            tuple(
                node.candidate.rel_l2 * lift * (0.2 + noise.random()) * (0.6 + 0.4 * math.sin(col / 9.0))
                for col in range(96)
            )
        )
    worst = tuple(
        (
            (0, row, noise.randrange(16), noise.randrange(16)),
            3.1 - i * 0.2,
            3.1 - i * 0.2 - node.candidate.max_abs * (1 - i / 9),
        )
        for i, row in enumerate(sorted(hot) * 2)
    )
    return NodePage(
        node.key,
        statistics(node, 0.0),
        statistics(node, node.baseline.rel_l2),
        statistics(node, node.candidate.rel_l2),
        detail(node.candidate.rel_l2, worst),
        detail(node.baseline.rel_l2, worst[:3]),
        tuple(rows),
        "channel",
        "position",
    )


def statistics(node: NodeComparison, rel: float) -> Statistics:
    """Statistics of unit-variance values with a little error."""
    count = math.prod(node.shape)
    nan = node.candidate.nan_candidate if node.candidate and rel else 0
    return Statistics(
        count,
        -4.4 - rel,
        4.7 + rel,
        0.012 + rel / 9,
        0.998 + rel / 5,
        math.sqrt(count),
        4.7 + rel,
        nan,
        zero=count // 900,
    )


def detail(rel: float, worst: tuple[tuple[tuple[int, ...], float, float], ...]) -> ErrorDetail:
    """A log-normal histogram around the error level (73 bins: below 1e-12, then quarter decades to 1e6)."""
    centre = 1 + 4 * (math.log10(rel) + 12)
    bins = tuple(int(65536 * math.exp(-(((i - centre) / 3.2) ** 2))) if i else 211 for i in range(73))
    quantiles = ((0.5, rel * 0.6), (0.9, rel * 1.7), (0.99, rel * 2.9), (0.999, rel * 3.8), (1.0, rel * 4.4))
    return ErrorDetail(bins, quantiles, worst, ((1, 256, 0.91), (2, 16, 0.15), (3, 16, 0.14)))


def picture(hue: int, amplitude: int = 70, side: int = 128) -> bytes:
    """A PNG of a soft landscape, written by hand (no imaging library)."""
    lines = bytearray()
    for y in range(side):
        lines.append(0)
        for x in range(side):
            wave = math.sin(x / 17.0 + hue / 40.0) * math.cos(y / 23.0) * amplitude
            lines += bytes(
                max(0, min(255, int(value)))
                for value in (110 + wave + y / 2, 120 + wave / 2 + hue / 3, 190 - y + wave / 3)
            )
    return _png(bytes(lines), side)


def _png(scanlines: bytes, side: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(scanlines)) + chunk(b"IEND", b"")


def pictures() -> dict[str, bytes]:
    """The four pictures of the sample, by path."""
    return {
        "reference.png": picture(10),
        "baseline.png": picture(12),
        "candidate.png": picture(60),
        "difference.png": picture(0, 20),
    }


def hostile(text: str) -> RunReport:
    """A small report in which every string that comes from outside is `text`."""
    from dataclasses import replace

    base = report(steps=1, scale=1)
    key = NodeKey(text, "forward")
    node = replace(base.comparison.nodes[5], key=key, type_name=text, site=text, problem=text, dtype=text)
    verdict = Verdict(key, Status.DRIFT, text, 9.0, 5.0, text)
    choice = Choice(ChoiceKind.USER, text, text)
    card = replace(base.culprits[0], choices=(choice,), site=text, evidence=text, signature=text)
    assert base.timing is not None
    return replace(
        base,
        workload=text,
        folder=text,
        command=text,
        notes=(text,),
        files=(text,),
        environment=((text, text),),
        pictures=((text, text),),
        comparison=replace(base.comparison, nodes=(node, *base.comparison.nodes), warnings=(text,)),
        judgement=replace(
            base.judgement,
            policy=text,
            why=text,
            verdicts=(verdict, *base.judgement.verdicts),
            origins=(key,),
            outputs=(key,),
        ),
        choices=(ChoiceRow(choice, ChoiceState.UNAVAILABLE, text, str(key)), *base.choices),
        culprits=(card,),
        timing=replace(base.timing, warnings=(text,)),
        roles=tuple(
            replace(
                role,
                role=text,
                trace=text,
                output_digest=text,
                notes=(text,),
                plan=replace(role.plan, device=text, dtype=text),
            )
            for role in base.roles
        ),
    )


if __name__ == "__main__":
    from align.reports.html import render_html

    size = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    made = report(scale=15) if size else report()
    Path(sys.argv[1]).write_text(render_html(made, pages(made), pictures()), encoding="utf-8")
    print(len(made.comparison.nodes), "nodes", Path(sys.argv[1]).stat().st_size, "bytes")
