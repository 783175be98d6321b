"""The stand-ins of one optimizer: which of its plain parameters are fragments, once all ranks have told."""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist
from torch import Tensor

from canzona_compile.capture.error_origin import first_line
from canzona_compile.errors import CanzonaError
from canzona_compile.options import GivenLayout
from canzona_compile.session.given_layout import Named, shardings_of
from canzona_compile.session.size_exchange import GridRows, exchange_rows, exchange_sizes, refused_together
from canzona_compile.session.stand_in import StandIn


class StandIns:
    """Stand-ins by name, and why some parameters have none.

    Attributes:
        refused: the parameters that this rank or another one refuses, by name.
    """

    def __init__(self) -> None:
        self.refused: dict[str, CanzonaError] = {}
        self._by_name: dict[str, StandIn] = {}
        self._standing: dict[int, StandIn] = {}  # by the id of the parameter that stands for the fragment

    def add(self, stand_in: StandIn) -> None:
        """Add a stand-in, or put it in the place of the one that has its name."""
        self._by_name[stand_in.name] = self._standing[id(stand_in.param)] = stand_in

    def of(self, name: str) -> StandIn | None:
        """The stand-in of a parameter; None if the parameter is no plain fragment.

        Raises:
            CanzonaError: the parameter is refused.
        """
        if name in self.refused:
            raise self.refused[name]
        return self._by_name.get(name)

    def standing(self, param: Tensor) -> StandIn | None:
        """The stand-in whose DTensor this is; None if it is the optimizer's own parameter."""
        return self._standing.get(id(param))

    def check_others(self, names: Collection[str]) -> None:
        """Raise the error of a parameter that other ranks have and this one has not."""
        for name, error in self.refused.items():
            if name not in names:
                raise error


def exchange_stand_ins(
    named: Named, given: GivenLayout | None, replicate: dist.ProcessGroup | None, rank: int
) -> tuple[StandIns, dict[GridRows, GridRows]]:
    """Make the stand-ins of all plain parameters that are fragments. This is a collective if there are any.

    Args:
        named: the parameters with their names.
        given: what `layout=` says.
        replicate: the process group of `replicate=`; None without it.
        rank: this rank, global.

    Returns:
        The stand-ins; and by the rows of a grid of one replica, those of all replicas.
    """
    known = shardings_of(named, given)
    params = {name: param for name, _, param in named}
    replicas = () if replicate is None else tuple(dist.get_process_group_ranks(replicate))
    for name, sharding in known.by_name.items():
        if error := refused_together(sharding, replicas, rank):
            known.refused[name] = type(error)(error.problem, at=name, hint=error.hint)
    tilings = exchange_sizes(known, params)
    rows: dict[GridRows, GridRows] = {}
    if replicate is not None and given is not None:
        rows = exchange_rows(tilings, known.refused, replicate, rank)
    found = StandIns()
    found.refused = known.refused
    for name, tiling in tilings.items():
        if name in known.refused:
            continue
        try:
            found.add(StandIn(name, params[name], tiling, tiling.box(rank)))
        except Exception as error:  # others may wait for a further exchange
            found.refused[name] = CanzonaError(f"its fragments cannot be put together: {first_line(error)}", at=name)
    return found, rows
