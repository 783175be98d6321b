"""What matrices alike would take by each strategy, in closed form: the numbers that decide.

Gram-distributed: for a tall or wide matrix of m x n fragments, m <= n, every rank multiplies its fragment into a
partial m x m Gram matrix; the owner adds them up, iterates on m x m alone, and sends one m x m factor back, by which
every rank multiplies its fragment. Newton-Schulz on Gram matrices with one restart is stable in float16 (Dao AI Lab,
gram-newton-schulz), so there are two such rounds. Bits change, so it belongs to numerics="fast"; it is planned and
simulated, and not executed yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from canzona_compile.cost import factors
from canzona_compile.hardware import Hardware, Link
from canzona_compile.ir import Placed, Strategy, Task, tensor_value
from canzona_compile.layout import Grid
from canzona_compile.planning.figures import StrategyForecast
from canzona_compile.timing import PlacedTime

ROUNDS = 2  # one restart
PARTIAL_BYTES = 4  # of an element of a partial Gram matrix: sums of many products need 32 bits
FACTOR_BYTES = 2  # of an element of the factor
GRAM, BATCH_SPLIT = "gram", "batch-split"


@dataclass(frozen=True, slots=True)
class Gram:
    """Gram-distributed work on one m x n matrix, m <= n, for all of its rounds.

    Attributes:
        steps: of the iteration, each of two products of m x m with m x n and one of m x m with m x m when dense.
        fragments: seconds that all fragments together take.
        owner: seconds of the iteration on m x m.
        up, down: bytes of one partial Gram matrix and of one factor.
    """

    m: int
    n: int
    steps: int
    fragments: float
    owner: float
    up: int
    down: int


def gram_of(placed: Placed, hardware: Hardware, shards: int) -> Gram | None:
    """The Gram form of a cut; None where its compute graph is no chain of products X <- p(X X^T) X."""
    shape = placed.template.shape
    steps = iterations(placed.compute) if len(shape) == 2 else 0
    if steps < 2:
        return None
    m, n = sorted(shape)
    square = hardware.product_rate("float16", m)
    piece = hardware.product_rate("float16", (m * m * max(1, n // shards)) ** (1 / 3))
    # Dense products: 2 m^2 n for the Gram matrix and 2 m^2 n for the factor, in each round; per step of the
    # iteration 8 m^3, less what the first and the last step of a round do not need (6 m^3).
    fragments = ROUNDS * 4 * m * m * n / piece
    owner = (8 * steps - 6 * ROUNDS) * m**3 / square
    return Gram(m, n, steps, fragments, owner, PARTIAL_BYTES * m * m, FACTOR_BYTES * m * m)


def iterations(graph: fx.Graph) -> int:
    """How often a graph multiplies a matrix with its own transpose."""
    found = 0
    for node in graph.nodes:
        pair = factors(node)
        if pair and len(node.args) == 2 and transposes(*pair):
            found += 1
    return found


def transposes(left: fx.Node, right: fx.Node) -> bool:
    value = tensor_value(right)
    flips = str(right.target).startswith(("aten.permute", "aten.t.", "aten.transpose"))
    return flips and value is not None and right.args[0] is left


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the matrices of a template lie, and which link their exchanges need."""

    grid: Grid
    tasks: int
    link: Link
    hardware: Hardware

    def transfer(self, busiest: float) -> float:
        return busiest / self.link.bandwidth + self.link.latency + self.link.per_peer * (self.grid.shards - 1)


def strategies(
    placed: Placed, time: PlacedTime, tasks: Sequence[Task], hardware: Hardware
) -> tuple[StrategyForecast, ...]:
    """All strategies for the tasks of one cut and grid, which are `tasks`."""
    grid = tasks[0].layout.grid
    at = Setting(grid, len(tasks), hardware.link(grid.ranks[0]), hardware)
    taken = {str(t.strategy) for t in tasks}
    found = [owner(at, time), replicated(at, time), split_stack(at, placed, time), gram(at, placed, time)]
    return tuple(
        StrategyForecast(name, sum(parts), *parts, name in taken, name in set(Strategy), note)
        for name, parts, note in found
    )


Parts = tuple[float, float, float]
IMPOSSIBLE: Parts = (math.inf, 0.0, 0.0)


def owner(at: Setting, time: PlacedTime) -> tuple[str, Parts, str]:
    most = math.ceil(at.tasks / at.grid.size)
    compute = most * time.compute.total(at.hardware)
    if at.grid.size == 1:
        return Strategy.OWNER, (compute, 0.0, 0.0), "one rank"
    sharded, replicas = at.grid.shards > 1, at.grid.replicas
    gather = at.transfer(most * time.gathered) if sharded else 0.0
    scatter = at.transfer(most * time.scattered) if sharded else 0.0
    if replicas > 1:
        between = at.hardware.link(tuple(row[0] for row in at.grid.ranks))
        received = at.tasks * time.scattered / at.grid.shards * (1 - 1 / replicas)
        scatter += received / between.bandwidth + between.latency
    return Strategy.OWNER, (compute, gather, scatter), f"{most} on the busiest of {at.grid.size} ranks"


def replicated(at: Setting, time: PlacedTime) -> tuple[str, Parts, str]:
    compute = at.tasks * time.compute.total(at.hardware)
    gather = at.transfer(at.tasks * time.gathered) if at.grid.shards > 1 else 0.0
    return Strategy.REPLICATED, (compute, gather, 0.0), "every rank computes all"


def split_stack(at: Setting, placed: Placed, time: PlacedTime) -> tuple[str, Parts, str]:
    shape = placed.template.shape
    if len(shape) < 3:
        return BATCH_SPLIT, IMPOSSIBLE, "no stack"
    entries = at.tasks * shape[0]
    most = math.ceil(entries / at.grid.size)
    share = most / shape[0]
    gather = at.transfer(share * time.gathered) if at.grid.shards > 1 else 0.0
    scatter = at.transfer(share * time.scattered) if at.grid.shards > 1 else 0.0
    parts = (share * time.compute.total(at.hardware), gather, scatter)
    return BATCH_SPLIT, parts, f"{most} entries on the busiest of {at.grid.size} ranks"


def gram(at: Setting, placed: Placed, time: PlacedTime) -> tuple[str, Parts, str]:
    if at.grid.shards == 1:
        return GRAM, IMPOSSIBLE, "not sharded"
    form = gram_of(placed, at.hardware, at.grid.shards)
    if form is None:
        return GRAM, IMPOSSIBLE, "no iteration X <- p(X X^T) X"
    most = math.ceil(at.tasks / at.grid.size)
    rows = at.tasks / at.grid.replicas
    compute = rows * form.fragments / at.grid.shards + most * form.owner
    # A rank sends a partial matrix for every task of its replica, and gets a factor for each.
    sent = ROUNDS * at.transfer(rows * form.up)
    back = ROUNDS * at.transfer(rows * form.down)
    return GRAM, (compute, sent, back), f"{ROUNDS} rounds, float16; needs numerics fast"
