"""`hidden_matrices`: which parameters of a model a matrix optimizer trains, by rules and by what users claim."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from canzona_compile.api.fused import parts_of
from canzona_compile.api.survey import NO_WEIGHT, WEIGHT, Survey, class_name, is_linear, is_wide
from canzona_compile.compat.torch_private import is_flattened
from canzona_compile.errors import CanzonaError, UnsupportedLayout, some
from canzona_compile.ir.canonical_names import canonical_name, canonical_params
from canzona_compile.ir.layout import Shape
from canzona_compile.ir.split import Split
from canzona_compile.report.page import PageModel, PageTable, Words, note
from canzona_compile.report.printable import Printable
from canzona_compile.report.units import format_count, format_shape, plural

STYLES = {"matrix": "green", "other": "cyan", "frozen": "dim"}
TOTALS = {"matrix": "matrices", "other": "others", "frozen": "frozen"}
NamedParams = list[tuple[str, nn.Parameter]]
Arguments = Mapping[str, Any]
# Arguments of a parameter group by patterns of names, or by a function of a name and a shape.
GroupArguments = Mapping[str, Arguments] | Callable[[str, Shape], Arguments | None]


@dataclass(frozen=True, slots=True)
class Row:
    """One parameter.

    Attributes:
        name: without what DDP, torch.compile and activation checkpointing put into it.
        shape: of the whole parameter, also where a rank holds a fragment.
        kind: "matrix", "other", or "frozen" if it is not trained.
        group: the arguments of its parameter group that `groups=` gives it.
    """

    name: str
    shape: Shape
    kind: str
    why: str
    group: Arguments = field(default_factory=dict, hash=False)

    @property
    def elements(self) -> int:
        """The number of elements of the whole parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, repr=False)
