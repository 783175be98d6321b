"""`calibrate`: measures the rates of this machine, and takes those that it cannot measure from a known kind."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace

import torch

from canzona_compile.compat.telling import shown
from canzona_compile.errors import CanzonaError
from canzona_compile.machine.hardware import Hardware, hardware_from, named_hardware
from canzona_compile.session.rates import kind_of
from canzona_compile.tools.calibration import ranks as started
from canzona_compile.tools.calibration.clock import Clock
from canzona_compile.tools.calibration.measure import MeasurementSizes
from canzona_compile.tools.calibration.ranks import MeasuredRates
from canzona_compile.tools.output import check_output, write

log = logging.getLogger(__name__)

HOW = {  # what is measured, by the name of the rate
    "products": "square and skinny ones, in stacks",
    "product_calls": "a row of small products less their arithmetic, caches cleared",
    "factorizations": "float32, one at a time or by their names in stacks, other: the slower of two",
    "bandwidth": "elementwise work on fragments that no cache holds",
    "transposed": "pairs of matrices copied to the other order",
    "launch": "operators on next to no data, caches cleared",
    "host": "a step with many small matrices, outside of its program, caches cleared",
}
ONE_NODE = 1024  # ranks_per_node on CPU: all ranks share this machine, however many there are

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

    Under torchrun, also on several hosts, the processes that it started measure together. Without it, this starts
    gloo ranks of one thread on CPU, and measures in this process on CUDA.

    Args:
        device: "cpu" or "cuda"; None takes CUDA where there is one.
        base: a kind of machine, by name or file, whose rates stand where they cannot be measured here.

    Returns:
        The hardware, and whether this process is the one to show it.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CanzonaError("there is no CUDA device", hint="pass --device cpu to measure the processor")
    if ranks < 1:
        raise CanzonaError(
            f"ranks is {ranks}, not a positive integer", hint="pass at least 1; 2 ranks are enough to measure a link"
        )
    kind = named_hardware(base or kind_of(torch.device(device)))
    how = extent or EXTENTS[device, quick]
    together = int(os.environ.get("WORLD_SIZE", "1"))
    if device == "cuda" or together > 1:
        rank, found = started.joined(device, how)
        return measured_machine(found, kind, how, device, together), rank == 0
    return measured_machine(started.cpu(ranks, how), kind, how, device, ranks), True


def processors() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measured_machine(
    found: MeasuredRates, base: Hardware, extent: MeasurementSizes, device: str, ranks: int
) -> Hardware:
    """Put what ranks found in the places of the rates of a known kind of machine."""
    cores, gpu = processors(), device == "cuda"
    if gpu:
        near, shared = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count())), ""
        name = torch.cuda.get_device_name().lower().replace(" ", "-")
        memory = float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    else:
        near = int(os.environ["LOCAL_WORLD_SIZE"]) if "network" in found else max(ONE_NODE, ranks)
        shared = f", of {ranks} processes at work on {cores} cores"
        name = f"cpu-{cores}"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / cores
    backend, time = ("nccl", "wall time") if gpu else ("gloo", "CPU time of a rank's process")
    version = f"torch {torch.__version__}"
    clock = Clock(torch.device(device), extent.repetitions)
    links = f"all-to-alls of {ranks} {backend} ranks, {time}, median of {extent.repetitions} or more, {version}"
    sources = {rate: f"{words}; {clock.how}{shared}, {version}" for rate, words in HOW.items()}
    sources |= {"node": links, "network": links if gpu else links.replace(time, "wall time")}
    sources["memory"] = "the device's properties" if gpu else "this machine's, by its cores"
    overlap = found.pop("overlap", gpu)
    measured = {**found, "memory": memory}
    shape = {"name": name, "device": device, "backend": backend, "overlap": overlap}
    shape |= {"ranks_per_node": near, "processors": near if gpu else cores}
    kept = {rate: f"assumed, as {base.name}: {text}" for rate, text in base.sources if rate not in measured}
    kept |= {rate: sources[rate] for rate in measured}
    return hardware_from(
        {**base.to_dict(), **shape, **measured, "sources": kept, "measured": sorted(measured)}, "calibrate"
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `calibrate` to its parser."""
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", help="write the JSON to this file instead of standard output")
    add("--device", choices=("cpu", "cuda"), help="the device to measure (default: cuda if there is one)")
    add("--base", metavar="NAME", help="machine or file that gives the rates which cannot be measured here")
    add("--ranks", type=int, default=2, help="number of gloo processes to start on CPU (%(default)s)")
    add("--quick", action="store_true", help="measure fewer sizes, with fewer repetitions")


def run(given: Namespace) -> int:
    """Measure, and write the file that `plan --hardware` and `wrap(hardware=)` read; the exit code is 0."""
    check_output(given.output, "-o")
    with shown("calibrate", quiet=given.quiet):
        hardware, shows = calibrate(device=given.device, base=given.base, ranks=given.ranks, quick=given.quick)
    if not shows:
        return 0
    write(hardware.to_json(), given.output, "-o")
    if given.output is not None:
        log.info("%s: measured %s; assumed %s", given.output, ", ".join(hardware.measured), ", ".join(hardware.assumed))
    return 0
