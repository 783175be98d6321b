"""`wrap`: make an optimizer step through canzona_compile without replacing the object.

An object that delegates to the optimizer would break schedulers, hooks, pickling and checkpoints. So `wrap` swaps the
class of the optimizer, as `fully_shard` swaps the class of modules, and all of these keep working
(docs/architecture.md has the contract). canzona_compile adds one attribute, `optimizer.canzona`, and adds nothing to
`state` or `param_groups`.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from canzona_compile.api.handle import Canzona
from canzona_compile.capture.leaves import keys_of, read
from canzona_compile.capture.twin import check_step_signature, plain_class
from canzona_compile.errors import CanzonaError, UnsupportedOptimizer
from canzona_compile.ir.hardware import Hardware, named_hardware
from canzona_compile.ir.plan_file import PlanFile, read_plan
from canzona_compile.options import MissingGrads, Numerics, Options, StrategyOption
from canzona_compile.report.explain import Explanation, explain_session
from canzona_compile.session.session import Session
from canzona_compile.split import Split

Opt = TypeVar("Opt", bound=Optimizer)

LOST = "replicate= is lost: process groups cannot be pickled"


def wrap(
    optimizer: Opt,
    *,
    replicate: DeviceMesh | ProcessGroup | None = None,
    strategy: StrategyOption = "auto",
    numerics: Numerics = "exact",
    capacity: int = 512 * 2**20,
    micro_groups: int | None = None,
    depth: int = 2,
    missing_grads: MissingGrads = "skip",
    stagger: bool = False,
    split: Mapping[str, Split | Mapping[str, int]] | None = None,
    model: nn.Module | None = None,
    planner: str = "joint",
    alpha: float = 1.0,
    hardware: str | Path | Hardware | None = None,
    plan: str | Path | PlanFile | None = None,
    cuda_graphs: bool = True,
) -> Opt:
    """Make every `step` of an optimizer compute each matrix once, on one rank, whatever the sharding.

    Args:
        optimizer: any `torch.optim.Optimizer` that updates its parameters independently of one
            another. Parameters may be plain tensors or DTensors.
        replicate: the one-dimensional mesh, or the process group, over which parameters are equal copies, as under
            DDP: plain parameters, or DTensors of a mesh beside it (tensor parallel). These ranks then share the work.
            Without `replicate` every rank computes such parameters alone.
        strategy: "owner" (one rank computes each matrix), "replicated" (every rank computes every matrix) or "auto"
            (chosen per matrix).
        numerics: "exact" gives the bits of the plain optimizer on one CPU for the same gradients; on CUDA it keeps
            the algorithm and the precisions, and computes one half of symmetric products. "fast" also allows rewrites
            that change rounding.
        capacity: the most bytes that one micro-group gathers to one rank.
        micro_groups: how many micro-groups to aim at; None chooses by predicted time.
        depth: how many micro-groups are in flight at once.
        missing_grads: "skip" leaves parameters out whose `grad` is None, as the plain optimizer does; it is an
            error if a gradient is missing on some ranks only. "zero" takes a missing gradient as zeros.
        stagger: whether to spread the work that is done every k steps (eigendecompositions) over steps, so that no
            step does it for all matrices. Each matrix then reads its counters as if it were up to k - 1 steps ahead.
        split: the parameters that hold several matrices, by pattern of their names ("*.qkv.weight"): the rows of
            each part by its name, {"q": 4096, "k": 1024, "v": 1024}, or a `Split`, which also says how the parts lie.
            The optimizer sees each part as a parameter of its own. Checkpoints hold state that is not shaped like the
            parameter per part, so that only the same split can load it.
        model: gives the parameters their names, for `split` and for reports, if a parameter group has no
            `param_names`.
        planner: the rule that chooses owners: "joint", "lpt", "alpha", "static" or "permuted".
        alpha: for the planner "alpha", from 0 (even communication) to 1 (even load).
        hardware: the rates that decisions use: a name, or a file that `canzona-compile calibrate` wrote. By default
            the rates that are assumed for the kind of device.
        plan: a plan, or its file, made by `canzona_compile.plan`, `canzona-compile plan --format json` or
            `optimizer.canzona.plan()`. The run takes its owners and micro-groups, and plans nothing else.
        cuda_graphs: on CUDA, whether to record steps as CUDA graphs and replay them while gradients stay in their
            places. Otherwise every step runs call by call; that takes more host time, and no memory for recordings.

    Returns:
        The same object. Its class is now a subclass of the old one, and it has `.canzona`.

    Raises:
        CanzonaError: `optimizer` is no optimizer, evaluates its closure several times per step, or is wrapped with
            other options; `model` lacks some of its parameters; `split` is impossible; a file holds no plan.
            The first `step` checks what depends on parameters and gradients.
    """
    if not isinstance(optimizer, Optimizer):
        raise CanzonaError(
            f"wrap takes a torch.optim.Optimizer, not a {type(optimizer).__name__}",
            hint="pass the optimizer itself, before frameworks wrap it",
        )
    splits = tuple((k, s if isinstance(s, Split) else Split(s)) for k, s in (split or {}).items())
    names = () if model is None else names_in(model, optimizer)
    if planner == "exact":
        raise CanzonaError(
            "the planner 'exact' is bound by time, so that ranks would plan differently",
            at="wrap(..., planner=)",
            hint="make a plan with it (canzona-compile plan --exact --format json) and pass that as plan=",
        )
    options = Options(
        replicate=replicate,
        strategy=strategy,
        numerics=numerics,
        capacity=capacity,
        micro_groups=micro_groups,
        depth=depth,
        missing_grads=missing_grads,
        stagger=stagger,
        split=splits,
        names=names,
        planner=planner,
        alpha=alpha,
        hardware=named_hardware(str(hardware)) if isinstance(hardware, str | Path) else hardware,
        plan=None if plan is None else read_plan(plan),
        cuda_graphs=cuda_graphs,
    )
    if is_wrapped(optimizer):
        session = optimizer.canzona.session  # type: ignore[attr-defined]
        if session.options != options and not session.lost:
            raise CanzonaError(
                "the optimizer is wrapped already, with other options",
                hint="unwrap it first, or call wrap once",
            )
        if not session.lost:
            return optimizer
        unwrap(optimizer)
    kind = type(optimizer)
    check_step_signature(kind)
    if "_optimizer_step_pre_hooks" not in vars(optimizer):  # a proxy passes `hasattr` on to its inner optimizer
        raise UnsupportedOptimizer(
            f"{kind.__name__} has not called torch.optim.Optimizer.__init__",
            hint="if it goes around another optimizer, wrap that one",
        )
    own = optimizer.__dict__.get("step")
    if own is not None and not getattr(own, "_wrapped_by_lr_sched", False):
        raise CanzonaError(
            "the step on the object itself hides that of its class, which is what wrap changes",
            hint="call wrap before what replaces optimizer.step: a framework's prepare, torch.compile",
        )
    if kind.__module__ == "torch.distributed.optim.zero_redundancy_optimizer":
        raise UnsupportedOptimizer(
            "ZeroRedundancyOptimizer communicates by itself",
            hint="wrap the optimizer class that you gave to it, with replicate=",
        )
    return _attach(optimizer, options)


def names_in(model: nn.Module, optimizer: Optimizer) -> tuple[tuple[str, ...], ...]:
    """Find the names that a model gives to the optimizer's parameters.

    Args:
        model: the model.
        optimizer: the optimizer.

    Returns:
        For each parameter group, the names of its parameters in order. They are kept by position and not by
        parameter, because frameworks replace parameters later.

    Raises:
        CanzonaError: the model lacks one of the parameters.
    """
    known = {id(param): name for name, param in model.named_parameters()}
    for g, group in enumerate(optimizer.param_groups):
        for i, param in enumerate(group["params"]):
            if id(param) not in known:
                raise CanzonaError(
                    f"parameter {i} of group {g}, of shape {list(param.shape)}, is none of the model's",
                    at="wrap(..., model=)",
                    hint="pass the model whose parameters the optimizer was given",
                )
    return tuple(tuple(known[id(p)] for p in group["params"]) for group in optimizer.param_groups)


def unwrap(optimizer: Opt) -> Opt:
    """Undo `wrap`. This is a collective if owner ranks hold state.

    Args:
        optimizer: wrapped or not; a plain one stays as it is.

    Returns:
        The same object, of its old class, with its state in the form of the plain optimizer.

    Raises:
        CanzonaError: the optimizer is a wrapper around the wrapped one.
    """
    if is_wrapped(optimizer):
        if "canzona" not in vars(optimizer):
            raise CanzonaError(
                f"{type(optimizer).__name__} goes around the wrapped optimizer",
                at="unwrap",
                hint="unwrap the optimizer inside",
            )
        optimizer.canzona.session.close()  # type: ignore[attr-defined]
        optimizer.__class__ = plain_class(optimizer)  # type: ignore[assignment]
        del optimizer.canzona  # type: ignore[attr-defined]
        _rebind_scheduled_step(optimizer)
    return optimizer


def explain(optimizer: Optimizer) -> Explanation:
    """Tell what `wrap` does with every parameter, and why, without taking a step.

    Before the first step this captures the optimizer's code.

    Args:
        optimizer: wrapped or not.

    Returns:
        One entry per parameter; print it.

    Raises:
        CanzonaError: the optimizer as a whole cannot be planned.
    """
    session = optimizer.canzona.session if is_wrapped(optimizer) else Session(optimizer, Options())  # type: ignore[attr-defined]
    return explain_session(session)


def is_wrapped(optimizer: object) -> bool:
    """Tell whether an object is an optimizer that steps through canzona_compile."""
    return hasattr(type(optimizer), "_canzona_plain_class")


def _attach(optimizer: Opt, options: Options, lost: str = "") -> Opt:
    plain: Any = type(optimizer)
    optimizer.__class__ = wrapped_class(plain)
    optimizer.canzona = Canzona(optimizer, options, lost)  # type: ignore[attr-defined]
    _rebind_scheduled_step(optimizer)
    return optimizer


def keep_as_saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Give loaded state the dtypes that it was saved with.

    Torch casts loaded state to the dtype of the parameter, but preconditioners may be wider. Torch also turns strings
    in the state into generators.

    Args:
        optimizer: the optimizer that has just loaded `state_dict`.
        state_dict: the state dict that it loaded.
    """
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, param in zip(ids, params, strict=True):
        state: dict[str, Any] = optimizer.state.get(param) or {}

        def kept(path: Any, saved: Any, state: dict[str, Any] = state) -> Any:
            if not isinstance(saved, Tensor):
                return saved
            loaded = read(state, keys_of(path))
            return loaded if loaded.dtype == saved.dtype else saved.detach().clone().to(loaded.device)

        state.update(pytree.tree_map_with_path(kept, dict(state_dict["state"].get(i) or {})))


