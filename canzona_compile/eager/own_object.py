"""Own objects: one ordinary optimizer object per matrix, whole, on its owner, for the whole run.

It is the way for optimizers that keep on themselves what belongs to a parameter. Nothing of them is shared or copied:
the user's function makes the object (`one_per_matrix=`), it gets whole gradients, and steps. Its state is what its own
`state_dict` returns: tensors as leaves by path, and all else as text in one leaf beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from canzona_compile.compat.optimizer_class import required_arguments
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import CanzonaError
from canzona_compile.replica.homes import atoms_of, held_in, hypers
from canzona_compile.replica.leaves import leaf_name
from canzona_compile.replica.parameter_spec import ParameterSpec
from canzona_compile.replica.raised import as_its_own, blamed, first_line
from canzona_compile.replica.randomness import MatrixGenerators
from canzona_compile.replica.twin import step_plainly
from canzona_compile.tensors import inner_tensors

Maker = Callable[[list[torch.nn.Parameter]], Optimizer]  # makes an optimizer of some parameters
OWN_OBJECT = "object"  # the key of the object in `optimizer.state[param]` on its owner
GENERATOR, CUDA_GENERATOR = "generator", "generator_cuda"  # leaves of its portable state, beside its state dict
NOTES = "notes"  # the leaf that holds the state dict with names of leaves in place of tensors
NOTES_BYTES = 4096  # it is padded to multiples of this, because checkpoints load tensors into ones of equal size


class OwnObject:
    """An optimizer object with one whole parameter.

    Args:
        spec: the shape, dtypes, device and marks of the parameter.
        values: the values that the parameter has while the object is made; None for zeros.
    """

    def __init__(
        self,
        make: Maker,
        name: str,
        spec: ParameterSpec,
        real: Optimizer,
        group: Mapping[str, Any],
        values: Tensor | None = None,
    ) -> None:
        self.name, self.stepped = name, False
        began = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device) if values is None else values
        self.param = torch.nn.Parameter(began.detach().clone(memory_format=torch.contiguous_format))
        if spec.grad_dtype != spec.dtype:
            self.param.grad_dtype = spec.grad_dtype
        vars(self.param).update(spec.marks)
        self.generators = MatrixGenerators(name, spec.device)
        with self.generators.in_use(), torch.enable_grad():
            self.optimizer = made_by(make, self.param, name)
        self._atoms = atoms_of(real)
        self._given: dict[str, Any] = {}
        self._own_group.update(followed(group))
        self._given = followed(group)

    @property
    def _own_group(self) -> dict[str, Any]:
        group: dict[str, Any] = self.optimizer.param_groups[0]
        return group

    # -- steps -----------------------------------------------------------------------------------------

    def follow(self, group: Mapping[str, Any], real: Optimizer) -> None:
        """Take over what users changed since the last step in the parameter group and in plain attributes."""
        atoms, given = atoms_of(real), followed(group)
        for home, before, now in (
            (self._own_group, self._given, given),
            (vars(self.optimizer), self._atoms, atoms),
        ):
            home.update({k: v for k, v in now.items() if k not in before or differs(before[k], v)})
        self._given, self._atoms = given, atoms

    def step(self, param: Tensor, grad: Tensor) -> Tensor:
        """Take a step."""
        with torch.no_grad():
            self.param.copy_(param)
        self.param.grad = grad.clone()
        with self.generators.in_use():
            step_plainly(self.optimizer)
        self.param.grad = None
        self.stepped = True
        return self.param.detach().clone()

    # -- portable state --------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Copy the object's state dict, as tensors by path. Of its group, what its steps changed."""
        try:
            whole = self.optimizer.state_dict()
        except Exception as error:  # whatever its code raises
            raise CanzonaError(
                f"the state_dict() of {type(self.optimizer).__name__} fails: {first_line(error)}{blamed(error)}",
                at=self.name,
            ) from error
        self._check_inner(whole)
        changed = {
            k: v
            for k, v in hypers(whole["param_groups"][0]).items()
            if k not in self._given or differs(self._given[k], v)
        }
        leaves: dict[str, Tensor] = {}
        try:
            notes = packed({**whole, "param_groups": [changed]}, (), leaves)
        except TypeError as error:
            raise CanzonaError(
                f"the state_dict() of {type(self.optimizer).__name__} {error}",
                at=self.name,
                hint="let its state_dict() return tensors, numbers and texts, in dicts, lists and tuples",
            ) from error
        kinds = (GENERATOR, CUDA_GENERATOR)
        return {**leaves, NOTES: noted(notes), **dict(zip(kinds, self.generators.states, strict=False))}

    def _check_inner(self, whole: Mapping[str, Any]) -> None:
        """Raise if an optimizer that the object holds has state that torch's state dict of the object lacks."""
        kind, saved = type(self.optimizer), set(map(id, pytree.tree_leaves(whole)))
        if kind.state_dict is not Optimizer.state_dict or self.optimizer._optimizer_state_dict_post_hooks:
            return  # the class says by itself what it saves
        for name, several in (held_in(self.optimizer) | held_in(self._own_group)).items():
            leaves = pytree.tree_leaves([list(one.state.values()) for one in several])
            if any(isinstance(leaf, Tensor) and id(leaf) not in saved for leaf in leaves):
                raise CanzonaError(
                    f"the state_dict() of {kind.__name__} lacks the state of {name!r}, an optimizer inside of it",
                    at=self.name,
                    hint=f"let state_dict() of {kind.__name__} return that state, and load_state_dict() load it",
                )

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the object load what `state` returned, maybe on other ranks. It may have gone through a checkpoint."""
        drawn = [state[kind].cpu().to(torch.uint8) for kind in (GENERATOR, CUDA_GENERATOR) if kind in state]
        try:
            whole = unpacked(read_notes(state[NOTES]), state)
            fresh = self.optimizer.state_dict()["param_groups"][0]
            whole["param_groups"] = [{**fresh, **whole["param_groups"][0]}]
            self.optimizer.load_state_dict(whole)
        except Exception as error:  # whatever its code raises
            raise CanzonaError(
                f"the saved state does not fit the optimizer object of this matrix: {first_line(error)}{blamed(error)}",
                at=self.name,
                hint="load a checkpoint of the same optimizer, made by the same one_per_matrix=",
            ) from error
        self._keep_dtypes(whole)
        self.stepped = True
        if len(drawn) == len(self.generators.states):
            self.generators.states = drawn

    def _keep_dtypes(self, whole: Mapping[str, Any]) -> None:
        """Give loaded state the dtypes that it was saved with: torch casts it to that of the parameter."""
        now, saved = self.optimizer.state.get(self.param), whole["state"].get(0)
        if not now or not saved or pytree.tree_structure(dict(now)) != pytree.tree_structure(saved):
            return

        def kept(loaded: Any, value: Any) -> Any:
            if isinstance(loaded, Tensor) and isinstance(value, Tensor):
                return loaded if loaded.dtype == value.dtype else value.detach().clone().to(loaded.device)
            return value

        now.update(pytree.tree_map(kept, dict(now), saved))


def made_by(make: Maker, param: torch.nn.Parameter, name: str) -> Optimizer:
    """Let the user's function make the object of one parameter."""
    try:
        made = make([param])
    except Exception as error:  # whatever the user's code raises
        said = CanzonaError(f"one_per_matrix= fails for this parameter: {first_line(error)}{blamed(error)}", at=name)
        raise as_its_own(error, said) from error
    groups = made.param_groups if isinstance(made, Optimizer) else []
    if len(groups) != 1 or len(groups[0]["params"]) != 1 or groups[0]["params"][0] is not param:
        raise CanzonaError(
            f"one_per_matrix= returns a {type(made).__name__} that does not hold exactly the parameter that it got",
            at=name,
            hint="pass a function such as one_per_matrix=lambda params: SOAP(params, lr=1e-3)",
        )
    if required := required_arguments(type(made)):
        raise CanzonaError(
            f"one_per_matrix= makes a {type(made).__name__}, whose step requires {', '.join(required)}",
            at=name,
            hint="make an optimizer whose step() takes no arguments",
        )
    return made


