"""The passes, one per file. `canzona_compile.session.plan` says in which order they run."""

from canzona_compile.passes.assign_owners import AssignOwners
from canzona_compile.passes.batch import Batching
from canzona_compile.passes.canonicalize import Canonicalize
from canzona_compile.passes.emit import Emit
from canzona_compile.passes.follow_plan import FollowGroups, FollowOwners
from canzona_compile.passes.fuse_collectives import FuseCollectives
from canzona_compile.passes.gram import GramIterations
from canzona_compile.passes.micro_group import FormMicroGroups
from canzona_compile.passes.padding import Padding
from canzona_compile.passes.place import Place
from canzona_compile.passes.roots import Roots
from canzona_compile.passes.schedule import Schedule
from canzona_compile.passes.symmetry import Symmetry

__all__ = [
    "AssignOwners",
    "Batching",
    "Canonicalize",
    "Emit",
    "FollowGroups",
    "FollowOwners",
    "FormMicroGroups",
    "FuseCollectives",
    "GramIterations",
    "Padding",
    "Place",
    "Roots",
    "Schedule",
    "Symmetry",
]
