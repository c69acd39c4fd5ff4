"""Policies as values: which rule judges a node and with which limits. Measuring knows nothing of them.

    cann-l0/l1/l2  ratios of the candidate's error to the baseline's: MARE 10/5/2, MERE 2/1.5/1.2, RMSE 2/1.5/1.2,
                   small-value errors 2 (CANN operator precision standard, dual-benchmark form); `standard` where there
                   is no baseline
    standard       absolute limits by dtype: MERE < T and MARE < 10 T, or these on a network's scale (judge_rules)
    cosine         1 - cos and the largest absolute error, nothing else
    auto           the spread of perturbed baseline runs (tolerance); `cann-l1` at nodes without one
    ignore         not judged at all: for overrides

Limits hold as written for ordinary operators; for sensitive ones (attention, normalisation, softmax) what a limit
allows beyond equality is cut by a fifth.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import StrEnum

from align.dumpers.errors import UsageError
from align.dumpers.model import OpClass

DEFAULT = "cann-l1"
_SENSITIVE_SHARE = 0.8


class Method(StrEnum):
    """The rule that a policy applies."""

    RATIO = "ratio"
    ABSOLUTE = "absolute"
    COSINE = "cosine"
    SPREAD = "spread"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule and its limits; those a rule does not use are left alone.

    mare, mere, rmse, small_errors   allowed ratios to the baseline (RATIO, and SPREAD without a spread)
    cosine_distance                  allowed 1 - cos (COSINE): 1e-3 is cos 0.999, 4.5 % of relative error
    peak                             allowed largest error over the largest reference value (COSINE)
    """

    name: str
    method: Method
    mare: float = 5.0
    mere: float = 1.5
    rmse: float = 1.5
    small_errors: float = 2.0
    cosine_distance: float = 1e-3
    peak: float = 0.1

    def ratio_limit(self, limit: float, op_class: OpClass) -> float:
        """A limit on a ratio as it holds for an operator class."""
        return 1.0 + (limit - 1.0) * self.share(op_class)

    def share(self, op_class: OpClass) -> float:
        """The part of an allowance that an operator class gets."""
        return _SENSITIVE_SHARE if op_class is OpClass.SENSITIVE else 1.0


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("cann-l0", Method.RATIO, mare=10.0, mere=2.0, rmse=2.0),
        Policy("cann-l1", Method.RATIO, mare=5.0, mere=1.5, rmse=1.5),
        Policy("cann-l2", Method.RATIO, mare=2.0, mere=1.2, rmse=1.2),
        Policy("standard", Method.ABSOLUTE),
        Policy("cosine", Method.COSINE),
        Policy("auto", Method.SPREAD),
        Policy("ignore", Method.IGNORE),
    )
}

Overrides = tuple[tuple[str, Policy], ...]


def policy_named(name: str) -> Policy:
    """The policy of that name. Raises UsageError with the names there are, and the nearest."""
    if name in POLICIES:
        return POLICIES[name]
    near = difflib.get_close_matches(name, POLICIES, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UsageError(f"unknown policy {name!r}", f"{hint}policies: {', '.join(POLICIES)}")


# T of the CANN ecosystem operator precision standard: MERE < T and MARE < 10 T against a reference of higher precision.
_THRESHOLDS = {
    "float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-13, "float64": 2.0**-13,
    "float8_e4m3fn": 2.0**-3, "float8_e4m3fnuz": 2.0**-3, "float8_e5m2": 2.0**-2, "float8_e5m2fnuz": 2.0**-2,
    "complex32": 2.0**-10, "complex64": 2.0**-13, "complex128": 2.0**-13,
}  # fmt: skip


def threshold_of(dtype: str) -> float:
    """T of a dtype; float64 has float32's, as the reference is float32; 0 for dtypes that do not round."""
    return _THRESHOLDS.get(dtype, 0.0)
