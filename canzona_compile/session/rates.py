"""Measure the rates that a plan depends on, on the ranks that are about to make it.

Each set of ranks that shares matrices exchanges messages, alone and beside products. Each rank times products and
decompositions of the dtypes that its captured code has. All times are by the clock on the wall, of ranks that do the
same at once, so that ranks which share cores or links measure what is left to each. Of what ranks found the slowest
counts, rounded to steps of `STEP`, so that another run on the same machines plans alike.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from canzona_compile.analysis.flops import DECOMPOSITIONS
from canzona_compile.analysis.roofline import works
from canzona_compile.compat.duplex import all_to_all
from canzona_compile.compat.telling import tell
from canzona_compile.ir.layout import Ranks
from canzona_compile.ir.program_ops import Watch
from canzona_compile.machine.hardware import HERE, Curve, Hardware, Link, assumed_hardware, named_hardware
from canzona_compile.runtime.agreement import Agreement
from canzona_compile.session.plan import BoundParam

STEP = 1.25
LONG = 0.015  # seconds of an exchange or a product that is long enough
SIZES = (32, 128, 512, 2048)  # of products and decompositions, as far as they are not longer than LONG by much
FIRST, LARGEST = 2**16, {"cpu": 2**24, "cuda": 2**26}  # bytes that a rank exchanges
LEAST = 0.1  # share of an exchange that a product hides on CPUs: gloo's threads send when they get a core
TINY = 8  # exchanges of the smallest size, of which the shortest is the latency: others wait for a core
ROUNDS = 4  # after which ranks of sets that share members, through up to so many others, know the slowest of all
FALLBACK = "h100"  # the kind that an unknown GPU is assumed to be for rates that are not measured
BESIDE = 256  # rows and columns of the products beside an exchange

Slowness = dict[str, dict[str, float]]  # seconds, per byte or FLOP, by field of `Hardware` and in it by name


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the captured code of this rank does: dtypes of its products, and names of its decompositions."""

    products: tuple[torch.dtype, ...]
    decompositions: tuple[str, ...]

    @property
    def beside(self) -> torch.dtype:
        """The dtype of the products beside exchanges."""
        return self.products[0] if self.products else torch.float32

    @classmethod
    def by(cls, bound: Iterable[BoundParam]) -> Wanted:
        """Find it."""
        hardware = assumed_hardware("cpu")  # of which nothing counts here
        kinds = {id(b.kind): b.kind for b in bound}.values()
        graphs = [t.graph for kind in kinds for t in kind.templates.values() if not t.interpreted]
        found = [work for graph in graphs for work in works(graph, hardware)]
        named = [getattr(torch, name) for name in sorted({work.product for work in found if work.product})]
        dtypes = tuple(dtype for dtype in named if dtype.is_floating_point and dtype.itemsize > 1)
        return cls(dtypes, tuple(sorted({work.name for work in found if work.name})))


def shared_by(bound: Iterable[BoundParam]) -> set[Ranks]:
    """The sets of ranks that share matrices."""
    known: dict[int, bool] = {}
    found = set()
    for b in bound:
        if b.task.layout.grid.size > 1:
            if id(b.kind) not in known:
                wanted = Wanted.by([b])
                eager = any(t.interpreted for t in b.kind.templates.values())
                known[id(b.kind)] = eager or bool(wanted.products or wanted.decompositions)
            if known[id(b.kind)]:
                found.add(b.task.layout.grid.members())
    return found


def measured_rates(
    sets: Mapping[Ranks, tuple[Agreement, dist.ProcessGroup]], wanted: Wanted, device: torch.device, watch: Watch
) -> Hardware:
    """Measure, and agree with the other ranks of each set. This is a collective of all of them."""
    tell("measuring rates")
    began = time.perf_counter()
    found: Slowness = {}
    for ranks in sorted(sets):
        agreement, group = sets[ranks]
        hosts = agreement.share(socket.gethostname())
        if not found:  # now that the others do the same
            found = alone(wanted, device)
        field = "node" if len(set(hosts)) == 1 else "network"
        slower(found, {field: exchanges(group, device, watch, wanted.beside)})
    near = float(os.environ.get("LOCAL_WORLD_SIZE") or (1 if "network" in found else dist.get_world_size()))
    slower(found, {"all": {"seconds": time.perf_counter() - began, "ranks of a node": near}})
    for _ in range(ROUNDS):
        for ranks in sorted(sets):
            for text in sets[ranks][0].share(json.dumps(found)):
                slower(found, json.loads(text))
    return hardware_of(found, device)


