"""For Megatron-core: matrix optimizers that step whole matrices on every kind of its parallelism.

from canzona_compile.integrations.megatron import get_megatron_optimizer
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="canzona_muon", lr=3e-4), model_chunks)

Megatron builds everything: parameter groups, main parameters, its ZeRO-1, the chain of optimizers. Then the torch
optimizers inside that step matrices are wrapped, in place. Written for megatron-core 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import optimizer as of_megatron
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from megatron.core.optimizer import emerging_optimizers as registry
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from canzona_compile.api.wrap import wrap_named
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.compat.torch_private import pytree
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.canonical_names import canonical_params
from canzona_compile.ir.split import Split
from canzona_compile.optimizers import SOAP, Muon
from canzona_compile.tensors import is_expert

WHERE = "canzona_compile.integrations.megatron"
OPTIONS_OF_MEGATRON = ("config_overrides", "use_gloo_process_groups", "pg_collection", "dump_param_to_param_group_map")
ELEMENTWISE = ("adam", "sgd")
# What our Muon does, by the fields of the OptimizerConfig that could ask for something else.
READ_BY_MUON = ("muon_momentum", "muon_nesterov", "muon_num_ns_steps", "muon_tp_mode")  # the last one changes nothing
OUR_MUON = {
    "muon_coefficient_type": "simple",
    "muon_scale_mode": "spectral",
    "muon_extra_scale_factor": 0.2,
    "muon_split_qkv": True,
    "muon_scalar_optimizer": "adam",
    "muon_fp32_matmul_prec": "medium",
}


# -- what users call -----------------------------------------------------------------------------------


def register(
    name: str, kind: type[Optimizer], arguments: Callable[[Any], Mapping[str, Any]] = lambda _config: {}
) -> None:
    """Let `OptimizerConfig(optimizer=name)` mean an optimizer class that was written for one device.

    It gets the matrices. Embeddings, the output layer and what is no matrix go to Megatron's Adam, as beside its own
    Muon.

    Args:
        arguments: makes arguments of the class of an `OptimizerConfig`, whose learning rate and weight decay the class
            gets in any case.

    Raises:
        CanzonaError: it is no subclass of `torch.optim.Optimizer`, or the name means another class.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise CanzonaError(f"{kind!r} is not a subclass of torch.optim.Optimizer", at=f"register({name!r})")
    known = registry._EMERGING_OPTIMIZERS.get(name)
    if known is not None and kind not in known.optimizer_cls.__mro__[:2]:
        raise CanzonaError(
            f"this name means {known.optimizer_cls.__name__} already", at=f"register({name!r})", hint="another name"
        )

    def made(config: Any, _chunks: Any, _groups: Any) -> dict[str, Any]:
        return {"lr": config.lr, "weight_decay": config.weight_decay, **arguments(config)}

    registry._EMERGING_OPTIMIZERS[name] = registry.EmergingOptimizerEntry(
        optimizer_cls=guarded(kind), init_state_fn=make_state, config_to_kwargs=made
    )


def guarded(kind: type[Any]) -> type[Any]:
    """A class whose step refuses fragments, as long as nobody has wrapped its optimizer."""

    def __init__(self: Any, *args: Any, **more: Any) -> None:
        kind.__init__(self, *args, **more)
        self.register_step_pre_hook(refuse_fragments)

    return type(kind.__name__, (kind,), {"__init__": __init__, "__module__": kind.__module__, "__doc__": kind.__doc__})


