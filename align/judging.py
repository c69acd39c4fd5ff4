"""From a judgement to an exit code: one place, needing no torch."""

from __future__ import annotations

from align.compare.model import Judgement, Status


def exit_code_of(judgement: Judgement) -> int:
    """0 for a pass, 1 for a fault, 3 when nothing can be said."""
    if judgement.status in (Status.UNKNOWN, Status.REFERENCE_SUSPECT):
        return 3
    return 1 if judgement.status.is_fault else 0