def slower(found: Slowness, other: Slowness) -> None:
    """Take over what is slower on another rank."""
    for field, own in other.items():
        known = found.setdefault(field, {})
        known |= {name: max(value, known.get(name, 0.0)) for name, value in own.items()}


def hardware_of(found: Slowness, device: torch.device) -> Hardware:
    """Put rounded rates in the places of those that are assumed."""
    base = named_hardware(kind_of(device))
    near = max(1, int(found["all"]["ranks of a node"]))
    curves: dict[str, dict[str, Curve]] = {"products": {}, "factorizations": {}}
    for field, made in curves.items():
        points: dict[str, list[tuple[float, float]]] = {}
        for name, taken in found.get(field, {}).items():
            kind, size = name.split()
            points.setdefault(kind, []).append((float(size), 1 / rounded(taken)))
        made |= {kind: Curve(tuple(sorted(own))) for kind, own in points.items()}
    links = {field: link_of(found[field]) for field in ("node", "network") if field in found}
    only = next(iter(links.values()))
    hidden = [own["exposed"] for field, own in found.items() if field in links]
    how = f"measured by the ranks of this run before their first plan, in {found['all']['seconds']:.2g} s"
    measured = sorted({*links, *(field for field, own in curves.items() if own)})
    return replace(
        base,
        name=HERE,
        ranks_per_node=near,
        processors=near,
        overlap=max(LEAST, round(1.0 - max(hidden), 1)) if device.type == "cpu" else base.overlap,
        products=tuple((dict(base.products) | curves["products"]).items()),
        factorizations=tuple((dict(base.factorizations) | curves["factorizations"]).items()),
        node=links.get("node", only),
        network=links.get("network", only),
        sources=tuple({**dict(base.sources), **dict.fromkeys(measured, how)}.items()),
        measured=tuple(measured),
    )