class Choice(Printable):
    """The parameters that are hidden matrices, the others, and why. Printed, repeated layers share a line.

    Attributes:
        rows: one entry per parameter, in the order of `model.named_parameters()`.
        matrices: the hidden matrices with their names, as torch.optim.Muon takes them.
        others: all other trained parameters with their names, as torch.optim.AdamW takes them.
        convolutions: the names of those hidden matrices that are weights of convolutions, which only patterns choose.
        rows_are_inputs: the names of those hidden matrices that are [inputs, outputs], other than linear layers are.
        splits: the parts of hidden matrices that are fused weights of a known form, by name, as `split=` takes them.
    """

    text_width = 120

    rows: tuple[Row, ...]
    matrices: NamedParams = field(compare=False)
    others: NamedParams = field(compare=False)
    convolutions: frozenset[str] = frozenset()
    rows_are_inputs: frozenset[str] = field(compare=False, default_factory=frozenset)
    splits: Mapping[str, Split] = field(compare=False, default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The rows as dicts, lists and plain values."""
        return {"rows": [asdict(row) for row in self.rows]}

    def page(self) -> PageModel:
        rows = []
        for own in same_rows(self.rows):
            one, elements = own[0], format_count(sum(row.elements for row in own))
            repeats = f"x {len(own)}" if len(own) > 1 else ""
            look = Words(one.kind, STYLES[one.kind])
            given = "; ".join((one.why, *(f"{key}={value!r}" for key, value in one.group.items())))
            rows.append((shared_name(own), repeats, format_shape(one.shape), elements, look, given))
        headers, title = (
            ("parameter", ":>", "shape", "elements:>", "kind", "why"),
            "hidden matrices and other parameters",
        )
        return PageModel((PageTable(headers, tuple(rows), title, framed=True), *map(note, totals(self.rows))))

    __repr__ = Printable.__str__


def same_rows(rows: Sequence[Row]) -> list[list[Row]]:
    """Group parameters that differ only in the numbers in their names."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        name = tuple("*" if part.isdigit() else part for part in row.name.split("."))
        groups.setdefault((name, row.shape, row.kind, row.why, repr(row.group)), []).append(row)
    return list(groups.values())


def shared_name(rows: Sequence[Row]) -> str:
    """Name a group of parameters: "layers.*.q_proj.weight"."""
    parts = zip(*(row.name.split(".") for row in rows), strict=True)
    return ".".join(own[0] if len(set(own)) == 1 else "*" for own in parts)


def totals(rows: Sequence[Row]) -> Iterator[str]:
    """Count parameters and elements of each kind: "matrices: 196 parameters, 440 M elements"."""
    for kind, word in TOTALS.items():
        own = [row.elements for row in rows if row.kind == kind]
        if own or kind != "frozen":
            yield f"{word}: {plural(len(own), 'parameter')}, {format_count(sum(own))} elements"


WHERE = "hidden_matrices(model)"


def hidden_matrices(
    model: nn.Module,
    matrices: str | Sequence[str] = (),
    others: str | Sequence[str] = (),
    *,
    batch_dims: bool = False,
    groups: GroupArguments | None = None,
) -> Choice:
    """Choose the parameters of a model that a matrix optimizer such as Muon should train, and say why.

    A hidden matrix is a weight with two dims larger than one that is not an embedding, not tied to one, and not an
    output head. Norms, biases, convolutions, embeddings, tables of positions and output heads are others. The model may
    be whole or sharded, compiled, wrapped by DDP, or on the meta device. The result is the same.

    An output head is a weight tied to the embedding; or a module outside of the repeated layers that is named as one
    (`lm_head`, `output`, `head`, `classifier`, `score` and the like); or the last module of the model, outside of the
    repeated layers, if it is named `fc`, as in ResNets; or the last module outside of the repeated layers with a weight
    of as many rows or columns as the largest embedding has rows.

    Routers of experts are matrices. Megatron-LM, Moonshot's example for Moonlight and DeepSeek-V4 train them with Muon,
    because they are weights of two dims that tokens pass through in every layer. Others give them to AdamW: pass
    `others="*.gate.weight"` for that. LoRA factors are matrices, unless they adapt an embedding or a head.

    A parameter of two dims on a module that is not linear is a matrix if it is named as a weight (`weight`,
    `in_proj_weight`, `gate_up_proj`, `w1`), and another parameter if not (`A_log`, `pos_embed`, `scale_shift_table`).

    The reason of a fused weight says which matrices it holds, or that they are not known; `choice.splits` has them.

    Args:
        model: the model.
        matrices: patterns of names (as of `fnmatch`) that are hidden matrices, whatever the rules say.
        others: patterns of names that are not.
        batch_dims: the optimizer takes stacks of matrices, as all of `canzona_compile.optimizers` do. Stacks, such as
            those of experts, are hidden matrices then.
        groups: arguments that some parameters have for themselves, see `muon_adamw`.

    Returns:
        The choice. `choice.matrices` and `choice.others` are pairs of names and parameters; `print(choice)` shows all.

    Raises:
        CanzonaError: the model is not a module, has no parameters, or has parameters without a shape; a pattern fits
            no trained parameter; both arguments claim a parameter; `matrices=` claims one of less than two dims;
            `groups=` is neither a mapping of mappings nor a function that returns them.
        UnsupportedLayout: FSDP1 has flattened a parameter.
    """
    if not isinstance(model, nn.Module):
        raise CanzonaError(f"{type(model).__name__} is not a torch.nn.Module", at=WHERE, hint="pass the model itself")
    params = canonical_params(model)
    if not params:
        raise CanzonaError("the model has no parameters", at=WHERE)
    for name, param in params.items():
        check_shape(name, param)
    trained = {name: param for name, param in params.items() if param.requires_grad}
    wanted = claims("matrices", matrices, params, trained)
    unwanted = claims("others", others, params, trained)
    check_claims(wanted, unwanted, trained)
    given = given_arguments(groups, params, trained)
    survey, rows, splits = Survey(model), [], dict[str, Split]()
    convolutions, turned = set[str](), set[str]()
    for name, param in params.items():
        pattern = wanted.get(name) or unwanted.get(name)
        if not param.requires_grad:
            kind, why = "frozen", "not trained"
        elif pattern is not None:
            kind, why = "matrix" if name in wanted else "other", f"chosen by pattern {pattern!r}"
            if name in wanted and survey.is_convolution(param):
                why += ": a convolution, which muon_adamw takes as one matrix"
                convolutions.add(name)
        else:
            kind, why = judge(survey, param, batch_dims)
        split, words = parts_of(survey, param) if kind == "matrix" else (None, "")
        if split is not None:
            splits[name] = split
        if words:
            why = words if why == "hidden matrix" else f"{why}; {words}"
        if kind == "matrix" and survey.rows_are_inputs(param):
            turned.add(name)
            why += "" if words else "; rows are inputs"
        rows.append(Row(name, tuple(param.shape), kind, why, given.get(name, {})))
    chosen: dict[str, NamedParams] = {
        kind: [(r.name, params[r.name]) for r in rows if r.kind == kind] for kind in TOTALS
    }
    return Choice(tuple(rows), chosen["matrix"], chosen["other"], frozenset(convolutions), frozenset(turned), splits)


def judge(survey: Survey, param: nn.Parameter, batch_dims: bool) -> tuple[str, str]:
    """Return the kind of a trained parameter and the reason, by the rules alone."""
    shape, site = tuple(param.shape), survey.sites[id(param)][0]
    module = survey.modules[site.path]
    own = class_name(module)
    if not is_wide(shape):
        return "other", "norm or bias: one dim" if len(shape) < 2 else "one row or column"
    if why := survey.embeddings.get(id(param)) or survey.heads.get(id(param)):
        return "other", why
    if "Norm" in own and not is_linear(module):
        return "other", "norm"
    if survey.is_convolution(param):
        return "other", "convolution"
    if NO_WEIGHT.search(site.leaf) or not WEIGHT.search(site.leaf):
        return "other", f"{site.leaf or site.name} of {own} is not named as a weight"
    if len(shape) > 2:
        return stack(shape, "expert" in f"{site.path}.{own}".lower(), batch_dims)
    return "matrix", "hidden matrix: router" if survey.is_router(site, shape[0]) else "hidden matrix"


def stack(shape: Shape, experts: bool, batch_dims: bool) -> tuple[str, str]:
    """Judge a weight of more than two dims."""
    why = f"stack of {math.prod(shape[:-2])} {'experts' if experts else 'matrices'}"
    if not is_wide(shape[-2:]):
        return "other", f"{why}, of vectors"
    if batch_dims:
        return "matrix", f"{why}, each a hidden matrix"
    return "other", f"{why}: batch_dims=True takes it, as muon_adamw does"


# -- what users claim --------------------------------------------------------------------------------


def check_shape(name: str, param: nn.Parameter) -> None:
    """Raise CanzonaError for a parameter whose shape is not that of a matrix of the model."""
    if is_lazy(param):
        raise CanzonaError("the parameter has no shape yet", at=name, hint="run the model once on a batch first")
    if is_flattened(param):
        raise UnsupportedLayout(
            "FSDP1 has flattened the parameter, so its shape is lost",
            at=name,
            hint="shard the model with torch.distributed.fsdp.fully_shard (FSDP2) instead",
        )


def given_arguments(
    groups: GroupArguments | None, params: Mapping[str, nn.Parameter], trained: Mapping[str, nn.Parameter]
) -> dict[str, Arguments]:
    """The arguments that `groups=` gives to trained parameters, by name. Of patterns that fit, later ones win."""
    where, found = "hidden_matrices(model, groups=)", dict[str, dict[str, Any]]()
    if groups is None:
        return {}
    if not isinstance(groups, Mapping) and not callable(groups):
        raise CanzonaError(
            f"groups= is a {type(groups).__name__}, not a mapping or a function",
            at=where,
            hint='pass arguments by patterns of names, such as {"*.experts.*": {"lr": 1e-3}}',
        )
    said: list[tuple[str, Any, Any]] = []  # the name of a parameter, its arguments, and what gave them
    if isinstance(groups, Mapping):
        for pattern, own in groups.items():
            said += [(name, own, pattern) for name in claims("groups", [pattern], params, trained)]
    else:
        said = [(name, groups(name, tuple(param.shape)), name) for name, param in trained.items()]
    for name, own, given in said:
        if own is None and callable(groups):
            continue
        if not isinstance(own, Mapping) or not all(isinstance(key, str) for key in own) or "params" in own:
            raise CanzonaError(
                f"{given!r} gets {own!r}, which is no mapping of arguments",
                at=where,
                hint='pass what a parameter group has, such as {"lr": 1e-3, "weight_decay": 0.0}',
            )
        found.setdefault(name, {}).update(own)
    return {name: own for name, own in found.items() if own}


def claims(
    argument: str, given: str | Sequence[str], params: Mapping[str, object], trained: Mapping[str, object]
) -> dict[str, str]:
    """Find the first pattern of an argument that fits each trained parameter, by name; raise if one fits none."""
    where, found = f"hidden_matrices(model, {argument}=)", dict[str, str]()
    for pattern in [given] if isinstance(given, str) else given:
        if not isinstance(pattern, str):
            raise CanzonaError(
                f"a pattern must be a string, not a {type(pattern).__name__}",
                at=where,
                hint="pass strings, such as '*.head.weight'",
            )
        fits = [name for name in params if fnmatchcase(name, canonical_name(pattern))]
        if not any(name in trained for name in fits):
            only = (
                f"matches only frozen parameters: {some(fits)}"
                if fits
                else f"matches no parameter; the model has {some(params)}"
            )
            raise CanzonaError(f"{pattern!r} {only}", at=where, hint="print(hidden_matrices(model)) shows all names")
        for name in fits:
            if name in trained:
                found.setdefault(name, pattern)
    return found


def check_claims(wanted: Mapping[str, str], unwanted: Mapping[str, str], trained: Mapping[str, nn.Parameter]) -> None:
    """Raise CanzonaError if two patterns contradict one another, or one claims a vector as a matrix."""
    for name, pattern in wanted.items():
        if name in unwanted:
            raise CanzonaError(
                f"{pattern!r} of matrices= and {unwanted[name]!r} of others= both match this parameter",
                at=name,
                hint="make the patterns narrower",
            )
        if trained[name].ndim < 2:
            raise CanzonaError(
                f"{pattern!r} of matrices= matches a parameter of shape {list(trained[name].shape)}, which is not a "
                "matrix",
                at=name,
                hint="make the pattern narrower: end it with '.weight', or leave out norms",
            )
