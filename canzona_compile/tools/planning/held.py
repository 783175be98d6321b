"""Which parameters of a module a given optimizer holds, in the order in which it holds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.session.param_names import named_params
from canzona_compile.tools.planning.weights import Model, hidden_matrix


def held_by(optimizer: Optimizer, module: nn.Module) -> dict[str, int] | None:
    """Find the parameters that an optimizer holds of a module, or of another copy of it.

    They are known by being the same objects; else by the names that the optimizer has of them; else by their shapes,
    because the optimizer may hold those of a sharded copy, and the module lie on the meta device.

    Args:
        optimizer: the optimizer.
        module: the module.

    Returns:
        The index of each one's parameter group, by canonical name, in the order of the optimizer. None if it holds none
        of them, and so stands for its kind.

    Raises:
        CanzonaError: there are several parameters of a shape, of which the optimizer holds some, and no names.
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
    for shape, names in alike.items():
        if len(names) > there[shape]:
            names[:] = [name for name in names if hidden_matrix(name, params[name])]
        if len(names) != there[shape]:
            raise CanzonaError(
                f"the optimizer holds {there[shape]} parameters of shape {list(shape)}, the module has {here[shape]}, "
                "and nothing tells which they are",
                at="plan(..., optimizer=)",
                hint="make the optimizer from named_parameters() of its model, or from this module's parameters",
            )
    return {alike[shape].pop(0): g for _, g, shape, _ in held}


def with_held(model: Model, held: dict[str, int]) -> Model:
    """Give a model the weights that an optimizer holds, its vectors among them, in the optimizer's order."""
    by_name = {weight.name: weight for weight in model.everything}
    weights = (replace(by_name[name], elementwise=False, group=g) for name, g in held.items() if name in by_name)
    changed = replace(model, weights=tuple(weights), parameters=())
    return replace(changed, others=model.others + model.elements - changed.elements)
