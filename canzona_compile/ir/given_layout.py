"""The argument `layout=`: what the user says of plain tensors that are fragments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.canonical_names import canonical_name

Given: TypeAlias = DeviceMesh | tuple[DeviceMesh, Sequence[Placement]] | None
LayoutOption: TypeAlias = DeviceMesh | Mapping[str, Given] | Callable[[str, Tensor], Given] | None


@dataclass(frozen=True, slots=True)
class GivenLayout:
    """What the user says of plain tensors that are fragments.

    What is said of a parameter is a mesh with its placements; or a mesh alone, which is then the tensor-parallel mesh
    for Megatron's attributes; or None, which means that each rank holds it whole.

    Attributes:
        patterns: patterns of parameter names with what is said of the parameters that they match; the first one counts.
        function: says it by name and parameter; None if there are patterns or a mesh alone.
        mesh: the tensor-parallel mesh of parameters that no pattern matches; None if it is not known.
    """

    patterns: tuple[tuple[str, Given], ...] = ()
    function: Callable[[str, Tensor], Given] | None = None
    mesh: DeviceMesh | None = None
    alone: bool = False

    @classmethod
    def of(cls, given: LayoutOption) -> GivenLayout | None:
        """Take the argument `layout=`."""
        if given is None:
            return None
        if isinstance(given, DeviceMesh):
            return cls(mesh=given, alone=True)
        if isinstance(given, Mapping):
            meshes = {mesh for mesh in map(mesh_in, given.values()) if mesh is not None and mesh.ndim == 1}
            patterns = tuple((canonical_name(pattern), told) for pattern, told in given.items())
            return cls(patterns, mesh=meshes.pop() if len(meshes) == 1 else None)
        if callable(given):
            return cls(function=given)
        raise CanzonaError(
            f"layout= takes patterns of names, a function or a DeviceMesh, not a {type(given).__name__}",
            at="the option layout",
            hint='pass layout={"*.fc1.weight": (mesh, [Shard(0)]), "*.fc2.weight": (mesh, [Shard(1)])}',
        )

    def for_names(self, names: Iterable[str]) -> GivenLayout:
        """The same without the patterns that match none of some names."""
        known = list(names)
        kept = tuple(p for p in self.patterns if any(fnmatchcase(name, p[0]) for name in known))
        return replace(self, patterns=kept)

    def known_meshes(self) -> list[DeviceMesh]:
        """The meshes that are given whatever the parameters are."""
        found = [self.mesh, *(mesh_in(given) for _, given in self.patterns)]
        return [mesh for mesh in found if mesh is not None]


def mesh_in(given: Any) -> DeviceMesh | None:
    """The mesh in what is said of a parameter; None if there is none, or if what is said makes no sense."""
    first = given[0] if isinstance(given, tuple | list) and given else given
    return first if isinstance(first, DeviceMesh) else None
