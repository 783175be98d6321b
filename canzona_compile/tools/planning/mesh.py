"""Parses a mesh, and lays weights out on it as FSDP2, HSDP, DDP, tensor, expert and pipeline parallelism do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from canzona_compile.compat.torch_private import StridedShard
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.layout import Box, Grid, Layout, fragment, short
from canzona_compile.tools.planning.weights import Model, ModelWeight

DIMS = {
    "dp": "replicas that torch does not see (DDP): wrap(..., replicate=)",
    "hsdp": "replicas of a sharded model (HSDP)",
    "fsdp": "shards along dim 0 (FSDP2)",
    "ep": "experts; for all other weights, one more dim of data parallelism",
    "tp": "tensor parallelism",
    "pp": "pipeline stages, of consecutive layers",
}
MOST_RANKS = 1 << 20
# In every order of the mesh, `fully_shard` puts its own dims before those that already cut the weight, and the dim of
# replicas that torch does not see comes before all others.
ORDER = {"dp": 0, "hsdp": 1, "fsdp": 2, "ep": 2, "tp": 3, "pp": 4}


@dataclass(frozen=True, slots=True)
class Mesh:
    """Named dims in order; the last one varies fastest from rank to rank, as in `init_device_mesh`."""

    dims: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        return prod(n for _, n in self.dims)

    def size(self, name: str) -> int:
        return dict(self.dims).get(name, 1)

    def rank(self, at: Mapping[str, int]) -> int:
        found = 0
        for name, size in self.dims:
            found = found * size + at.get(name, 0)
        return found

    def places(self, names: Sequence[str]) -> list[dict[str, int]]:
        """All places on some dims, in the order of ranks."""
        return [dict(zip(names, at, strict=True)) for at in product(*(range(self.size(name)) for name in names))]

    def part(self, names: Sequence[str]) -> Mesh:
        """A mesh of some dims."""
        return Mesh(tuple((name, self.size(name)) for name in names))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.dims)


def parse_mesh(given: str | Mapping[str, int]) -> Mesh:
    """Make a mesh from "dp=32,tp=8" or {"dp": 32, "tp": 8}; raise CanzonaError if it is not valid."""
    pairs: list[tuple[str, object]]
    if isinstance(given, str):
        parts = [part.partition("=") for part in given.split(",")]
        pairs = [(name.strip(), int(size) if size.strip().isdecimal() else size) for name, _, size in parts]
    else:
        pairs = list(given.items())
    seen: list[tuple[str, int]] = []
    for name, size in pairs:
        if name not in DIMS:
            raise CanzonaError(f"there is no mesh dim {name!r}", at="mesh", hint=f"dims are {', '.join(DIMS)}")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise CanzonaError(f"{name} is {size!r}, not a positive integer", at="mesh", hint="as in dp=32,tp=8")
        if name in dict(seen):
            raise CanzonaError(f"{name} is given twice", at="mesh", hint="give it once, with the product of the sizes")
        seen.append((name, size))
    mesh = Mesh(tuple(seen))
    if mesh.ranks > MOST_RANKS:
        raise CanzonaError(
            f"{mesh.ranks} ranks are more than {MOST_RANKS}",
            at="mesh",
            hint="all replicas do the same, so plan for fewer of them",
        )
    return mesh


def check(mesh: Mesh, model: Model) -> None:
    """Raise CanzonaError if a dim does not divide what it cuts, or does not fit the model."""
    for dim, what, count in (
        ("tp", "attention heads", model.heads),
        ("tp", "key-value heads", model.kv_heads),
        ("ep", "experts", model.experts),
    ):
        size = mesh.size(dim)
        if count and count % size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise CanzonaError(
                f"{dim}={size} does not divide the {count} {what} of {model.name}",
                at="mesh",
                hint=f"{dim} can be {fitting}",
            )
    if mesh.size("ep") > 1 and not model.experts:
        raise CanzonaError(f"{model.name} has no experts for ep={mesh.size('ep')}", at="mesh", hint="leave ep out")
    if mesh.size("pp") > model.layers:
        raise CanzonaError(
            f"pp={mesh.size('pp')} stages are more than the {model.layers} layers of {model.name}",
            at="mesh",
            hint=f"pp can be 1 to {model.layers}; a parameter's layer is the first number in its name",
        )


@dataclass(frozen=True)
class WeightSharding:
    """Lays weights out on a mesh; equal weights share their layouts."""

    mesh: Mesh
    layers: int

    def stage(self, weight: ModelWeight) -> int:
        return weight.layer * self.mesh.size("pp") // self.layers

    @cached_property
    def _layouts(self) -> dict[tuple[object, ...], tuple[Layout, ...]]:
        return {}

    def layouts(self, weight: ModelWeight) -> tuple[Layout, ...]:
        """Return one layout; for a stack of experts, one for each part of the mesh that holds entries of its own."""
        fixed = {"pp": self.stage(weight)}
        key = (weight.shape, weight.tensor_dim, weight.experts, *fixed.items())
        if key not in self._layouts:
            dims = self._expert_dims(weight) if weight.experts else ()
            found = (self._layout(weight, fixed | part, dims) for part in self.mesh.places(dims))
            self._layouts[key] = tuple(layout for layout in found if prod(layout.shape))
        return self._layouts[key]

    def entries(self, weight: ModelWeight) -> tuple[Layout, ...]:
        """Return the layout of one entry of a stack, for each of `layouts`: their boxes have all entries."""
        stacks = self.layouts(weight)
        if id(stacks) not in self._entries:
            self._entries[id(stacks)] = tuple(
                Layout(own.shape[1:], own.grid, tuple(Box(b.start[1:], b.size[1:]) for b in own.boxes), own.placements)
                for own in stacks
            )
        return self._entries[id(stacks)]

    @cached_property
    def _entries(self) -> dict[int, tuple[Layout, ...]]:
        return {}

    def _expert_dims(self, weight: ModelWeight) -> tuple[str, ...]:
        """Return the dims that shard the entries of a stack; FSDP is one of them if there are enough entries."""
        enough = self.mesh.size("ep") * self.mesh.size("fsdp") <= weight.shape[0]
        return ("ep", "fsdp") if enough else ("ep",)

    def _layout(self, weight: ModelWeight, fixed: Mapping[str, int], dealt: tuple[str, ...]) -> Layout:
        shape = weight.shape
        for name in dealt:
            shape = Box.whole(shape).cut(0, self.mesh.size(name), fixed[name]).size
        sharding = self._placements(weight, dealt)
        dims = [name for name in self._dims if name not in fixed]
        rows = [name for name in dims if isinstance(sharding[name], Replicate)]
        columns = [name for name in dims if name not in rows]
        cut = self.mesh.places(columns)
        grid = Grid(
            tuple(tuple(self.mesh.rank({**fixed, **row, **column}) for column in cut) for row in self.mesh.places(rows))
        )
        # torch sees FSDP over `fsdp` and `ep` as one flattened dim.
        merged = [n for n in columns if n in ("fsdp", "ep")]
        single = [n for n in columns if n not in merged[1:]]
        flat = [self.mesh.part(merged if n in merged else [n]) for n in single]
        sizes, placements = [own.ranks for own in flat], [sharding[n] for n in single]
        boxes = tuple(fragment(shape, sizes, placements, [own.rank(column) for own in flat]) for column in cut)
        return Layout(shape, grid, boxes, self._text([*single, *dealt], rows, sharding))

    @cached_property
    def _dims(self) -> list[str]:
        return sorted((name for name, _ in self.mesh.dims), key=ORDER.__getitem__)

    def _placements(self, weight: ModelWeight, dealt: tuple[str, ...]) -> dict[str, Placement]:
        """Place a weight as `parallelize_module` and FSDP2 do: FSDP shards dim 0 of the tensor-parallel shard."""
        cut, first = weight.tensor_dim, int(weight.experts)
        tensor = self.mesh.size("tp") if cut == first and "tp" in dict(self.mesh.dims) else 1
        fsdp: Placement = StridedShard(first, split_factor=tensor) if tensor > 1 else Shard(first)
        placements: dict[str, Placement] = {name: Replicate() for name in DIMS}
        placements["tp"] = Replicate() if cut is None else Shard(cut)
        placements["fsdp"] = fsdp
        if "fsdp" in dict(self.mesh.dims):
            placements["ep"] = fsdp
        if dealt:
            entries = self.mesh.size("ep")
            placements["ep"] = Shard(0)
            if "fsdp" in dealt:
                placements["fsdp"] = StridedShard(0, split_factor=entries) if entries > 1 else Shard(0)
        return placements

    def _text(self, columns: list[str], rows: list[str], sharding: Mapping[str, Placement]) -> str:
        """Name the placements as a real run does: those of the DTensor's own mesh, which does not contain `dp`."""
        own = [n for n in ("hsdp", "fsdp", "ep", "tp") if n in self._dims and n in [*columns, *rows]]
        return ",".join(short(sharding[n]) for n in own) or ("replicated" if self.mesh.ranks > 1 else "local")
