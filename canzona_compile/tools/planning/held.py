"""Which parameters of a module a given optimizer holds, in the order in which it holds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from canzona_compile.api.chain import Chain
from canzona_compile.api.choice import hidden_matrices
from canzona_compile.capture.batch_dim import num_batch_dims
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.session.params import named_params
from canzona_compile.tools.planning.weights import Model, from_module


def held_by(optimizer: Optimizer, module: nn.Module) -> dict[str, int] | None:
    """Find the parameters that an optimizer holds of a module, or of another copy of it.

    They are known by being the same objects; else by the names that the optimizer has of them; else by their shapes,
    because the optimizer may hold those of a sharded copy, and the module lie on the meta device.

    Returns:
        The index of each one's parameter group, by canonical name, in the order of the optimizer. None if it holds none
        of them, and so stands for its kind.
    """
    params = canonical_params(module)
    by_id = {id(param): name for name, param in params.items()}
    held = [(name, g, tuple(param.shape), by_id.get(id(param))) for name, g, param in named_params(optimizer)]
    if found := {same: g for _, g, _, same in held if same is not None}:
        return found
    if found := {name: g for name, g, shape, _ in held if name in params and tuple(params[name].shape) == shape}:
        return found
    here, there = Counter(tuple(p.shape) for p in params.values()), Counter(shape for _, _, shape, _ in held)
    if len(held) == 1 or any(there[shape] > here[shape] for shape in there):
        return None
    alike = {shape: [n for n, p in params.items() if tuple(p.shape) == shape] for shape in there}
    hidden = hidden_names(module) if any(len(names) > there[shape] for shape, names in alike.items()) else set()
    for shape, names in alike.items():
        if len(names) > there[shape]:
            names[:] = [name for name in names if name in hidden]
        if len(names) != there[shape]:
            raise CanzonaError(
                f"the optimizer holds {there[shape]} parameters of shape {list(shape)}, the module has {here[shape]}, "
                "so it is unclear which they are",
                at="plan(..., optimizer=)",
                hint="build the optimizer from model.named_parameters(), or from the parameters of this module",
            )
    return {alike[shape].pop(0): g for _, g, shape, _ in held}


def hidden_names(module: nn.Module) -> set[str]:
    """The names of the hidden matrices of a module, stacks of them included: a plan may be of any optimizer."""
    return {name for name, _ in hidden_matrices(module, batch_dims=True).matrices}


def with_held(model: Model, held: dict[str, int], in_order: bool) -> Model:
    """Give a model the weights that an optimizer holds, with their parameter groups.

    Args:
        in_order: whether the weights keep the order of the module, and the other parameters stay, as under ZeRO-1; else
            the weights are all that the optimizer holds, its vectors among them, in its order.
    """
    if in_order:
        weights, everything = (
            tuple(replace(w, group=held.get(w.name, 0)) for w in own) for own in (model.weights, model.parameters)
        )
        return replace(model, weights=weights, parameters=everything)
    by_name = {weight.name: weight for weight in model.everything}
    found = (replace(by_name[name], elementwise=False, group=g) for name, g in held.items() if name in by_name)
    return replace(model, weights=tuple(found), parameters=())


def dealt(model: Model, chain: Chain) -> Model:
    """Deal the weights of a model out to a chain that holds none of them.

    The first optimizer gets the matrices, the second one all that is updated elementwise.
    """
    if len(chain.optimizers) > 2:
        raise CanzonaError(
            f"it is unclear which of the {len(chain.optimizers)} optimizers of the chain updates which parameter",
            at="plan(..., optimizer=)",
            hint="pass the module whose parameters the optimizers were built from",
        )
    if len(chain.optimizers) < 2:
        return replace(model, parameters=())
    return replace(model, parameters=tuple(replace(w, member=int(w.elementwise)) for w in model.everything))


def model_of_chain(module: nn.Module, chain: Chain, in_order: bool) -> Model:
    """Make a model of a module and the chain that trains it.

    Args:
        chain: the chain. If it holds no parameter of the module, it stands for a chain that was made by
            `hidden_matrices`.
        in_order: whether the weights keep the order of the module, as under ZeRO-1; else they have that of the chain.
    """
    members = [held_by(own, module) for own in chain.optimizers]
    if all(held is None for held in members):
        first = chain.optimizers[0]
        stacks = num_batch_dims(first, first.param_groups[0], 3) > 0
        matrices = {name for name, _ in hidden_matrices(module, batch_dims=stacks).matrices}
        return dealt(from_module(module, matrices), chain)
    found = {name: (m, g) for m, held in enumerate(members) for name, g in (held or {}).items()}
    model = from_module(module, found.keys() & hidden_names(module))
    by_name = {weight.name: weight for weight in model.everything if weight.name in found}
    order = by_name if in_order else [name for name in found if name in by_name]
    everything = tuple(
        replace(by_name[name], member=m, group=g) for name, (m, g) in ((name, found[name]) for name in order)
    )
    return replace(model, weights=tuple(w for w in everything if not w.elementwise), parameters=everything)
