"""Minimum cuts against those of networkx."""

from __future__ import annotations

import math
import random
from itertools import permutations

import networkx as nx
import pytest

from canzona_compile.analysis.minimum_cut import Network

NODES = 12
CAPACITIES = (0.0, 1.0, 2.0, 2.0, 0.0625, 48.0, math.inf, math.nan)


@pytest.mark.parametrize("seed", range(200))
def test_cuts_are_those_of_networkx(seed: int) -> None:
    dice = random.Random(seed)
    ours, theirs = Network[int](), nx.DiGraph()
    theirs.add_nodes_from(range(NODES))
    for tail, head in permutations(range(NODES), 2):
        if dice.random() < 0.3:
            capacity = dice.choice(CAPACITIES)
            ours.connect(tail, head, capacity)
            theirs.add_edge(tail, head, capacity=capacity)
    try:
        _, (far, _) = nx.minimum_cut(theirs, 0, 1)
    except nx.NetworkXUnbounded:
        with pytest.raises(ValueError, match="infinite"):
            ours.far_from(1, source=0)
        return
    missing = set(range(NODES)) - ours._left.keys()  # nodes without edges
    assert ours.far_from(1, source=0) | missing == far
