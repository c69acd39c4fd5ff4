"""A bisect that was killed goes on where it stopped; one that is interrupted tells what it knows so far."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from align.bisecting.bisection import BisectOptions
from align.bisecting.journal import Journal
from align.bisecting.trial import TrialResult
from align.compare.model import Status

ROOT = Path(__file__).resolve().parents[3]

SLOW = """
import os
import time
from pathlib import Path

CHOICES = tuple(f"c{i:02}" for i in range(40))
COUNT = Path(os.environ["COUNT"])


class Net(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.linear, self.on = nn.Linear(16, 16), frozenset(on)

    def forward(self, x):
        with COUNT.open("a") as file:
            file.write("x")
        time.sleep(0.1)
        h = self.linear(x)
        return h * 1.5 if "c09" in self.on or "c31" in self.on else h


def build(choices):
    return Net(choices).eval(), torch.randn(4, 16)
"""


def start(target: str, out: Path, count: Path) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "align.cli",
        "bisect",
        target,
        "--out",
        str(out),
        "--no-price",
        "--repeats",
        "1",
        "--device",
        "cpu",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COUNT": str(count)}
    return subprocess.Popen(
        command, env=environment, cwd=out.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_lines(journal: Path, lines: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if journal.is_file() and journal.read_text().count("\n") >= lines:
            return
        time.sleep(0.02)
    raise AssertionError("the journal does not grow")


def test_a_killed_bisect_goes_on_and_an_interrupted_one_tells_what_it_knows(target, tmp_path: Path) -> None:
    build, out, count = target(SLOW), tmp_path / "out", tmp_path / "count"
    journal = out / "bisect.journal.jsonl"

    killed = start(build, out, count)
    wait_for_lines(journal, 5)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    before = journal.read_text().count("\n")

    interrupted = start(build, out, count)
    wait_for_lines(journal, before + 7)
    interrupted.send_signal(signal.SIGINT)
    told, _ = interrupted.communicate()
    assert interrupted.returncode == 130
    assert told.startswith("? INTERRUPTED")
    assert "largest-passing.plan.json" in told
    before = journal.read_text().count("\n")
    ran = len(count.read_text())

    resumed = start(build, out, count)
    told, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    assert "1. user:c09" in told
    assert "2. user:c31" in told
    replayed = int(re.search(r"(\d+) of them from the journal", told)[1])
    probes, repeats = map(int, re.search(r"(\d+) probes and (\d+) repeats", told).groups())
    assert replayed == before
    # reference, baseline, the candidate once to see that it is still the same, and three runs for each first bad node
    assert len(count.read_text()) - ran == probes + repeats - replayed + 3 + 2 * 3


def result(drift: float, digest: str = "d", status: Status = Status.DRIFT) -> TrialResult:
    return TrialResult(status, drift, 0.1, "why", digest)


def test_a_journal_gives_back_what_was_answered_in_its_order(tmp_path: Path) -> None:
    on = frozenset({"fusion:a@b/c#0"})
    journal = Journal(tmp_path / "j", "name")
    for drift in (0.5, float("inf"), 0.25):
        journal.record(on, result(drift))
    again = Journal(tmp_path / "j", "name")
    assert [again.replay(on), again.replay(on), again.replay(on), again.replay(on)] == [
        result(0.5),
        result(float("inf")),
        result(0.25),
        None,
    ]
    assert again.replayed == 3


def test_a_journal_keeps_bisects_apart_runs_the_unanswered_again_and_survives_a_torn_line(tmp_path: Path) -> None:
    on = frozenset({"user:a"})
    journal = Journal(tmp_path / "j", "one")
    journal.record(on, result(0.5, status=Status.UNKNOWN))
    journal.record(on, result(0.5))
    with (tmp_path / "j").open("a") as file:
        file.write('{"bisect": "one", "on": ["user:')
    assert Journal(tmp_path / "j", "two").replay(on) is None
    assert Journal(tmp_path / "j", "one").replay(on) == result(0.5)


def test_a_journal_of_other_code_is_not_believed(target, bisect, named) -> None:
    text = """
CHOICES = ("a", "b")

class Net(nn.Module):
    def __init__(self, on):
        super().__init__()
        self.linear, self.on = nn.Linear(16, 16), frozenset(on)
    def forward(self, x):
        h = self.linear(x)
        return h * 1.5 if "a" in self.on else h

def build(choices):
    return Net(choices).eval(), torch.randn(4, 16)
"""
    assert named(bisect(target(text))) == {frozenset({"user:a"})}
    mended = bisect(
        target(text.replace('"a" in self.on', '"b" in self.on and FACTOR').replace("1.5", "1.25") + "\nFACTOR = True\n")
    )
    assert named(mended) == {frozenset({"user:b"})}
    assert any("searched anew" in note for note in mended.result.notes)
    same = bisect(
        target(text.replace('"a" in self.on', '"b" in self.on and FACTOR').replace("1.5", "1.25") + "\nFACTOR = True\n")
    )
    assert named(same) == {frozenset({"user:b"})}


def test_what_was_found_is_told_where_the_user_has_no_time_for_its_price(target, bisect, named, monkeypatch) -> None:
    def impatient(session, plans):
        raise KeyboardInterrupt

    monkeypatch.setattr("align.bisecting.conclude.time_plans", impatient)
    text = (
        SLOW.replace("range(40)", "range(12)")
        .replace("0.1", "0.0")
        .replace('os.environ["COUNT"]', '__file__ + ".count"')
    )
    done = bisect(target(text), options=BisectOptions(repeats=0, audits=0))
    assert named(done) == {frozenset({"user:c09"})}
    assert done.result.is_interrupted
    assert done.artifacts.largest_passing
