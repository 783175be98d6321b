"""Measured steps as figures: sums over ranks and steps, and back from JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import RATES, Machine, assumed_hardware
from canzona_compile.report.build import Facts, headline, make_report
from canzona_compile.report.measured import read_measured
from canzona_compile.report.schema import MeasuredReport
from canzona_compile.session.measuring import Measurement, RankTimes
from tests.harness.samples import grid_of
from tests.report.test_report import scheduled

# The rates that calibrate finds on one machine; steps on it do not depend on the others.
CALIBRATED = replace(assumed_hardware("cpu"), measured=tuple({*RATES} - {"network", "memory"}))
STEP = replace(scheduled(grid_of(1, 2), (64, 32), (48, 64)), machine=Machine("cpu", "gloo", 1, CALIBRATED))
# Two steps of two ranks. Rank 1 computes, rank 0 waits for it; the second step takes three times as long.
TIMES = {
    0: RankTimes((4.0, 12.0), (3.0, 9.0), ({"wait gather": 3.0, "other": 1.0}, {"wait gather": 9.0, "other": 3.0})),
    1: RankTimes((4.0, 12.0), (0.0, 0.0), ({"start gather": 1.0, "compute": 3.0}, {"compute": 12.0})),
}


def measured() -> MeasuredReport:
    facts = Facts(world_size=2, measurement=Measurement("cpu", TIMES, (STEP, STEP), ()))
    found = make_report(STEP, facts).measured
    assert found is not None
    return found


def test_sums_over_ranks_and_steps() -> None:
    found = measured()
    assert (found.steps, found.ranks, found.seconds, found.worst_seconds) == (2, 2, 8.0, 12.0)
    assert (found.exposed, found.exposed_worst, found.overlapped) == (3.0, 6.0, 0.0)
    gather, compute, other = found.phases
    assert (gather.name, gather.mean, gather.median, gather.worst) == ("gather", 3.25, 3.25, 4.5)
    assert (gather.slowest_rank, gather.slowest) == (0, 6.0)
    assert (compute.name, compute.mean, compute.worst, compute.slowest_rank) == ("compute", 3.75, 6.0, 1)
    assert compute.skew == 2.0
    assert (other.name, other.predicted, other.error) == ("other", None, None)
    assert gather.predicted is not None
    assert gather.error == gather.predicted / 3.25 - 1
    assert sum(phase.mean for phase in found.phases) == found.seconds


@pytest.mark.parametrize("rate", ["", "products", "node", "factorizations"])
def test_one_rate_that_is_assumed_and_counts_leaves_no_prediction(rate: str) -> None:
    rates = replace(CALIBRATED, measured=tuple({*CALIBRATED.measured} - {rate}))
    step = replace(STEP, machine=Machine("cpu", "gloo", 1, rates))
    report = make_report(step, Facts(world_size=2, measurement=Measurement("cpu", TIMES, (step, step), ())))
    assert report.measured is not None
    counts = rate in ("products", "node")  # Muon factorizes nothing
    assert report.measured.assumed == ((rate,) if counts else ())
    assert (report.measured.predicted_seconds is None) == counts
    assert ("measured step 8 s, simulated " in headline(report)) != counts


def test_there_and_back(tmp_path: Path) -> None:
    facts = Facts(world_size=2, measurement=Measurement("cpu", TIMES, (STEP, STEP), ()))
    file = tmp_path / "report.json"
    file.write_text(make_report(STEP, facts).to_json())
    assert read_measured(file) == measured()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it cannot be read"),
        ("[]", "it holds no measured steps"),
        ('{"measured": null}', "it holds no measured steps"),
        (json.dumps({"measured": {**asdict(measured()), "more": 1}}), "other fields"),
        ('{"measured": {}}', "other fields"),
    ],
    ids=["no JSON", "a list", "none", "more", "less"],
)
def test_what_is_no_report(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(text)
    with pytest.raises(CanzonaError, match=said):
        read_measured(file)
    with pytest.raises(CanzonaError, match="cannot be read"):
        read_measured(tmp_path / "nothing.json")
