"""One wrapped optimizer for a whole model: a matrix optimizer for hidden matrices, another one for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from glob import escape
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW, Optimizer

from canzona_compile.api.chain import Chain, chain
from canzona_compile.api.choice import Arguments, Choice, GroupArguments, NamedParams, Row, hidden_matrices
from canzona_compile.api.wrap import names_in, wrap
from canzona_compile.api.zero1 import zero1 as under_zero1
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.options import StepOptions, WrapOptions
from canzona_compile.ir.plan_file import read_plan
from canzona_compile.ir.split import Split
from canzona_compile.optimizers import KLSOAP, SOAP, Muon, NorMuon
from canzona_compile.session.params import named_params

OPTIONS = WrapOptions.__optional_keys__ | {"model"}
OPTIONS_OF_ZERO1 = StepOptions.__optional_keys__ | {"bucket_bytes", "reduce_dtype", "gather"}
MakesOptimizer = Callable[[Any], Optimizer]
OF_SHAPES = {"matrix_dims", "rows_are_inputs"}  # arguments of groups that our optimizers know without a default
MUON: MakesOptimizer = partial(Muon, adjust_lr_fn="match_rms_adamw")  # its updates have the size of AdamW's


def optimizer_for(
    model: nn.Module,
    matrix_optimizer: MakesOptimizer,
    other_optimizer: MakesOptimizer = AdamW,
    *,
    matrices: str | Sequence[str] = (),
    others: str | Sequence[str] = (),
    batch_dims: bool | None = None,
    groups: GroupArguments | None = None,
    zero1: DeviceMesh | ProcessGroup | None = None,
    **options: Any,
) -> Chain:
    """Build one wrapped optimizer for a whole model: one for hidden matrices, another one for all other parameters.

        optimizer_for(model, partial(SOAP, lr=3e-3), partial(AdamW, lr=3e-4))

    This is `hidden_matrices`, `chain` and `wrap` in one call.

    Args:
        model: the model as it is trained: whole, or sharded by `fully_shard` or `parallelize_module`.
        matrix_optimizer: makes the optimizer of the hidden matrices: a class, or `functools.partial` of one with its
            arguments. It is called with a list of (name, parameter), as all of torch's optimizers take it. For one that
            takes parameters alone: `lambda named: Muon([p for _, p in named], lr=0.02)`.
        other_optimizer: makes that of all other parameters. It is not called if there are none.
        matrices: patterns of names that the first one trains, whatever the rules of `hidden_matrices` say.
        others: patterns of names that the second one trains.
        batch_dims: whether the first one takes stacks of matrices, such as experts; see `hidden_matrices`. None asks
            its class: those with `matrix_dims` do.
        groups: as for `muon_adamw`. Both functions are called with parameter groups then, as all of torch's optimizers
            take them.
        zero1: the data-parallel ranks, for ZeRO-1 in place of DDP; see `canzona_compile.zero1`.
        options: those of `wrap`, such as `replicate=` under DDP; with `zero1=`, those of `canzona_compile.zero1`.
            `split="auto"`, the default, splits the fused weights of `hidden_matrices(model).splits`, but none if
            `layout=` is given. A mapping splits what it names and nothing else; None splits nothing.

    Returns:
        The wrapped chain: one `torch.optim.Optimizer` with one `.canzona`. `chain.optimizers` are both, or the first.

    Raises:
        CanzonaError: the model has no hidden matrix, a pattern matches no parameter or one that is not a matrix, or
            `wrap` or `zero1` refuses the call.
        TypeError: there is no such option.
    """
    advice = "Pass arguments of one optimizer by functools.partial, as in partial(SOAP, lr=3e-3)"
    kinds = matrix_optimizer, other_optimizer
    for kind in kinds:
        if not callable(kind):
            raise TypeError(f"optimizer_for() takes what makes an optimizer, not {type(kind).__name__}. {advice}")
    batch_dims = takes_stacks(matrix_optimizer) if batch_dims is None else batch_dims
    choice = hidden_matrices(model, matrices, others, batch_dims=batch_dims, groups=groups)
    return built("optimizer_for", model, choice, kinds, zero1, options, advice)


def muon_adamw(
    model: nn.Module,
    lr: float | Tensor = 3e-4,
    *,
    weight_decay: float = 0.1,
    matrices: str | Sequence[str] = (),
    others: str | Sequence[str] = (),
    muon: Arguments | None = None,
    adamw: Arguments | None = None,
    groups: GroupArguments | None = None,
    zero1: DeviceMesh | ProcessGroup | None = None,
    **options: Any,
) -> Chain:
    """Build one wrapped optimizer for a whole model: Muon for hidden matrices, AdamW for all other parameters.

    This is `hidden_matrices`, `chain` and `wrap` in one call. Muon is `canzona_compile.optimizers.Muon`: torch's, which
    trains stacks of experts as well, each of their matrices as if it were alone. Its updates have the size of AdamW's
    (`adjust_lr_fn="match_rms_adamw"`: by 0.2 times the root of the larger dim, from "Muon is Scalable for LLM
    Training", arXiv 2502.16982), so a learning rate and a weight decay that were tuned for AdamW serve both.

    Args:
        model: the model as it is trained: whole, or sharded by `fully_shard` or `parallelize_module`.
        lr: the learning rate of both optimizers.
        weight_decay: that of both.
        matrices: patterns of names that Muon trains, whatever the rules of `hidden_matrices` say.
        others: patterns of names that AdamW trains.
        muon: further arguments of Muon, such as {"momentum": 0.9}. They win over `lr` and `weight_decay`.
        adamw: further arguments of `torch.optim.AdamW`, such as {"betas": (0.9, 0.95)}. They win likewise.
        groups: arguments that some parameters have for themselves, in parameter groups of their own: by patterns of
            names, such as {"*.experts.*": {"lr": 1e-3}, "*.head.weight": {"weight_decay": 0.0}}, of which later ones
            win, or by a function that is called with a name and the shape of the whole parameter. They win over all
            else. `print(hidden_matrices(model, groups=...))` shows them.
        zero1: the data-parallel ranks, for ZeRO-1 in place of DDP; see `canzona_compile.zero1`.
        options: those of `wrap`, such as `replicate=` under DDP; with `zero1=`, those of `canzona_compile.zero1`.
            `split="auto"`, the default, splits the fused weights of `hidden_matrices(model).splits`, but none if
            `layout=` is given. A mapping splits what it names and nothing else; None splits nothing.

    Returns:
        The wrapped chain: one `torch.optim.Optimizer` with one `.canzona`. `chain.optimizers` are Muon and AdamW.

    Raises:
        CanzonaError: the model has no hidden matrix, a pattern matches no parameter or one of a shape that Muon does
            not take, `groups=` has an argument that the optimizer does not know, or `wrap` or `zero1` refuses the call.
        TypeError: there is no such option.
    """
    kinds = beside_adamw(MUON, lr, weight_decay, muon, adamw)
    return for_whole_model("muon", model, kinds, matrices, others, groups, zero1, options)


def soap_adamw(
    model: nn.Module,
    lr: float = 3e-4,
    *,
    weight_decay: float = 0.1,
    matrices: str | Sequence[str] = (),
    others: str | Sequence[str] = (),
    soap: Arguments | None = None,
    adamw: Arguments | None = None,
    groups: GroupArguments | None = None,
    zero1: DeviceMesh | ProcessGroup | None = None,
    **options: Any,
) -> Chain:
    """Build one wrapped optimizer for a whole model: SOAP for hidden matrices, AdamW for all other parameters.

    SOAP's updates have the size of AdamW's, so one learning rate serves both. `soap` has further arguments of
    `canzona_compile.optimizers.SOAP`, such as {"every": 1}. All else is as for `muon_adamw`.
    """
    kinds = beside_adamw(SOAP, lr, weight_decay, soap, adamw)
    return for_whole_model("soap", model, kinds, matrices, others, groups, zero1, options)


def kl_soap_adamw(
    model: nn.Module,
    lr: float = 3e-4,
    *,
    weight_decay: float = 0.1,
    matrices: str | Sequence[str] = (),
    others: str | Sequence[str] = (),
    kl_soap: Arguments | None = None,
    adamw: Arguments | None = None,
    groups: GroupArguments | None = None,
    zero1: DeviceMesh | ProcessGroup | None = None,
    **options: Any,
) -> Chain:
    """Build one wrapped optimizer for a whole model: KL-SOAP for hidden matrices, AdamW for all other parameters.

    KL-SOAP's updates have the size of AdamW's, so one learning rate serves both. `kl_soap` has further arguments of
    `canzona_compile.optimizers.KLSOAP`, such as {"every": 1}. All else is as for `muon_adamw`.
    """
    kinds = beside_adamw(KLSOAP, lr, weight_decay, kl_soap, adamw)
    return for_whole_model("kl_soap", model, kinds, matrices, others, groups, zero1, options)


def plain_muon_adamw(
    matrices: Sequence[Any],
    others: Sequence[Any],
    lr: float | Tensor = 3e-4,
    weight_decay: float = 0.1,
    muon: Arguments | None = None,
    adamw: Arguments | None = None,
) -> Chain:
    """Make the chain that `muon_adamw` wraps."""
    return chained(matrices, others, *beside_adamw(MUON, lr, weight_decay, muon, adamw))


def beside_adamw(
    kind: MakesOptimizer,
    lr: float | Tensor,
    weight_decay: float,
    own: Arguments | None,
    adamw: Arguments | None,
) -> tuple[MakesOptimizer, MakesOptimizer]:
    """What makes the optimizer of matrices, and AdamW; the arguments of one of them win over those of both."""
    both = {"lr": lr, "weight_decay": weight_decay}
    return partial(kind, **{**both, **(own or {})}), partial(AdamW, **{**both, **(adamw or {})})


def for_whole_model(
    own: str,
    model: nn.Module,
    kinds: tuple[MakesOptimizer, MakesOptimizer],
    matrices: str | Sequence[str],
    others: str | Sequence[str],
    groups: GroupArguments | None,
    zero1: DeviceMesh | ProcessGroup | None,
    options: dict[str, Any],
) -> Chain:
    """Build what a line returns; `own` is the name of the arguments of its first optimizer."""
    choice = hidden_matrices(model, matrices, others, batch_dims=True, groups=groups)
    advice = f'Pass arguments of one optimizer as adamw={{"betas": (0.9, 0.95)}} or {own}={{"lr": 1e-3}}'
    return built(f"{own}_adamw", model, choice, kinds, zero1, options, advice)


def built(
    call: str,
    model: nn.Module,
    choice: Choice,
    kinds: tuple[MakesOptimizer, MakesOptimizer],
    zero1: DeviceMesh | ProcessGroup | None,
    options: dict[str, Any],
    advice: str,
) -> Chain:
    """Build what a call returns.

    Args:
        kinds: what makes the optimizer of matrices, and that of all others.
        advice: where arguments go that are no options.
    """
    if unknown := [name for name in options if name not in (OPTIONS if zero1 is None else OPTIONS_OF_ZERO1)]:
        if unknown[0] in OPTIONS_OF_ZERO1:
            advice = "It is an option of zero1: pass zero1= as well"
        raise TypeError(f"{call}() got an unexpected keyword argument {unknown[0]!r}. {advice}")
    if not choice.matrices:
        raise CanzonaError(
            f"the model has no hidden matrix for {name_of(kinds[0])} to train",
            at=f"{call}(model)",
            hint="print(canzona_compile.hidden_matrices(model)) shows why; pass matrices= to choose matrices by name, "
            f"or use {name_of(kinds[1])} for this model (a pipeline stage may have no hidden matrix)",
        )
    flat = choice.convolutions if takes_stacks(kinds[0]) else frozenset[str]()
    given = {row.name: dict(row.group) for row in choice.rows}
    for name, param in choice.matrices:
        if name in flat:
            given[name].setdefault("matrix_dims", param.ndim)
        if name in choice.rows_are_inputs and tells_sides_apart(kinds[0], given[name]):
            given[name].setdefault("rows_are_inputs", True)
    made = chained(in_groups(choice.matrices, given), in_groups(choice.others, given), *kinds)
    check_known(call, choice, made)
    first = made.optimizers[0]
    if choice.convolutions and not flat and hasattr(plain_class(first), "matrix_dims"):
        raise CanzonaError(
            f"{name_of(kinds[0])} would train this convolution as a stack of many small matrices",
            at=min(choice.convolutions),
            hint="pass the class or functools.partial of it, so that convolutions get a parameter group with "
            "matrix_dims, or narrow matrices=",
        )
    if options.get("split", "auto") == "auto":
        options = {**options, "split": splits_in(made, model, choice, options)}
        if options["split"] and zero1 is None:
            options.setdefault("model", model)  # gives their names to parameters of an optimizer that keeps none
    return wrap(made, **options) if zero1 is None else under_zero1(model, made, mesh=zero1, **options)


def chained(
    matrices: Sequence[Any], others: Sequence[Any], matrix_optimizer: MakesOptimizer, other_optimizer: MakesOptimizer
) -> Chain:
    """Make both optimizers, the second one unless there are no others, and chain them."""
    return chain(matrix_optimizer(list(matrices)), *([other_optimizer(list(others))] if others else []))


def in_groups(named: NamedParams, given: Mapping[str, Mapping[str, Any]]) -> Sequence[Any]:
    """Parameter groups of parameters with equal arguments; the parameters themselves if none has any.

    Args:
        given: arguments of parameters, by name.
    """
    groups: list[tuple[Mapping[str, Any], NamedParams]] = [({}, [])]
    for name, param in named:
        own = next((params for arguments, params in groups if same(arguments, given[name])), None)
        if own is None:
            groups.append((given[name], own := []))
        own.append((name, param))
    if len(groups) == 1:
        return named
    return [{"params": params, **arguments} for arguments, params in groups if params]


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether arguments are equal; tensors are if they are the same."""
    return one.keys() == other.keys() and all(
        value is other[key] or (not isinstance(value, Tensor) and value == other[key]) for key, value in one.items()
    )


def check_known(call: str, choice: Choice, made: Chain) -> None:
    """Raise if a parameter was given an argument that its optimizer does not know, or a value that it does not take.

    Torch would ignore the one, and check the other of arguments alone, so each argument is tried on a small matrix.
    """
    for named, optimizer in zip((choice.matrices, choice.others), made.optimizers, strict=False):
        names = {name for name, _ in named}
        tried: list[Mapping[str, Any]] = [{}]
        known = {*optimizer.defaults, *(OF_SHAPES if hasattr(plain_class(optimizer), "matrix_dims") else ())}
        for row in (row for row in choice.rows if row.name in names):
            if unknown := sorted(row.group.keys() - known):
                raise CanzonaError(
                    f"{plain_class(optimizer).__name__} has no argument {unknown[0]!r}, which groups= gives",
                    at=f"{call}: {row.name}",
                    hint=f"it has {', '.join(sorted(known))}",
                )
            if not any(same(row.group, own) for own in tried):
                tried.append(row.group)
                try_arguments(optimizer, row, call)


def try_arguments(optimizer: Optimizer, row: Row, call: str) -> None:
    """Raise if the class of an optimizer refuses the arguments of a parameter."""
    kind = plain_class(optimizer)
    taken = signature(kind).parameters
    rest = any(own.kind is Parameter.VAR_KEYWORD for own in taken.values())
    wanted = {**optimizer.defaults, **row.group}
    given = {key: value for key, value in wanted.items() if (key in taken or rest) and key not in OF_SHAPES}
    try:
        kind([nn.Parameter(torch.empty(2, 2, device="cpu"))], **given)
    except TypeError:  # it wants arguments that are no defaults
        return
    except Exception as error:  # whatever else a constructor raises
        raise CanzonaError(
            f"{kind.__name__} refuses {', '.join(f'{k}={v!r}' for k, v in row.group.items())}: {error}",
            at=f"{call}: {row.name}",
            hint="change what groups= gives to this parameter",
        ) from error


def takes_stacks(made_by: MakesOptimizer) -> bool:
    """Whether the class of an optimizer says that it steps the matrices of stacks one by one."""
    return hasattr(made_by.func if isinstance(made_by, partial) else made_by, "matrix_dims")


def tells_sides_apart(made_by: MakesOptimizer, group: Mapping[str, Any]) -> bool:
    """Whether it makes one of our optimizers to which a matrix of a group is not what its transpose is."""
    kind, given = (made_by.func, made_by.keywords) if isinstance(made_by, partial) else (made_by, {})
    return kind is NorMuon or (kind is Muon and {**given, **group}.get("adjust_lr_fn") != "match_rms_adamw")


def splits_in(made: Chain, model: nn.Module, choice: Choice, options: Mapping[str, Any]) -> dict[str, Split]:
    """The parts that `split="auto"` stands for: of weights that the optimizers hold under the model's names."""
    held = {id(param) for own in made.optimizers for group in own.param_groups for param in group["params"]}
    if options.get("layout") is not None or not held <= {id(param) for param in model.parameters()}:
        return {}  # fragments may be packed, and copies, such as master weights, have no names
    found = {name for own in made.optimizers for name, _, _ in named_params(own, names_in(model, own))}
    splits = {name: split for name, split in choice.splits.items() if name in found}
    if options.get("plan") is not None:
        planned = [task.name for task in read_plan(options["plan"]).tasks]
        ends = {name: (f"{name}[", f"{split.parts[0][0]}]") for name, split in splits.items()}
        kept = {n for n, (begin, end) in ends.items() if any(t.startswith(begin) and t.endswith(end) for t in planned)}
        splits = {name: split for name, split in splits.items() if name in kept}
    return {escape(name): split for name, split in splits.items()}  # patterns that match these names alone


def name_of(made_by: MakesOptimizer) -> str:
    """What messages call an optimizer that is made so."""
    kind: Any = made_by.func if isinstance(made_by, partial) else made_by
    return str(getattr(kind, "__name__", kind))
