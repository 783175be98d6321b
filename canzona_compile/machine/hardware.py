"""The rates of a machine: data that is read from a JSON file, with a source for every rate.

A rate that no one measured on the machine at hand is *assumed*. `calibrate` measures: it times single operators and
transfers. A prediction names the rates that it uses, and says for each whether it was measured or assumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from canzona_compile.errors import CanzonaError

KEPT = "\n\t"


def parsed(text: str) -> Any:
    """Parse the text of a JSON file. Characters that are not printed are spelled in its texts and names."""
    try:
        return printable(json.loads(text))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_json(path: Path, hint: str) -> Any:
    """Read a JSON file."""
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = "pass a file that exists and can be read"
        raise CanzonaError(f"it cannot be read: {error.strerror or error}", at=str(path), hint=known) from error
    except ValueError as error:
        raise CanzonaError(f"the file is not JSON: {error}", at=str(path), hint=hint) from error


def printable(value: Any) -> Any:
    """Spell the characters that are not printed, such as those of escape codes, in all texts of a JSON value."""
    match value:
        case str():
            return value if value.isprintable() else "".join(map(spelled, value))
        case dict():
            return {printable(name): printable(own) for name, own in value.items()}
        case list():
            return [printable(own) for own in value]
    return value


def spelled(character: str) -> str:
    """Return a character, or its code if it is not printed."""
    return character if character.isprintable() or character in KEPT else ascii(character)[1:-1]


HERE = "measured"  # the name of rates that the ranks of a run measured before they planned
SCHEMA = 1
SHOWN = "a100.json, which comes with the package, shows all fields"
ANEW = "write a file with `canzona-compile calibrate -o mine.json`"
FOLDER = Path(__file__).parents[1] / "data" / "hardware"


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate by size, linear in the logarithm of the size between its points and constant beyond them."""

    points: tuple[tuple[float, float], ...]

    def at(self, size: float) -> float:
        """The rate for a size."""
        sizes = [s for s, _ in self.points]
        i = bisect_left(sizes, size)
        if i == 0 or i == len(sizes):
            return self.points[min(i, len(sizes) - 1)][1]
        (below, low), (above, high) = self.points[i - 1], self.points[i]
        share = math.log(size / below) / math.log(above / below)
        return low + share * (high - low)

    def best_within(self, low: float, high: float) -> float:
        """The highest rate of the sizes from `low` to `high`."""
        return max(self.at(low), self.at(high), *(rate for size, rate in self.points if low < size < high))

    @property
    def best(self) -> float:
        """The highest rate."""
        return max(rate for _, rate in self.points)