def followed(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that objects take over from a group: no optimizers, as each object has made its own."""
    return {key: value for key, value in hypers(group).items() if key not in held_in(group)}


def differs(one: Any, other: Any) -> bool:
    """Tell whether a hyperparameter was changed. A tensor is the same as long as it is the same object."""
    if one is other:
        return False
    try:
        return bool(one != other)
    except Exception:  # whatever a comparison of a user's class raises
        return True


# -- a state dict as leaves ------------------------------------------------------------------------


def packed(value: Any, path: tuple[str, ...], leaves: dict[str, Tensor]) -> Any:
    """Describe a value in terms of JSON, and collect its tensors.

    Args:
        path: the keys that lead to it. Leaves have slashes in their names, as dots mean pieces of fused parameters.
    """
    at = "/".join(path)
    if isinstance(value, Tensor) and not inner_tensors(value):
        if leaf_name((at,)) in set(map(leaf_name, ((name,) for name in leaves))):
            raise TypeError(f"has two values at {at}")
        leaves[at] = value.detach().clone()
        return {"tensor": at, "shape": list(value.shape)}
    if isinstance(value, Mapping):
        return {"dict": [[key_of(key, at), packed(v, (*path, part_of(key)), leaves)] for key, v in value.items()]}
    if isinstance(value, list | tuple):
        inside = [packed(v, (*path, str(i)), leaves) for i, v in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": inside}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise TypeError(f"has a {type(value).__name__} at {at}")


def key_of(key: Any, at: str) -> Any:
    """A key of a dict, as JSON has it; raises TypeError if it has no such key."""
    if key is not None and type(key) not in (bool, int, float, str):
        raise TypeError(f"has a key of type {type(key).__name__} in {at or 'its outermost dict'}")
    return key


def part_of(key: Any) -> str:
    """A key as a part of a leaf's name."""
    return str(key).replace(".", "_").replace("/", "_")


def unpacked(notes: Mapping[str, Any], leaves: Mapping[str, Any]) -> Any:
    """Make the value again that `packed` described; raises KeyError if a leaf is missing."""
    ((kind, held),) = [(kind, held) for kind, held in notes.items() if kind != "shape"]
    match kind:
        case "tensor":
            found: Tensor = leaves[held]
            if list(found.shape) != notes["shape"]:
                raise ValueError(f"{held} has shape {list(found.shape)}, but was saved with shape {notes['shape']}")
            return found
        case "dict":
            return {key: unpacked(value, leaves) for key, value in held}
        case "list":
            return [unpacked(value, leaves) for value in held]
        case "tuple":
            return tuple(unpacked(value, leaves) for value in held)
        case "bytes":
            return bytes.fromhex(held)
    return held


def noted(notes: Mapping[str, Any]) -> Tensor:
    """Write what `packed` described into a tensor of bytes, which every checkpoint takes."""
    text = json.dumps(notes).encode()
    text = text.ljust(-(-len(text) // NOTES_BYTES) * NOTES_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def read_notes(tensor: Tensor) -> dict[str, Any]:
    """Read what `noted` wrote."""
    found: dict[str, Any] = json.loads(bytes(tensor.cpu().to(torch.uint8).tolist()))
    return found


def saved_shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the tensors of a portable state by leaf name; a state may hold fragments of them."""
    found: dict[str, tuple[int, ...]] = {}

    def look(notes: Any) -> None:
        if isinstance(notes, dict) and "tensor" in notes:
            found[leaf_name((notes["tensor"],))] = tuple(notes["shape"])
        elif isinstance(notes, dict | list):
            for inside in notes.values() if isinstance(notes, dict) else notes:
                look(inside)

    look(read_notes(state[NOTES]))
    return found


def is_portable(state: Mapping[str, Any]) -> bool:
    """Tell whether a state is what `OwnObject.state` returned."""
    return NOTES in state


def portable_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the portable form of a parameter's state, in which its own object may be."""
    own = state.get(OWN_OBJECT)
    return own.state() if isinstance(own, OwnObject) else state