def keep_tuples(optimizer: Optimizer, before: list[dict[str, Any]]) -> None:
    """Turn lists in parameter groups back into tuples if they were tuples before the load.

    Full state dicts of torch.distributed.checkpoint turn tuples into lists, and the optimizer's code would be captured
    anew for lists.

    Args:
        optimizer: the optimizer that has just loaded a state dict.
        before: its parameter groups before the load.
    """
    for group, old in zip(optimizer.param_groups, before, strict=True):
        group.update({k: tuple(v) for k, v in group.items() if isinstance(v, list) and isinstance(old.get(k), tuple)})


def _rebind_scheduled_step(optimizer: Optimizer) -> None:
    """Make the counting `step` that a scheduler put on the instance before `wrap` call the new class."""
    patched = optimizer.__dict__.get("step")
    if patched is None or not getattr(patched, "_wrapped_by_lr_sched", False):
        return
    own = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        alive = own()
        assert alive is not None
        alive._opt_called = True  # type: ignore[attr-defined]
        return type(alive).step(alive, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.__dict__["step"] = step


@functools.cache
def wrapped_class(plain: type[Optimizer]) -> type[Any]:
    """Make the subclass of an optimizer class whose `step` goes through canzona_compile.

    Args:
        plain: the optimizer class that the user wrote.

    Returns:
        The subclass, one per `plain`.
    """

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.canzona.session.step():
            self.canzona.log_headline()
        return loss

    def state_dict(self: Any) -> dict[str, Any]:
        with self.canzona.session.portable_state():
            return plain.state_dict(self)

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        before = self.param_groups
        plain.load_state_dict(self, state_dict)
        keep_tuples(self, before)
        keep_as_saved(self, state_dict)
        self.canzona.session.forget_plan()

    def reduce(self: Any, protocol: Any) -> Any:
        options: Options = self.canzona.session.options
        lost = LOST if options.replicate is not None else self.canzona.session.lost
        with self.canzona.session.portable_state():
            state = {k: v for k, v in self.__getstate__().items() if k != "canzona"}
            state["state"] = defaultdict(dict, {} if self.canzona.session.rehearsed else state["state"])
        return _restore, (plain, replace(options, replicate=None), lost), state

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        restore, (kind, options, _), state = reduce(self, 4)
        same = self.canzona.session
        made = restore(kind, same.options if not same.lost else options, same.lost)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(state, memo))
        return made

    step.__doc__ = plain.step.__doc__
    members = {
        "step": step,
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "__reduce_ex__": reduce,
        "__deepcopy__": deepcopy,
        "__module__": plain.__module__,
        "__doc__": plain.__doc__,
        "_canzona_plain_class": plain,
    }
    made: Any = type(f"Canzona{plain.__name__}", (plain,), members)
    hooked = Optimizer.profile_hook_step(step)  # what Optimizer.__init__ does to a class on first use
    hooked.hooked = True  # type: ignore[attr-defined]
    made.step = hooked
    wrapped: type[Any] = made
    return wrapped


def _restore(plain: type[Optimizer], options: Options, lost: str) -> Any:
    """Make an empty wrapped optimizer, which pickle and deepcopy fill."""
    return _attach(object.__new__(plain), options, lost)