def refuse_fragments(optimizer: Any, *_: Any) -> None:
    """Raise if the optimizer would step fragments of matrices as if they were whole."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    cut = any(getattr(param, "tensor_model_parallel", False) for param in params)
    if cut and ProcessGroupCollection.use_mpu_process_groups(["tp"]).tp.size() > 1:
        raise CanzonaError(
            f"Megatron made {type(optimizer).__name__}, and nobody wrapped it, so it would step fragments of matrices",
            at=WHERE,
            hint=f"get_megatron_optimizer of {WHERE} in place of Megatron's, or wrap_inner(optimizer, model_chunks)",
        )


def get_megatron_optimizer(config: Any, model_chunks: Sequence[nn.Module], *args: Any, **options: Any) -> Any:
    """Make Megatron's optimizer, in which owner ranks step whole matrices. Call it in the place of Megatron's.

    Args:
        config: Megatron's `OptimizerConfig`. Its `optimizer` is "canzona_muon", "canzona_soap", a name that `register`
            has got, or one of the package emerging-optimizers, such as "soap".
        model_chunks: as for Megatron, like `args`.
        options: keywords of Megatron's function, and options of `canzona_compile.wrap`, such as `capacity`.

    Raises:
        CanzonaError: as `wrap_inner`.
    """
    check_name(config.optimizer)
    given = {name: options.pop(name) for name in OPTIONS_OF_MEGATRON if name in options}
    made = of_megatron.get_megatron_optimizer(config, model_chunks, *args, **given)
    return wrap_inner(made, model_chunks, given.get("pg_collection"), **options)


def wrap_inner(optimizer: Any, model_chunks: Sequence[nn.Module], pg_collection: Any = None, **options: Any) -> Any:
    """Wrap the torch optimizers inside Megatron's that step matrices, where a framework has called Megatron already.

    Args:
        optimizer: what Megatron's `get_megatron_optimizer` has returned.
        model_chunks: those that it was made of.
        pg_collection: Megatron's process groups; None for those of its `parallel_state`.
        options: of `canzona_compile.wrap`. What is sharded, fused or replicated follows from the model.

    Returns:
        The same object.

    Raises:
        CanzonaError: the config's optimizer is not known or steps no matrices; Megatron divides them such that nobody
            can put them together; a model chunk or a process group is missing, or the groups are not those of the
            weights.
    """
    if (config := getattr(optimizer, "config", None)) is not None:  # else this rank has nothing to train
        check_name(config.optimizer)
    weights = Weights(model_chunks, pg_collection or ProcessGroupCollection.use_mpu_process_groups())
    kinds = {entry.optimizer_cls for entry in registry._EMERGING_OPTIMIZERS.values()}
    for inner in inner_optimizers(optimizer):
        if plain_class(inner.optimizer) not in kinds:
            continue
        check(inner, model_chunks)
        hooks = inner.optimizer._optimizer_step_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is refuse_fragments]:
            del hooks[key]
        wrap_named(inner.optimizer, *weights.options_of(inner, options))
        if inner.holder is not inner.optimizer:
            inner.holder.init_state_fn = make_state
            inner.holder.sharded_state_dict = partial(sharded_state_dict, inner.holder, weights)
    return optimizer


# -- what is inside ------------------------------------------------------------------------------------


class Inner(NamedTuple):
    """A torch optimizer inside Megatron's.

    Attributes:
        holder: Megatron's object around it.
        layer_wise: whether it is in Megatron's ZeRO-1 for matrices.
        sharded: whether that gave each rank of the data parallel groups parameters of its own.
    """

    optimizer: Any
    holder: Any
    layer_wise: bool
    sharded: bool


def inner_optimizers(optimizer: Any, layer_wise: bool = False, sharded: bool = False) -> Iterator[Inner]:
    """Yield the torch optimizers inside Megatron's."""
    if isinstance(optimizer, LayerWiseDistributedOptimizer):
        layer_wise, sharded = True, optimizer.dp_cp_params_list is not None
    if hasattr(optimizer, "chained_optimizers"):
        for part in optimizer.chained_optimizers:
            yield from inner_optimizers(part, layer_wise, sharded)
    else:
        yield Inner(getattr(optimizer, "optimizer", optimizer), optimizer, layer_wise, sharded)


def check_name(given: str) -> None:
    """Refuse names that mean no matrix optimizer which could be wrapped."""
    name = plain_name(given)
    if name in ELEMENTWISE or name not in registry._EMERGING_OPTIMIZERS:
        known = ", ".join(sorted(filter(steps_alone, registry._EMERGING_OPTIMIZERS)))
        raise CanzonaError(
            f"optimizer={given!r} of the OptimizerConfig "
            + ("steps no matrices" if name in ELEMENTWISE else "is not known"),
            at=WHERE,
            hint=f"one of {known}; register(name, class) adds others",
        )
    if not steps_alone(name):
        kind = registry._EMERGING_OPTIMIZERS[name].optimizer_cls
        raise CanzonaError(
            f"{kind.__name__} of Megatron puts matrices together by itself",
            at=WHERE,
            hint='optimizer="canzona_muon" in the OptimizerConfig, or Megatron\'s own get_megatron_optimizer',
        )


