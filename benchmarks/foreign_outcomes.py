"""What became of a test of others with wrapped optimizers, compared with the same test and plain ones."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SKIPPED, PLAIN_FAILS, PASSED, REFUSED, DIFFERENT, ERROR = OUTCOMES = (
    "skipped",  # plain is
    "plain fails",
    "passed",
    "refused",  # by an error that says what it does not take
    "different",  # a value or an error that the test does not expect
    "error",  # any other
)
BAD = (DIFFERENT, ERROR)
LONGEST = 240  # characters of a reason
NEVER_ENDED = "the test never ended"
_REFUSAL = re.compile(r"canzona_compile\.errors\.(\w+): (.*)")
_BUGS = ("InvalidStep", "PipelineError")  # of ours, never of the user
_BUG = re.compile(r"planning failed|\ba bug in\b")
_FILE = re.compile(r'^\s*(?:\| )*File "([^"]+)", line (\d+)', re.MULTILINE)
_ERROR = re.compile(r"^(?:E\s+)?((?:\w+\.)*[A-Z]\w*)(?::\s*(.*))?$", re.MULTILINE)
_OURS = re.compile(r"/(canzona_compile|passes|kernels)/[\w/]+\.py$")
_CHECKS = re.compile(
    r"/(unittest|absl/testing|numpy/testing|torch/testing|tests?|_pytest)/|/(test_\w*|\w*_test|foreign_\w+)\.py$"
)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a test ended in one run: "passed", "failed" or "skipped", its traceback, the optimizers that it wrapped."""

    outcome: str
    text: str = ""
    wrapped: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Compared:
    """A test in both runs: one of `OUTCOMES`, and the reason unless it is passed."""

    test: str
    outcome: str
    reason: str
    ours: Ended


def read(results: Path) -> dict[str, Ended]:
    """Every test of a run by its id; those that were collected and never ended have failed."""
    found: dict[str, Ended] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        said = json.loads(line)
        test = said.pop("test")
        if said["outcome"] == "collected":
            found.setdefault(test, Ended("failed", NEVER_ENDED))
        else:
            found[test] = Ended(**said)
    return found


def compare(plain: Mapping[str, Ended], ours: Mapping[str, Ended]) -> Iterator[Compared]:
    """Every test of either run."""
    for test in {**plain, **ours}:
        expected, found = plain.get(test, Ended("failed", NEVER_ENDED)), ours.get(test, Ended("failed", NEVER_ENDED))
        if expected.outcome == "skipped":
            yield Compared(test, SKIPPED, "", found)
        elif expected.outcome != "passed":
            yield Compared(test, PLAIN_FAILS, last_error(expected.text), found)
        else:
            yield Compared(test, *judged(found), found)


def judged(ours: Ended) -> tuple[str, str]:
    """The outcome of a test that passes with plain optimizers, and the reason."""
    if ours.outcome == "passed":
        return PASSED, ""
    if ours.outcome == "skipped":
        return ERROR, "skipped with wrapped optimizers only"
    if refusals := _REFUSAL.findall(ours.text):
        kind, problem = refusals[0]
        bug = kind in _BUGS or _BUG.search(ours.text)
        return ERROR if bug else REFUSED, f"{kind}: {problem}"
    files = _FILE.findall(ours.text)
    reason = last_error(ours.text)
    if not files:
        return ERROR, reason
    path, line = files[-1]
    where = f"{reason} ({Path(path).name}:{line})"
    in_a_check = reason.startswith("AssertionError") and _CHECKS.search(path) and not _OURS.search(path)
    return DIFFERENT if in_a_check else ERROR, where


def last_error(text: str) -> str:
    """The last error of a traceback in a line: what it is, and what it says."""
    found = _ERROR.findall(text)
    if not found:
        return text.strip().splitlines()[-1] if text.strip() else ""
    kind, said = found[-1]
    return f"{kind}: {said}"[:LONGEST] if said else str(kind)


def counts(found: Sequence[Compared]) -> Counter[str]:
    """How many tests have each outcome."""
    return Counter(one.outcome for one in found)
