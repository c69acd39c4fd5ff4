"""The ledger of a run: every choice there is, whether it was on, what its node's error says, what fusing it saves."""

from __future__ import annotations

from align.compare.model import Comparison
from align.dumpers.choice import Choice, ChoiceKind, Plan
from align.reports.model import ChoiceRow, ChoiceState
from align.session import Session


def choice_rows(session: Session, plan: Plan, comparison: Comparison) -> tuple[ChoiceRow, ...]:
    """The ledger: every choice there is, whether it was on, and what its node says."""
    worst: dict[str, tuple[float, float, str]] = {}
    for node in comparison.nodes:
        if node.candidate is not None:
            name = node.key.call_name
            if name not in worst or node.candidate.rel_l2 > worst[name][0]:
                worst[name] = (
                    node.candidate.rel_l2,
                    node.baseline.rel_l2 if node.baseline else float("nan"),
                    str(node.key),
                )
    rows = []
    for planned in session.sites:
        error, base, key = worst.get(planned.site.output, (float("nan"), float("nan"), ""))
        state = (
            ChoiceState.UNAVAILABLE
            if planned.reason
            else ChoiceState.ON
            if planned.choice in plan.choices
            else ChoiceState.OFF
        )
        label = planned.reason or (planned.kernel.label if planned.kernel else "")
        rows.append(ChoiceRow(planned.choice, state, label, key, error, base, planned.site.interior_nbytes))
    known = {row.choice for row in rows}
    rows.extend(ChoiceRow(choice, ChoiceState.ON) for choice in sorted(plan.choices - known))
    rows.extend(
        ChoiceRow(Choice(ChoiceKind.USER, name), ChoiceState.OFF)
        for name in session.user_choices
        if Choice(ChoiceKind.USER, name) not in plan.choices
    )
    return tuple(rows)