@dataclass(frozen=True, slots=True)
class Link:
    """One class of links.

    Attributes:
        bandwidth: bytes per second that a rank sends while it receives as many.
        latency: seconds that even the smallest all-to-all takes.
        per_peer: seconds that each other rank adds to an all-to-all.
    """

    bandwidth: float
    latency: float
    per_peer: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """A kind of machine.

    Attributes:
        name: that of a file in `data/hardware`, or the one that a user's file gives itself.
        device, backend: what ranks compute with ("cuda", "cpu") and talk through ("nccl", "gloo").
        ranks_per_node: ranks that `node` links connect; between nodes there is `network`.
        processors: of a node, shared by its ranks: GPUs, or cores with one thread per rank.
        overlap: the share of an exchange that runs beside computation: 1 if it takes no processor, 0 if it takes one
            all the time.
        products: FLOP/s of matrix products by dtype, over the geometric mean of their three dims.
        factorizations: FLOP/s of eigh, qr, ... over the dim; "other" stands for all that are not listed.
        bandwidth: bytes per second that elementwise work reads and writes in memory.
        transposed: the same where a matrix is read in another order than it is written in, over the geometric mean of
            its dims: on CPU, large ones no longer find their rows in the cache.
        memory: bytes that a rank has.
        launch: seconds that each operator costs beside its work: a kernel's launch, or the host's dispatch.
        product_calls: seconds that a call of a matrix product costs beside its arithmetic, by dtype; `launch` where
            none is given. On CPU a library then chooses its code, which takes longer than a small product itself.
        host: seconds that a rank's processor spends per matrix on a step's bookkeeping: it looks up gradients and
            state, and chooses the code. Where a device computes, the host does that meanwhile, and the step takes at
            least as long.
        sources: of each rate, by the name of its field: a public figure, or how it was measured.
        measured: names of the fields that were measured on the machine itself; the others are assumed.
    """

    name: str
    device: str
    backend: str
    ranks_per_node: int
    processors: int
    overlap: float
    products: tuple[tuple[str, Curve], ...]
    factorizations: tuple[tuple[str, Curve], ...]
    bandwidth: float
    transposed: Curve
    memory: float
    launch: float
    product_calls: tuple[tuple[str, float], ...]
    host: float
    node: Link
    network: Link
    sources: tuple[tuple[str, str], ...] = ()
    measured: tuple[str, ...] = ()

    def product_rate(self, dtype: str, size: float, up_to: float = 0.0) -> float:
        """FLOP/s of a product; a dtype that is not listed is as slow as the slowest one that is.

        Args:
            up_to: the largest size, if it is the best of several.
        """
        curves = dict(self.products)
        listed = [curves[dtype]] if dtype in curves else curves.values()
        return min(curve.best_within(size, max(size, up_to)) for curve in listed)

    def product_call(self, dtype: str) -> float:
        """Seconds of a call of a product, beside its arithmetic."""
        return dict(self.product_calls).get(dtype, self.launch)

    def factorization_rate(self, operator: str, size: float) -> float:
        """FLOP/s of a factorization; operators that are not listed have the rate of "other"."""
        curves = dict(self.factorizations)
        return (curves.get(operator) or curves["other"]).at(size)

    def link(self, ranks: tuple[int, ...]) -> Link:
        """The slowest link among some ranks; global rank r is on node r // ranks_per_node."""
        return self.node if len({r // self.ranks_per_node for r in ranks}) == 1 else self.network

    def slower(self, times: Mapping[str, float]) -> Hardware:
        """The machine on which work takes longer.

        Args:
            times: for fields that are rates, how many times as long the work takes that they bound.
        """
        return replace(self, **{field: slowed(getattr(self, field), field, own) for field, own in times.items()})

    @property
    def here(self) -> bool:
        """Whether the ranks of a run measured them before they planned."""
        return self.name == HERE

    @property
    def digest(self) -> str:
        """A short hash of all fields: ranks that plan together must have equal ones."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @property
    def assumed(self) -> tuple[str, ...]:
        """Names of the rates that were not measured on the machine itself."""
        return tuple(name for name in RATES if name not in self.measured)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain objects, of which `to_json` makes text."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "overlap": bool(self.overlap) if self.overlap in (0.0, 1.0) else self.overlap,
            "products": {name: curve.points for name, curve in self.products},
            "factorizations": {name: curve.points for name, curve in self.factorizations},
            "transposed": self.transposed.points,
            "product_calls": dict(self.product_calls),
            "sources": dict(self.sources),
        }

    def to_json(self) -> str:
        """The text of a file that `named_hardware` reads."""
        return json.dumps(self.to_dict(), indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Machine:
    """What passes may know of the hardware that a step runs on.

    Attributes:
        backend: of the process group: "gloo" or "nccl"; empty if there is none.
        rates: the rates of the hardware; None stands for those that are assumed for the device. Who names the assumed
            ones has the same machine: plans for it have one fingerprint.
    """

    device: str
    backend: str
    threads: int
    rates: Hardware | None = None

    def __post_init__(self) -> None:
        if self.rates is not None and self.rates == assumed_hardware(self.device):
            object.__setattr__(self, "rates", None)


RATES = (
    *("products", "factorizations", "bandwidth", "transposed", "memory", "launch", "product_calls", "host"),
    *("node", "network"),
)
MOST_RANKS = 1 << 20
LARGEST = 1e24  # of rates, sizes and seconds
POSITIVE = ("ranks_per_node", "processors", "bandwidth", "memory")
SECONDS = ("launch", "product_calls", "host")  # more of these is slower; of all other rates, less is


@cache
def named_hardware(name: str) -> Hardware:
    """Read a kind of machine that comes with the package, or one from a JSON file."""
    path = FOLDER / f"{name}.json"
    known = sorted(p.stem for p in FOLDER.glob("*.json"))
    if name not in known:
        path = Path(name)
        if path.suffix != ".json" or not path.is_file():
            raise CanzonaError(
                f"there is no file {name!r}" if path.suffix == ".json" else f"there is no hardware {name!r}",
                hint=f"use one of {', '.join(known)}, or a file.json that calibrate wrote",
            )
    found = read_json(path, ANEW)
    if not isinstance(found, dict):
        raise CanzonaError("the file is not a JSON object", at=str(path), hint=ANEW)
    return hardware_from(found, str(path))


def assumed_hardware(device: str) -> Hardware:
    """Return the rates that are assumed for a kind of device, "cpu" or "cuda"."""
    return named_hardware("cpu" if device == "cpu" else "h100")


def hardware_of(machine: Machine) -> Hardware:
    """The rates of a machine, or the assumed rates of its kind of device if it has none."""
    return machine.rates or assumed_hardware(machine.device)


def slowed(value: Any, field: str, times: float) -> Any:
    """A value of a field of `Hardware` that makes work take `times` as long."""
    if isinstance(value, Curve):
        return Curve(tuple((size, rate / times) for size, rate in value.points))
    if isinstance(value, Link):
        return Link(value.bandwidth / times, value.latency * times, value.per_peer * times)
    if isinstance(value, tuple):
        return tuple((name, slowed(own, field, times)) for name, own in value)
    return value * times if field in SECONDS else value / times


# -- what a file must say --------------------------------------------------------------------------


def hardware_from(given: Mapping[str, Any], at: str) -> Hardware:
    """Check every field of a file and make hardware of it."""
    if given.get("schema") != SCHEMA:
        raise CanzonaError(f"schema is {given.get('schema')!r}, not {SCHEMA}", at=at, hint=ANEW)
    known = {f.name for f in fields(Hardware)}
    if missing := sorted(known - given.keys() - {"sources", "measured"}):
        raise CanzonaError(f"the field {missing[0]!r} is missing", at=at, hint=SHOWN)
    if unknown := sorted(given.keys() - known - {"schema"}):
        raise CanzonaError(
            f"the field {unknown[0]!r} is unknown", at=at, hint=f"the fields are {', '.join(sorted(known))}"
        )
    values = dict(given)
    del values["schema"]
    for name in POSITIVE:
        values[name] = number(given[name], name, at, positive=True)
    for name in ("launch", "host"):
        values[name] = number(given[name], name, at, positive=False)
    values["transposed"] = curve(given["transposed"], "transposed", at)
    values["product_calls"] = seconds_by_name(given["product_calls"], "product_calls", at)
    for name in ("ranks_per_node", "processors"):
        if values[name] != int(values[name]) or values[name] > MOST_RANKS:
            raise CanzonaError(f"{name} is {given[name]!r}, not a number of ranks", at=at, hint=f"1 to {MOST_RANKS}")
        values[name] = int(values[name])
    for name in ("name", "device", "backend"):
        if not isinstance(given[name], str):
            raise CanzonaError(f"{name} is {given[name]!r}, not a string", at=at, hint=SHOWN)
    if isinstance(given["overlap"], bool):
        values["overlap"] = float(given["overlap"])
    elif number(given["overlap"], "overlap", at, positive=False) > 1:
        raise CanzonaError(f"overlap is {given['overlap']!r}, which is no share", at=at, hint="0 to 1, false or true")
    for name in ("products", "factorizations"):
        values[name] = curves(given[name], name, at)
    if "other" not in dict(values["factorizations"]):
        raise CanzonaError("factorizations has no rate 'other'", at=at, hint="add it, for operators not listed")
    for name in ("node", "network"):
        values[name] = link(given[name], name, at)
    sources, measured = given.get("sources", {}), given.get("measured", ())
    if not isinstance(sources, Mapping):
        raise CanzonaError("sources is not an object with one string per rate", at=at, hint=SHOWN)
    if not isinstance(measured, list | tuple):
        raise CanzonaError("measured is not a list of rates", at=at, hint=f"rates are {', '.join(RATES)}")
    values["sources"], values["measured"] = tuple(sources.items()), tuple(measured)
    if strange := sorted(set(values["measured"]) - set(RATES)):
        raise CanzonaError(f"measured names {strange[0]!r}", at=at, hint=f"rates are {', '.join(RATES)}")
    return Hardware(**values)


def number(value: Any, name: str, at: str, *, positive: bool) -> float:
    """A number that is positive, or at least 0, and with which no forecast leaves the range of numbers."""
    sound = isinstance(value, int | float) and not isinstance(value, bool)
    if not sound or value != value or value < 0 or (positive and not value) or value == math.inf:
        wanted = "a positive number" if positive else "a number of at least 0"
        raise CanzonaError(f"{name} is {value!r}, not {wanted}", at=at, hint="rates are per second, in SI units")
    if value > LARGEST or (positive and value < 1 / LARGEST):
        told = f"{value!r:.40}"
        raise CanzonaError(
            f"{name} is {told}, which is outside of the range of real machines",
            at=at,
            hint=f"{1 / LARGEST} to {LARGEST}",
        )
    return float(value)


def seconds_by_name(value: Any, name: str, at: str) -> tuple[tuple[str, float], ...]:
    """The seconds in an object, by their names."""
    if not isinstance(value, Mapping):
        raise CanzonaError(f"{name} is not an object with seconds per name", at=at, hint=SHOWN)
    return tuple((key, number(own, f"{name}.{key}", at, positive=False)) for key, own in value.items())


def curves(value: Any, name: str, at: str) -> tuple[tuple[str, Curve], ...]:
    """The curves in an object, by their names; at least one."""
    if not isinstance(value, Mapping) or not value:
        raise CanzonaError(f"{name} is not an object with a rate per name", at=at, hint=SHOWN)
    return tuple((key, curve(points, f"{name}.{key}", at)) for key, points in value.items())


def curve(value: Any, name: str, at: str) -> Curve:
    """A curve from pairs of numbers; at least one pair."""
    pairs = value if isinstance(value, list | tuple) else []
    if not pairs or any(not isinstance(p, list | tuple) or len(p) != 2 for p in pairs):
        raise CanzonaError(f"{name} is not a list of pairs [size, rate]", at=at, hint=SHOWN)
    points = tuple((number(s, name, at, positive=True), number(r, name, at, positive=True)) for s, r in pairs)
    if any(a[0] >= b[0] for a, b in pairwise(points)):
        raise CanzonaError(f"the sizes of {name} do not ascend", at=at, hint=SHOWN)
    return Curve(points)


def link(value: Any, name: str, at: str) -> Link:
    """A link from an object with its fields."""
    if not isinstance(value, Mapping):
        raise CanzonaError(f"{name} is not an object with bandwidth and latency", at=at, hint=SHOWN)
    if missing := [key for key in ("bandwidth", "latency") if key not in value]:
        raise CanzonaError(f"the field {name}.{missing[0]} is missing", at=at, hint=SHOWN)
    if unknown := sorted(set(value) - {f.name for f in fields(Link)}):
        raise CanzonaError(f"there is no field {name}.{unknown[0]}", at=at, hint=SHOWN)
    own = {key: number(v, f"{name}.{key}", at, positive=key == "bandwidth") for key, v in value.items()}
    return Link(**own)


# -- the processor of this machine ----------------------------------------------------------------


CPUINFO = Path("/proc/cpuinfo")


def this_processor() -> str:
    """The name of the processor: "AMD EPYC, family 25 model 17"."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    return name_in(text) or platform.processor() or platform.machine()


def name_in(cpuinfo: str) -> str:
    """The name in the text of /proc/cpuinfo, with numbers, as many have the same name; empty if none is there."""
    said = {key: value.strip() for key, value in re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo, re.MULTILINE)}
    numbers = [f"{word} {said[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in said]
    return ", ".join(part for part in (said.get("model name", ""), " ".join(numbers)) if part)
