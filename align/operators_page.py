"""Print docs/operators.md from the catalog itself: `python -m align.operators_page > docs/operators.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from align.catalog_view import DEVICES, main_entry
from align.operators.base import Operator
from align.operators.registry import catalog

_HEAD = """\
# The operator catalog

Written by `python -m align.operators_page`; do not edit. `align ops TARGET` lists the sites of a workload.

Every operator has an unfused form in primitive calls, which the baseline and the reference run, and fused kernels on
the devices named. A device that is not named has none, and sites of the operator stay unfused there.
"""

_TAIL = """
## Operators of your own

A call that the catalog does not know (a custom operator, a new `npu_*` call) needs its unfused form, once, anywhere
that is imported with your target:

```python
import align, torch

@align.replaces_call("npu_my_op")            # or "myspace::my_op"
def my_op(x, weight, scale=1.0):             # same arguments, primitive calls
    return torch.relu(x @ weight) * scale
```

A fused form for whole modules, switched by a choice of the function's name:

```python
@align.fuses_module("unet.*.attn")
def my_attention(module, x, mask=None):
    return fast_attention(module.to_qkv(x), mask)
```

Your own code can also ask: `if align.choice("fast_norm"): ...` is a choice like any other.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_overview(), "", *_details()]) + _TAIL


def _overview() -> Iterator[str]:
    yield "| operator | class | " + " | ".join(DEVICES) + " | what it is |"
    yield "|---|---|" + "---|" * len(DEVICES) + "---|"
    for name, same in _by_name():
        cells = ["yes" if any(kind in operator.kernels for operator in same) else "-" for kind in DEVICES]
        main = main_entry(same)
        yield f"| `{name}` | {main.op_class} | {' | '.join(cells)} | {main.summary} |"


def _details() -> Iterator[str]:
    for name, same in _by_name():
        yield f"\n## `{name}`\n"
        for operator in same:
            yield f"* {operator.summary}"
            yield f"  * rounding of the unfused form: {operator.rounding}"
            for kind in DEVICES:
                if kind in operator.kernels:
                    yield f"  * {kind}: {operator.kernels[kind].label}"


def _by_name() -> Iterator[tuple[str, list[Operator]]]:
    for name in sorted({operator.name for operator in catalog()}):
        yield name, [operator for operator in catalog() if operator.name == name]


if __name__ == "__main__":
    sys.stdout.write(page())