def steps_alone(name: str) -> bool:
    """Tell whether a name means a class that was written for one device."""
    return not issubclass(registry._EMERGING_OPTIMIZERS[name].optimizer_cls, registry.TensorParallelMuon)


def plain_name(given: str) -> str:
    """The name of an optimizer without the prefix of Megatron's older names."""
    return given.removeprefix("dist_")


def check(inner: Inner, model_chunks: Sequence[nn.Module]) -> None:
    """Refuse what would be stepped wrongly."""
    configs = [config for chunk in model_chunks if (config := getattr(chunk, "ddp_config", None)) is not None]
    if any(config.use_megatron_fsdp for config in configs):
        raise CanzonaError(
            "Megatron-FSDP cuts matrices into flat shards",
            at=WHERE,
            hint="Megatron's DistributedDataParallel, with use_layer_wise_distributed_optimizer=True for ZeRO-1, or "
            "torch's FSDP2 and canzona_compile.wrap",
        )
    if any(config.use_distributed_optimizer for config in configs) and not inner.layer_wise:
        raise CanzonaError(
            "with use_distributed_optimizer=True of the DistributedDataParallelConfig each rank has a part of the "
            "gradients, which is cut without regard to matrices",
            at=WHERE,
            hint="use_layer_wise_distributed_optimizer=True in the OptimizerConfig, Megatron's ZeRO-1 for matrices",
        )
    if inner.layer_wise and inner.holder is inner.optimizer:
        raise CanzonaError(
            "Megatron's LayerWiseDistributedOptimizer steps main parameters, and in float32 there are none",
            at=WHERE,
            hint="bf16=True in the OptimizerConfig, or use_layer_wise_distributed_optimizer=False",
        )


class Weights:
    """The parameters of a model, and which ranks have what of them.

    Attributes:
        named: name and parameter, by the identity of the parameter, and by that of its main parameter.
        whole: see `whole_leaves`; loaded state has no plan that says this anew.
    """

    def __init__(self, model_chunks: Sequence[nn.Module], groups: Any) -> None:
        self.groups = groups
        self.named: dict[int, tuple[str, Any]] = {}
        self.whole: dict[int, set[str]] = {}
        self._meshes: dict[Any, DeviceMesh] = {}
        tp = self._group("tp")
        for i, chunk in enumerate(model_chunks):
            size = getattr(getattr(chunk, "config", None), "tensor_model_parallel_size", tp.size())
            if size != tp.size():
                raise CanzonaError(
                    f"the model is made for {size} tensor-parallel ranks, but the group has {tp.size()}",
                    at=WHERE,
                    hint="pass the pg_collection= that the model was made with",
                )
            for name, param in canonical_params(chunk).items():
                own = f"chunk{i}.{name}" if len(model_chunks) > 1 else name
                self.named[id(param)] = self.named[id(getattr(param, "main_param", param))] = own, param

    def ranks_of(self, param: Tensor) -> tuple[Any, Any]:
        """The process groups that hold the fragments of a weight, and copies of it."""
        expert = is_expert(param)
        fragments = "expt_tp" if expert or getattr(param, "expert_tp", False) else "tp"
        return self._group(fragments), self._group("expt_dp" if expert else "dp_cp")

    def _group(self, name: str) -> Any:
        if (found := getattr(self.groups, name, None)) is None:
            raise CanzonaError(
                f"the process groups lack {name}",
                at=f"{WHERE}, pg_collection=",
                hint="ProcessGroupCollection.use_mpu_process_groups() has all of parallel_state",
            )
        return found

    def options_of(self, inner: Inner, given: Mapping[str, Any]) -> tuple[list[tuple[str, ...]], dict[str, Any]]:
        """The names of the parameters of an optimizer, by group, and the options that it is wrapped with."""
        names: list[tuple[str, ...]] = []
        layout: dict[str, Any] = {}
        split: dict[str, Split] = {}
        copies: dict[Any, str] = {}  # a weight of each group
        for number, group in enumerate(inner.optimizer.param_groups):
            unknown = next((p for p in group["params"] if id(p) not in self.named), None)
            if unknown is not None:
                raise CanzonaError(
                    f"a parameter of group {number}, of shape {list(unknown.shape)}, is in none of the model chunks",
                    at=WHERE,
                    hint="pass all model chunks that the optimizer was made of",
                )
            own = [self.named[id(param)] for param in group["params"]]
            names.append(tuple(name for name, _ in own))
            for name, param in own:
                ranks, replicas = self.ranks_of(param)
                copies[replicas] = name
                layout[name] = self._sharding(param, ranks)
                if (parts := fused(param, ranks.size())) is not None:
                    split[name] = parts
        several = {} if inner.sharded or all(group.size() == 1 for group in copies) else copies
        if len(several) > 1:
            raise CanzonaError(
                f"one optimizer steps {' and '.join(several.values())}, which different ranks hold copies of",
                at=WHERE,
                hint="other sizes of expert and data parallelism"
                if inner.layer_wise
                else "Megatron's ZeRO-1 for matrices, use_layer_wise_distributed_optimizer=True in the OptimizerConfig",
            )
        replicate = {"replicate": next(iter(several))} if several else {}
        return names, {"layout": layout, "split": split, **replicate, **given}

    def _sharding(self, param: Any, ranks: Any) -> Any:
        """How a weight is sharded, for `layout=`; None if it is whole."""
        if getattr(param, "is_gtp_weight_remat", False):
            raise CanzonaError(
                "Megatron cuts weights over its gtp_remat groups, too, and this was never tried",
                at=self.named[id(param)][0],
                hint="a gtp_remat size of 1",
            )
        if ranks.size() == 1 or not getattr(param, "tensor_model_parallel", False):
            return None
        if ranks not in self._meshes:
            self._meshes[ranks] = DeviceMesh.from_group(ranks, param.device.type, mesh_dim_names=("tp",))
        return self._meshes[ranks], [Shard(param.partition_dim)]