def kind_of(device: torch.device) -> str:
    """The name of the known kind of machine that is most like this one."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower()
    return next((known for known in ("a100", "h100", "h200", "gb300") if known in name), FALLBACK)


def link_of(found: Mapping[str, float]) -> Link:
    return Link(1 / rounded(found["seconds_per_byte"]), rounded(found["latency"]))


def rounded(value: float) -> float:
    """The nearest power of `STEP`."""
    return STEP ** round(math.log(value, STEP))


# -- what is timed -------------------------------------------------------------------------------------


def alone(wanted: Wanted, device: torch.device) -> Slowness:
    """Seconds per FLOP of products and decompositions, by dtype or name and size.

    Not on CUDA, where a call by itself mostly waits for its launch: rates of its kind of GPU are known better.
    """
    found: Slowness = {"products": {}, "factorizations": {}}
    if device.type == "cuda":
        return found
    for dtype in wanted.products:
        for size, seconds in rising(partial(product, dtype, device), device):
            found["products"][f"{str(dtype).removeprefix('torch.')} {size}"] = seconds / (2 * size**3)
    for name in wanted.decompositions:
        if name in ("eigh", "qr"):
            for size, seconds in rising(partial(decomposition, name, device), device):
                found["factorizations"][f"{name} {size}"] = seconds / (float(DECOMPOSITIONS[name]) * size**3)
    return found


Work = Callable[[], object]


def product(dtype: torch.dtype, device: torch.device, size: int) -> Work:
    """A matrix times its transpose."""
    matrix = torch.full((size, size), 1.0 / size, dtype=dtype, device=device)
    return lambda: torch.mm(matrix, matrix.mT)


def decomposition(name: str, device: torch.device, size: int) -> Work:
    """One of a symmetric matrix with eigenvalues that are all different."""
    places = torch.arange(size, dtype=torch.float32, device=device)
    matrix = torch.outer(places.sin(), places.sin()) + torch.diag(places + 1.0)
    return lambda: getattr(torch.linalg, name)(matrix)


def rising(make: Callable[[int], Work], device: torch.device) -> Iterable[tuple[int, float]]:
    """The seconds of work of ascending sizes, until it takes long."""
    seconds = 0.0
    for size in SIZES:
        if seconds * 64 > 10 * LONG:
            return
        work = make(size)
        work()
        seconds = min(lasting(work, device) for _ in range(2))
        yield size, seconds


def lasting(work: Work, device: torch.device) -> float:
    """Mean seconds of work that is repeated for `LONG`, so that ranks which share cores get their share of them."""
    count, begin = 0, now(device)
    while True:
        work()
        count += 1
        if (taken := now(device) - begin) >= LONG:
            return taken / count


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def exchanges(group: dist.ProcessGroup, device: torch.device, watch: Watch, dtype: torch.dtype) -> dict[str, float]:
    """The seconds of the smallest all-to-all, seconds per byte that a rank sends, and the share that no product hides.

    This is a collective.

    Args:
        dtype: of the products.
    """
    timer = LinkTimer(group, device, watch)
    found, start, longest = timer.link()
    beside = product(dtype, device, BESIDE)
    beside()
    each = timer.agreed(lasting(beside, device))[0]
    count = max(1, math.ceil(longest / each))

    def tried() -> list[float]:
        timed = timer.timed
        return timer.agreed(timed(lambda: None, beside, count), timed(start), timed(start, beside, count))

    products, bare, together = (min(own) for own in zip(tried(), tried(), strict=True))
    exposed = (together - products) / bare if products > bare else (together - bare) / products
    return {**found, "exposed": min(1.0, max(0.0, exposed))}


def agreed_link(agreement: Agreement, group: dist.ProcessGroup, device: torch.device, watch: Watch) -> Link:
    """Measure the link of ranks that exchange. This is a collective of an agreement, which may have several groups.

    The rates are those of the slowest group.
    """
    tell("measuring rates")
    found: Slowness = {"link": LinkTimer(group, device, watch).link()[0]}
    for text in agreement.share(json.dumps(found)):
        slower(found, json.loads(text))
    return link_of(found["link"])


@dataclass(frozen=True, slots=True)
class LinkTimer:
    """Times exchanges of some ranks, all of which make the same calls."""

    group: dist.ProcessGroup
    device: torch.device
    watch: Watch

    def agreed(self, *values: float) -> list[float]:
        """The largest of all ranks, who all come here first."""
        told = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.watch.wait(dist.all_reduce(told, dist.ReduceOp.MAX, group=self.group, async_op=True))
        found: list[float] = told.tolist()
        return found

    def exchange(self, size: int) -> Callable[[], Any]:
        """An all-to-all in which each rank has so many bytes."""
        ranks = self.group.size()
        sent = torch.zeros(max(1, size // ranks) * ranks, dtype=torch.uint8, device=self.device)
        received = torch.empty_like(sent)
        sizes = [len(sent) // ranks] * ranks
        return lambda: all_to_all(received, sent, sizes, sizes, self.group)

    def timed(self, start: Callable[[], Any], beside: Work = lambda: None, count: int = 0) -> float:
        """The seconds of an exchange, and of products that run meanwhile."""
        begin = now(self.device)
        work = start()
        for _ in range(count):
            beside()
        if work is not None:
            self.watch.wait(work)
        return now(self.device) - begin

    def link(self) -> tuple[dict[str, float], Callable[[], Any], float]:
        """The latency and the seconds per byte, the longest exchange, and its seconds."""
        ranks, smallest = self.group.size(), self.exchange(1)
        latency = min(self.agreed(*(self.timed(smallest) for _ in range(TINY))))
        size, points = FIRST, [(0.0, latency)]
        while True:
            start = self.exchange(size)
            self.agreed(self.timed(start))
            shortest = min(self.agreed(self.timed(start))[0], self.agreed(self.timed(start))[0])
            points.append((size * (ranks - 1) / ranks, shortest))
            if shortest >= LONG or size >= LARGEST[self.device.type]:
                break
            size *= 2
        (before, shorter), (sent, longest) = points[-2:]
        rate = (longest - shorter) / (sent - before) if longest > shorter else longest / sent
        return {"latency": latency, "seconds_per_byte": rate}, start, longest
