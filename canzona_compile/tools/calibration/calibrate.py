"""`calibrate`: measures the rates of this machine, and takes those that it cannot measure from a known kind."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch

from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import ONE_NODE, Hardware, named_hardware, processors
from canzona_compile.tools.calibration import ranks as started
from canzona_compile.tools.calibration.clock import Clock
from canzona_compile.tools.calibration.measure import ALONE, MeasurementSizes, Points
from canzona_compile.tools.calibration.ranks import Measured

FALLBACK = "h100"  # the kind that an unknown GPU is assumed to be for rates that were not measured

SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
EXTENTS = {
    ("cpu", False): MeasurementSizes(
        SIZES, (16, 32, 64, 128, 256, 512), (64, 256, 512, 768, 1024, 1280, 1536, 2048), 2**26, 7
    ),
    ("cpu", True): MeasurementSizes((16, 32, 64, 128, 256, 512, 1024), (16, 64, 256), (64, 512, 1024, 1536), 2**25, 5),
    ("cuda", False): MeasurementSizes(
        (64, 128, 256, 512, 1024, 2048, 4096, 8192), (64, 256, 1024, 4096), (256, 1024, 4096, 8192), 2**32, 15
    ),
    ("cuda", True): MeasurementSizes((256, 1024, 4096), (256, 1024), (1024, 4096), 2**31, 5),
}


def calibrate(
    *,
    device: str | None = None,
    base: str | None = None,
    ranks: int = 2,
    quick: bool = False,
    extent: MeasurementSizes | None = None,
) -> tuple[Hardware, bool]:
    """Measure this machine.

    On CPU this starts gloo ranks of one thread. On CUDA this process measures, together with the others that torchrun
    started, if it did.

    Args:
        device: "cpu" or "cuda"; None takes CUDA where there is one.
        base: a kind of machine, by name or file, whose rates stand where they cannot be measured here.
        ranks: how many to start on CPU; with one, links stay those of `base`.
        quick: measure fewer sizes with fewer repetitions.
        extent: what to measure instead of the two usual extents.

    Returns:
        The hardware, and whether this process is the one to show it.

    Raises:
        CanzonaError: there is no such device or base, ranks are fewer than one, or one of them failed.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CanzonaError("there is no CUDA device", hint="--device cpu measures the processor")
    if ranks < 1:
        raise CanzonaError(f"ranks is {ranks}, not a positive integer", hint="two are enough to measure a link")
    if device == "cpu" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise CanzonaError("on CPU calibrate starts its ranks itself", hint="run it without torchrun, with --ranks")
    kind = named_hardware(base or default_base(device))
    how = extent or EXTENTS[device, quick]
    if device == "cuda":
        rank, found = started.cuda(how)
        return on_cuda(found, kind, how), rank == 0
    return on_cpu(started.cpu(ranks, how), kind, how, ranks), True


def default_base(device: str) -> str:
    """The name of the known kind of machine that is most like this one."""
    if device == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name().lower()
    return next((known for known in ("a100", "h100", "h200", "gb300") if known in name), FALLBACK)


def on_cpu(found: Measured, base: Hardware, extent: MeasurementSizes, ranks: int) -> Hardware:
    """A machine whose ranks are processes that share its cores."""
    cores = processors()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
    clock = Clock(torch.device("cpu"), extent.repetitions)
    how = f"{clock.how}, of {ranks} processes at work on {cores} cores, torch {torch.__version__}"
    sources = {
        **rates_of(found, how),
        "memory": "this machine's, by its cores",
        "product_calls": f"a row of small products less their arithmetic, caches cleared; {how}",
        "host": f"a step with many small matrices, outside of its program, caches cleared; {how}",
    }
    measured = {**values_of(found), "memory": memory, "host": found.host}
    measured["product_calls"] = {name: own.call for name, own in found.products.items()}
    if found.node is not None:
        measured["node"] = asdict(found.node)
        sources["node"] = (
            f"all-to-alls of {ranks} gloo ranks on {cores} cores, CPU time of a rank's process, median of "
            f"{extent.repetitions} or more, torch {torch.__version__}"
        )
    shape = {"device": "cpu", "backend": "gloo", "ranks_per_node": max(ONE_NODE, ranks), "overlap": False}
    return base.with_measured({"name": f"cpu-{cores}", "processors": cores, **shape}, measured, sources, "calibrate")


def on_cuda(found: Measured, base: Hardware, extent: MeasurementSizes) -> Hardware:
    """A machine whose nodes have GPUs."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    how = f"{Clock(torch.device('cuda'), extent.repetitions).how}, torch {torch.__version__}"
    sources = {**rates_of(found, how), "memory": "the device's properties"}
    measured: dict[str, Any] = {**values_of(found), "memory": float(properties.total_memory)}
    for name, link in (("node", found.node), ("network", found.network)):
        if link is not None:
            measured[name] = asdict(link)
            sources[name] = f"all-to-alls of nccl ranks, wall time, median of {extent.repetitions} or more"
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    gpus = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    shape = {"device": "cuda", "backend": "nccl", "ranks_per_node": gpus, "processors": gpus, "overlap": True}
    return base.with_measured({"name": name, **shape}, measured, sources, "calibrate")


def values_of(found: Measured) -> dict[str, Any]:
    """The rates that are measured on every device. "other" factorizations get the rates of the slower one of two."""
    curves = dict(found.factorizations)
    slowest: Points = tuple(
        (rates[0][0], min(rate for _, rate in rates)) for rates in zip(*(curves[n] for n in ALONE), strict=False)
    )
    return {
        "products": {name: own.points for name, own in found.products.items()},
        "factorizations": {**curves, "other": slowest},
        "bandwidth": found.bandwidth,
        "transposed": found.transposed,
        "launch": found.launch,
    }


def rates_of(found: Measured, how: str) -> dict[str, str]:
    """The sources of the rates that `values_of` returns."""
    return {
        "products": f"square and skinny ones, in stacks; {how}",
        "factorizations": f"float32, one at a time or by their names in stacks, other: the slower of two; {how}",
        "bandwidth": f"elementwise work on fragments that no cache holds; {how}",
        "transposed": f"pairs of matrices copied to the other order; {how}",
        "launch": f"operators on next to no data, caches cleared; {how}",
    }