def fused(param: Any, ranks: int) -> Split | None:
    """The matrices in a fused weight of which some ranks have fragments; None if it is one matrix."""
    rows = param.shape[0] * ranks
    if getattr(param, "is_qkv", False):
        sizes = param.qkv_split_shapes
        blocks = rows // sum(sizes)
        parts = ("q", "k", "v") if len(sizes) == 3 else ("q", "gate", "k", "v")
        return Split({part: blocks * size for part, size in zip(parts, sizes, strict=True)}, interleaved=blocks)
    if getattr(param, "partition_stride", 1) == 2:
        return Split({"gate": rows // 2, "up": rows // 2}, interleaved=ranks)
    return None


# -- checkpoints ---------------------------------------------------------------------------------------


def make_state(optimizer: Any, _config: Any = None) -> None:
    """Create the state of all parameters, as Megatron needs it before it loads: by a step that changes none of them.

    All ranks that share matrices do this together.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if optimizer.state or not params:
        return
    before = [(param, param.grad) for param in params], [group["lr"] for group in optimizer.param_groups]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    try:
        optimizer.step()
    finally:
        for param, grad in before[0]:
            param.grad = grad
        for group, lr in zip(optimizer.param_groups, before[1], strict=True):
            group["lr"] = lr


def sharded_state_dict(holder: Any, known: Weights, model: Any, is_loading: bool = False, **more: Any) -> Any:
    """Describe the state for Megatron's dist_checkpointing. This takes the place of the method of `holder`.

    Megatron's own takes each leaf for a fragment like the parameter's. Others, such as the factors of SOAP, are whole
    on each rank; they are saved once, and load on any number of tensor-parallel ranks.
    """
    optimizer, apart = holder.optimizer, {}
    if is_loading:
        make_state(optimizer)
    like = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    known.whole |= whole_leaves(optimizer)
    if optimizer.state and not known.whole.keys() >= {id(param) for param in like.values()}:
        raise CanzonaError(
            "this state was loaded otherwise than by dist_checkpointing, and nothing says yet what of it is whole",
            at=f"{WHERE}, sharded_state_dict",
            hint="save after a step",
        )

    def is_fragment(leaf: str, value: Any, param: Tensor) -> bool:
        shaped = isinstance(value, Tensor) and value.shape == param.shape
        return shaped and known.whole[id(param)].isdisjoint({leaf, leaf[: leaf.find(".") + 1]})

    def fragments() -> Any:
        """The state without what is no fragment."""
        found = type(optimizer).state_dict(optimizer)
        for i, state in found["state"].items():
            own = {leaf for leaf, value in state.items() if is_fragment(leaf, value, like[i])}
            apart[i] = {leaf: value for leaf, value in state.items() if leaf not in own}
            found["state"][i] = {leaf: value for leaf, value in state.items() if leaf in own}
        return found

    optimizer.state_dict = fragments
    try:
        made = type(holder).sharded_state_dict(holder, model, False, **more)
    finally:
        del optimizer.state_dict
    main = getattr(holder, "float16_groups", None)
    params = holder.get_parameters() if main is None else [p for group in main for p in group]
    weights = get_param_id_to_sharded_param_map(model, iter(params))
    states = made.get("optimizer", made)["state"]
    for i, leaves in apart.items():
        name, param = known.named[id(like[i])]
        groups = known.ranks_of(param)
        for leaf, value in leaves.items():
            inside = [] if isinstance(value, Tensor) else pytree.tree_leaves(value)
            if groups[0].size() > 1 and any(isinstance(x, Tensor) and x.shape == like[i].shape for x in inside):
                raise CanzonaError(
                    f"the state has fragments in {leaf!r}, a {type(value).__name__}, which dist_checkpointing takes "
                    "for one object of all ranks",
                    at=name,
                    hint="an optimizer whose state holds tensors by name",
                )
            states[i][leaf] = whole_leaf(leaf, value, weights[i], groups)
    return made


def whole_leaves(optimizer: Any) -> dict[int, set[str]]:
    """Names of leaves of the state that are not laid out like their parameter, by its identity; none before a plan.

    Parts of a fused parameter have leaves named after them ("q.left"), of which the set has the beginning, "q.".
    """
    driver = optimizer.canzona.session.driver
    found: dict[int, set[str]] = {}
    for bound in () if driver is None else driver.plan.bound.values():
        own = found.setdefault(id(bound.origin), set())
        if bound.division is None:
            own |= {leaf.name for leaf in bound.leaves if leaf.shape != bound.task.shape}
        else:
            own.add(bound.task.name.rpartition("[")[2].rstrip("]") + ".")
    return found


def whole_leaf(leaf: str, value: Any, weight: Any, groups: tuple[Any, Any]) -> ShardedObject:
    """Describe a leaf of the state that is whole on each rank.

    Args:
        weight: Megatron's description of the weight, which may be one of several layers under one key.
        groups: the ranks with fragments of the weight, and those with copies.
    """
    one: Any = next(nested_values(weight.build())) if isinstance(weight, ShardedTensorFactory) else weight
    stacked, (tp, dp) = one.prepend_axis_num, groups
    return ShardedObject(
        f"optimizer.state.{leaf}.{weight.key}",
        value,
        one.global_shape[:stacked] or (1,),
        one.global_offset[:stacked] or (0,),
        (0, tp.rank(), dp.rank()),
    )


def of_muon(config: Any) -> dict[str, Any]:
    """Make the arguments of `Muon`."""
    for name, (given, default) in changed(config, "muon_").items():
        if name not in READ_BY_MUON:
            check_field(name, given, OUR_MUON.get(name, default))
    return {
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "ns_steps": config.muon_num_ns_steps,
        "adjust_lr_fn": "match_rms_adamw",
    }


def of_soap(config: Any) -> dict[str, Any]:
    """Make the arguments of `SOAP`: its own defaults."""
    if ignored := changed(config, "soap_"):
        raise CanzonaError(
            f"canzona_soap does not read {', '.join(ignored)}",
            at=f"{WHERE}, OptimizerConfig",
            hint='optimizer="soap", the class of emerging-optimizers, or `register` SOAP by another name',
        )
    return {}


def changed(config: Any, prefix: str) -> dict[str, tuple[Any, Any]]:
    """The fields of a config with this prefix that somebody has changed: their values, and what these were."""
    known = {field.name: field.default for field in fields(config) if field.name.startswith(prefix)}
    return {name: (given, was) for name, was in known.items() if (given := getattr(config, name)) != was}


def check_field(name: str, given: Any, done: Any) -> None:
    """Refuse a field that asks for what our Muon does not do."""
    if given != done:
        raise CanzonaError(
            f"{name} is {given!r}, and canzona_muon steps as with {done!r}",
            at=f"{WHERE}, OptimizerConfig",
            hint="muon_coefficient_type='simple' and muon_extra_scale_factor=0.2 (with Megatron-LM "
            "--muon-coefficient-type simple --muon-extra-scale-factor 0.2), and no other field that changes its update",
        )


register("canzona_muon", Muon, of_muon)
register("canzona_soap", SOAP, of_soap)
