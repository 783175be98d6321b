"""Calibration: what is measured, what is kept of a known kind, and that the sums are right."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from canzona_compile.__main__ import main
from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import hardware_from, named_hardware
from canzona_compile.tools.calibration import ranks as started
from canzona_compile.tools.calibration.calibrate import EXTENTS, calibrate, measured_machine
from canzona_compile.tools.calibration.clock import Clock
from canzona_compile.tools.calibration.measure import MeasurementSizes, dims_of, products, transposed
from tests.harness.ranks import run

TINY = MeasurementSizes((16, 64, 256), (16, 32), (64, 256), 2**20, 3)
CPU = torch.device("cpu")


# -- the sums --------------------------------------------------------------------------------------


class Count(TorchDispatchMode):
    """Counts products and their FLOPs, and bytes that are copied."""

    calls = flops = copied = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.calls += 1
            self.flops += 2 * made.numel() * args[0].shape[-1]
        if func is torch.ops.aten.copy_.default:
            self.copied += 2 * made.numel() * made.itemsize
        return made


class Model:
    """A clock of a machine whose rates are known: seconds follow from what is done."""

    device, repetitions = CPU, 1

    def __init__(self, call: float, rate: float, bandwidth: float) -> None:
        self.call, self.rate, self.bandwidth = call, rate, bandwidth

    def seconds(self, work: Callable[[], object], before: Callable[[], object] | None = None) -> float:
        if before is not None:
            before()
        with Count() as found:
            work()
        return found.calls * self.call + found.flops / self.rate + found.copied / self.bandwidth


@pytest.mark.parametrize("call", [0.0, 2e-6, 1e-5])
def test_calls_and_arithmetic_are_told_apart(call: float) -> None:
    model: Any = Model(call, 5e10, 1e9)
    found = products(model, torch.float32, (16, 64, 256), 2**12)
    taken, points = found
    assert taken == pytest.approx(call, abs=1e-12)
    assert [size for size, _ in points] == [16, 64, 256]
    assert [rate for _, rate in points] == pytest.approx([5e10] * 3)


def test_copies_to_the_other_order_count_bytes_twice() -> None:
    model: Any = Model(0.0, 1.0, 3e9)
    assert [rate for _, rate in transposed(model, (64, 256))] == pytest.approx([3e9, 3e9])


@pytest.mark.parametrize("size", [16, 24, 100])
def test_square_and_skinny_products_have_the_same_flops(size: int) -> None:
    assert {math.prod(dims) for dims in dims_of(size)} == {size**3}


def test_what_comes_before_is_not_timed() -> None:
    done: list[str] = []
    clock = Clock(CPU, 3)
    assert clock.seconds(lambda: done.append("work"), before=lambda: done.append("before")) >= 0
    assert done == ["work", *["before", "work"] * 3]


def test_ranks_agree_on_medians_up_to_the_shortest_curve() -> None:
    found = [
        {"products": {"float32": ((16.0, rate), (32.0, 2 * rate))[:sizes]}, "launch": rate}
        for rate, sizes in ((1.0, 2), (3.0, 1), (8.0, 2))
    ]
    assert started.medians(found) == {"products": {"float32": ((16.0, 3.0),)}, "launch": 3.0}


def test_a_machine_with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=8e10)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    rates = {"launch": 5e-6, "bandwidth": 2e12, "node": {"bandwidth": 1e11, "latency": 1e-5, "per_peer": 0.0}}
    found = measured_machine(rates, named_hardware("h100"), TINY, "cuda", 8)
    assert (found.name, found.backend, found.ranks_per_node, found.processors) == ("nvidia-some-gpu", "nccl", 4, 4)
    assert found.measured == ("bandwidth", "launch", "memory", "node")
    assert (found.launch, found.memory, found.node.bandwidth) == (5e-6, 8e10, 1e11)
    assert dict(found.sources)["node"].startswith("all-to-alls of 8 nccl ranks, wall time")


# -- this machine ----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_two_ranks_measure_all_but_the_network(tmp_path: Path) -> None:
    found, shows = calibrate(device="cpu", ranks=2, extent=TINY)
    assert shows
    assert found.assumed == ("network",)
    assert (found.device, found.backend, found.overlap) == ("cpu", "gloo", False)
    assert [size for size, _ in dict(found.products)["bfloat16"].points] == [16, 64, 256]
    positive = [found.bandwidth, found.launch, found.host, found.memory, found.node.bandwidth, found.node.latency]
    positive += [found.product_rate(dtype, 100) for dtype in ("bfloat16", "float32")]
    positive += [found.factorization_rate(name, 32) for name in ("eigh", "qr", "svd")]
    assert all(0 < value < math.inf for value in positive), positive
    sources = dict(found.sources)
    assert "CPU time of a thread, median of 3, of 2 processes" in sources["products"]
    assert "2 gloo ranks" in sources["node"]
    assert sources["network"].startswith("assumed, as cpu: ")
    file = tmp_path / "mine.json"
    file.write_text(found.to_json())
    assert named_hardware(str(file)) == found


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_one_rank_has_no_link_to_measure() -> None:
    found, _ = calibrate(device="cpu", ranks=1, extent=TINY)
    assert set(found.assumed) == {"node", "network"}
    assert found.node == named_hardware("cpu").node


@pytest.mark.full
@pytest.mark.usefixtures("forked")
def test_plan_and_report_stand_on_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXTENTS, ("cpu", True), TINY)
    file = tmp_path / "mine.json"
    assert main(["calibrate", "--quiet", "--quick", "-o", str(file)]) == 0
    assert capsys.readouterr().out == ""
    rates = json.loads(file.read_text())
    line = ["plan", "--params", str(shapes(tmp_path)), "--mesh", "fsdp=2", "--hardware", str(file), "--format", "json"]
    assert main(line) == 0
    made = json.loads(capsys.readouterr().out)
    assert set(made["forecast"]["hardware"]["measured"]) == set(rates["measured"]) >= {"products", "node", "launch"}


def shapes(folder: Path) -> Path:
    file = folder / "shapes.json"
    file.write_text(json.dumps({"one": [64, 64], "other": [128, 64]}))
    return file


def spoiled(rank: int, *_: object) -> None:
    raise RuntimeError(f"no memory on rank {rank}")


@pytest.mark.usefixtures("forked")
def test_a_rank_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started, "cpu_rank", spoiled)
    with pytest.raises(CanzonaError, match=r"a rank of the calibration failed: .*no memory on rank") as caught:
        calibrate(device="cpu", ranks=1, extent=TINY)
    assert caught.value.hint == "fewer --ranks need less memory and fewer ports"


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"base": "h1000"}, "no hardware 'h1000'"),
        ({"device": "cuda"}, "there is no CUDA device"),
    ],
)
def test_what_cannot_be_measured(options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CanzonaError, match=says):
        calibrate(extent=TINY, **options)


def on_two_hosts() -> str:
    """As if torchrun had started one rank on each of two hosts."""
    own = {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, own):
        found, shows = calibrate(device="cpu", extent=TINY)
    assert shows == (dist.get_rank() == 0)
    return found.to_json()


def test_ranks_of_several_hosts_measure_the_link_between_them() -> None:
    texts = run(2, on_two_hosts)
    found = hardware_from(json.loads(texts[0]), "a rank")
    assert "network" in found.measured
    assert "node" not in found.measured
    assert found.ranks_per_node == 1
    assert 0.0 <= found.overlap <= 1.0


@pytest.mark.parametrize(("output", "says"), [("no/mine.json", "there is no such folder"), (".", "it is a folder")])
def test_a_file_that_cannot_be(output: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "-o", str(tmp_path / output)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"it cannot be written: {says}" in err
