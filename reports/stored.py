"""Keep a run's report as files and read it back, so that it can be judged and told again without running anything.

`comparison.json` holds the measures (compact, see compare/serial), `report.json` all the rest.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from align.compare import serial
from align.compare.model import Comparison, Coverage
from align.dumpers.errors import UsageError
from align.reports.model import RunReport

NAME = "report.json"
COMPARISON = "comparison.json"
_ADAPTER = TypeAdapter(RunReport)
_ELSEWHERE = Comparison((), Coverage(0, 0, 0, 0, 0, 0), has_baseline=False)


def store(report: RunReport, folder: Path) -> None:
    """Write the report into its run folder."""
    body = _ADAPTER.dump_python(replace(report, comparison=_ELSEWHERE), mode="json")
    (folder / NAME).write_text(json.dumps(body), encoding="utf-8")
    (folder / COMPARISON).write_text(serial.to_json(report.comparison), encoding="utf-8")


def load(folder: Path) -> RunReport:
    """Read the report of a run folder. Raises UsageError when there is none, or of another version."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
        comparison = serial.from_json((folder / COMPARISON).read_text(encoding="utf-8"))
        return replace(_ADAPTER.validate_json(text), comparison=comparison)
    except OSError as exc:
        raise UsageError(f"no report in {folder}: {exc.strerror}", "give a folder that `align run` made") from exc
    except ValidationError as exc:
        problem = f"{folder / NAME} is not a report of this version: {exc.error_count()} fields do not fit"
        raise UsageError(problem, "run `align run` again") from exc
