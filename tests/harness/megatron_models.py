"""Small GPTs of Megatron-core on CPU ranks, trained by our optimizers beside plain ones on whole matrices.

What a plain optimizer is given is put together by code of this file, from Megatron's attributes.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, emerging_optimizers, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

import canzona_compile
from canzona_compile.compat.optimizer_class import plain_class
from canzona_compile.errors import CanzonaError
from canzona_compile.integrations import megatron, megatron_layout, megatron_lm
from tests.harness.megatron_cpu import install

LENGTH, VOCABULARY, BATCH, MICRO_BATCHES = 16, 64, 2, 2


class LeafV(torch.optim.Optimizer):
    """A matrix optimizer whose state has the name of a part of fused weights."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                if not self.state[p]:
                    self.state[p]["v"] = torch.zeros_like(p)
                v = self.state[p]["v"].mul_(0.9).add_(p.grad)
                p.sub_(v @ (v.T @ v), alpha=group["lr"])


megatron.register("a_leaf_v", LeafV)


@dataclass(frozen=True, slots=True)
class Case:
    """How a model is trained; sizes are numbers of ranks."""

    tp: int = 1
    pp: int = 1
    vp: int | None = None  # model chunks of a rank, where pipelines are interleaved
    ep: int = 1
    expert_tp: int = 1
    experts: int = 0
    bf16: bool = False
    optimizer: str = "canzona_muon"
    layer_wise: bool = False
    zero1: bool = False
    clip: float = 0.0
    tied: bool = False
    sequence: bool = False
    gate: bool = False
    scattered: bool = False  # each rank gets the gradients of what it owns, by our layout
    scale: float = 0.2
    given: tuple[tuple[str, Any], ...] = ()  # other fields of the OptimizerConfig
    megatron_lm: bool = False  # made as `megatron.training` makes it
    tp_mode: str = "blockwise"  # of Megatron's own Muon, as the next
    precision: str = "medium"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 else torch.float32


class Training:
    """A model, its optimizer and its data on this rank."""

    def __init__(self, case: Case, seed: int = 1, make: Callable[..., Any] | None = None) -> None:
        install()
        logging.disable(logging.WARNING)
        end_groups()
        parallel_state.initialize_model_parallel(
            case.tp,
            case.pp,
            case.vp,
            expert_model_parallel_size=case.ep,
            expert_tensor_parallel_size=case.expert_tp if case.experts else None,
        )
        torch.manual_seed(seed)
        self.case, self.config = case, config_of(case)
        self.settings = OptimizerConfig(
            optimizer=case.optimizer,
            lr=1e-2,
            min_lr=1e-3,
            weight_decay=0.1,
            bf16=case.bf16,
            params_dtype=case.dtype,
            clip_grad=case.clip,
            use_layer_wise_distributed_optimizer=case.layer_wise,
            muon_coefficient_type="simple",
            muon_extra_scale_factor=case.scale,
            muon_tp_mode=case.tp_mode,
            muon_fp32_matmul_prec=case.precision,
            **dict(case.given),
        )
        self.chunks = self._chunks()
        make = make or (megatron_lm.training if case.megatron_lm else megatron).get_megatron_optimizer
        self.optimizer = make(self.settings, self.chunks)
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=2e-3,
            max_lr=1e-2,
            min_lr=1e-3,
            lr_warmup_steps=2,
            lr_decay_steps=8,
            lr_decay_style="cosine",
            start_wd=0.1,
            end_wd=0.2,
            wd_incr_steps=8,
            wd_incr_style="linear",
        )
        self.data = torch.Generator().manual_seed(10 + parallel_state.get_data_parallel_rank())

    def _stage(self, number: int | None) -> Any:
        case, place = self.case, {"ignore_virtual": False, "vp_stage": number}
        model: Any = GPTModel(
            self.config,
            get_gpt_layer_local_spec(num_experts=case.experts or None, moe_grouped_gemm=False),
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            share_embeddings_and_output_weights=case.tied,
            vp_stage=number,
        )
        return Float16Module(self.config, model) if case.bf16 else model

    def _chunks(self) -> list[Any]:
        case = self.case
        stages = [self._stage(number) for number in range(case.vp)] if case.vp else [self._stage(None)]
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=case.zero1 or case.scattered
        )
        if case.megatron_lm:
            megatron_lm.enable()
            megatron_lm.training.get_args = lambda: self.settings  # of which Megatron-LM makes its OptimizerConfig
            return megatron_lm.training.wrap_model_chunks_with_ddp(  # type: ignore[no-any-return]
                stages, self.config, settings, use_layer_wise_distributed_optimizer=case.layer_wise
            )
        layouts: list[Any] = [None] * len(stages)
        if case.scattered:
            layouts = list(megatron_layout.param_layouts(self.settings, stages, settings, [0] * len(stages)))
        return [
            DistributedDataParallel(self.config, settings, stage, full_param_layout=layout)
            for stage, layout in zip(stages, layouts, strict=True)
        ]

    @property
    def bare(self) -> dict[str, Any]:
        """The model chunks without what Megatron puts around them, by the names that they have in checkpoints."""
        inside = [chunk.module.module if self.case.bf16 else chunk.module for chunk in self.chunks]
        return {"model": inside[0]} if len(inside) == 1 else {f"model{i}": chunk for i, chunk in enumerate(inside)}

    @property
    def wrapped(self) -> list[Any]:
        """The torch optimizers inside that are ours."""
        found = [inner.optimizer for inner in megatron.inner_optimizers(self.optimizer)]
        return [own for own in found if canzona_compile.is_wrapped(own)]

    def step(self) -> None:
        """Train one batch."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=self.data) for _ in range(MICRO_BATCHES)]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in self.chunks] if self.case.vp else iter(batches),
            model=self.chunks,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        done, _, _ = self.optimizer.step()
        assert done
        self.schedule.step(1)

    def state(self, is_loading: bool = False) -> dict[str, Any]:
        """What a checkpoint holds."""
        made = {name: chunk.sharded_state_dict() for name, chunk in self.bare.items()}
        model = made if self.case.vp else made["model"]
        return made | {"optimizer": self.optimizer.sharded_state_dict(model, is_loading=is_loading)}

    def save(self, folder: Path) -> None:
        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(self.state(), str(folder))

    def load(self, folder: Path) -> None:
        found = dist_checkpointing.load(self.state(is_loading=True), str(folder))
        for name, chunk in self.bare.items():
            chunk.load_state_dict(found[name])
        self.optimizer.load_state_dict(found["optimizer"])


def end_groups() -> None:
    """Megatron forgets its groups without ending them, and threads of each poll until its end."""
    parallel_state.destroy_model_parallel()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def config_of(case: Case) -> TransformerConfig:
    """A model of two layers, or one for each model chunk, with grouped queries and fused qkv and gate and up."""
    return TransformerConfig(
        num_layers=case.pp * case.vp if case.vp else 2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        use_cpu_initialization=True,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.expert_tp,
        sequence_parallel=case.sequence,
        attention_output_gate=case.gate,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        add_bias_linear=False,
        bf16=case.bf16,
        params_dtype=case.dtype,
        pipeline_dtype=case.dtype,
        batch_p2p_comm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=case.experts or None,
        moe_ffn_hidden_size=24 if case.experts else None,
        moe_token_dispatcher_type="allgather",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )


def forward(batches: Any, model: Any) -> Any:
    """What Megatron's schedules call for a micro-batch."""
    tokens = next(batches)
    places = torch.arange(LENGTH).expand(BATCH, LENGTH)
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]

    def loss(output: Tensor) -> Any:
        mean = output.float().mean()
        return mean, {"loss": mean.detach()}

    return model(tokens, places, hidden, labels=tokens), loss


class Beside:
    """A plain optimizer of whole matrices beside one of Megatron's."""

    def __init__(self, training: Training, own: Any) -> None:
        self.own, self.groups = own, ProcessGroupCollection.use_mpu_process_groups()
        self.different: list[str] = []
        self.compared = 0
        names = {}
        for name, param in (named for chunk in training.chunks for named in chunk.named_parameters()):
            names[id(param)] = names[id(getattr(param, "main_param", param))] = name, param
        self.weights = [(p, *names[id(p)]) for group in own.param_groups for p in group["params"]]
        self.whole = {
            id(p): [self.parameter(whole, like) for whole in self.matrices(p.data, like)] for p, _, like in self.weights
        }
        groups = [
            {"params": [m for p in group["params"] for m in self.whole[id(p)]], "weight_decay": group["weight_decay"]}
            for group in own.param_groups
        ]
        name = training.case.optimizer
        name = megatron_lm.OUR_NAMES.get(name, name) if training.case.megatron_lm else name
        make = emerging_optimizers._EMERGING_OPTIMIZERS[name].config_to_kwargs or partial(
            emerging_optimizers._default_adam_based_eopt_config_to_kwargs, name
        )
        arguments = make(training.settings, training.chunks, self.groups)
        self.plain = plain_class(own)(groups, **arguments) if self.weights else None
        own.register_step_pre_hook(self.before)
        own.register_step_post_hook(self.after)

    def matrices(self, fragment: Tensor, like: Any) -> list[Tensor]:
        """The whole matrices of which a tensor like this parameter has fragments."""
        expert = not getattr(like, "allreduce", True)
        ranks = self.groups.expt_tp if expert else self.groups.tp
        parts = [fragment.detach().contiguous().clone()]
        if ranks.size() > 1 and getattr(like, "tensor_model_parallel", False):
            parts = [torch.empty_like(parts[0]) for _ in range(ranks.size())]
            dist.all_gather(parts, fragment.detach().contiguous(), group=ranks)
        if getattr(like, "is_qkv", False):
            rows = torch.cat(parts).unflatten(0, (-1, sum(like.qkv_split_shapes)))
            return [part.flatten(0, 1) for part in rows.split(list(like.qkv_split_shapes), dim=1)]
        if getattr(like, "partition_stride", 1) == 2:
            return [torch.cat(half) for half in zip(*(part.chunk(2) for part in parts), strict=True)]
        return [torch.cat(parts, like.partition_dim) if len(parts) > 1 else parts[0]]

    def parameter(self, whole: Tensor, _like: Any) -> nn.Parameter:
        """What the plain optimizer is given of a whole matrix."""
        return nn.Parameter(whole)

    def before(self, *_: Any) -> None:
        for group, own in zip(self.plain.param_groups if self.plain else (), self.own.param_groups, strict=False):
            group.update(lr=own["lr"], weight_decay=own["weight_decay"])  # which Megatron schedules
        for param, _, like in self.weights:
            for matrix, grad in zip(self.whole[id(param)], self.matrices(param.grad, like), strict=True):
                matrix.grad = grad
        if self.plain is not None:
            self.plain.step()

    def after(self, *_: Any) -> None:
        for param, name, like in self.weights:
            for i, (matrix, own) in enumerate(zip(self.whole[id(param)], self.matrices(param.data, like), strict=True)):
                self.compared += 1
                if not torch.equal(matrix.data, own):
                    self.different.append(f"{name} part {i}: {float((matrix.data - own).abs().max()):.2g}")


# -- on ranks ------------------------------------------------------------------------------------------


def trained(case: Case, steps: int = 3) -> tuple[int, list[str]]:
    """How many matrices are compared, and those that differ."""
    training = Training(case)
    beside = [Beside(training, own) for own in training.wrapped]
    for _ in range(steps):
        training.step()
    return sum(one.compared for one in beside), [text for one in beside for text in one.different]


def weights_of(training: Training) -> list[Tensor]:
    return [param.detach().clone() for chunk in training.chunks for param in chunk.parameters()]


def resumed(case: Case, folder: Path) -> bool:
    """Whether a training that is loaded goes on as the one that saved it."""
    first = Training(case)
    for _ in range(2):
        first.step()
    first.save(folder)
    data = first.data.get_state()
    first.step()
    expected = weights_of(first)
    second = Training(case, seed=2)
    second.load(folder)
    second.data.set_state(data)
    second.step()
    return all(torch.equal(a, b) for a, b in zip(expected, weights_of(second), strict=True))


def whole_state(training: Training) -> dict[str, Any]:
    """The whole state of every weight, by name and leaf."""
    found: dict[str, Any] = {}
    for own in training.wrapped:
        beside = Beside(training, own)
        states = own.state_dict()["state"]
        for i, (param, name, like) in enumerate(beside.weights):
            for leaf, value in states[i].items():
                shaped = isinstance(value, Tensor) and value.shape == param.shape and "." not in leaf
                found[f"{name}.{leaf}"] = beside.matrices(value, like) if shaped else [value]
    return found


def saved(case: Case, folder: Path, again: Path) -> dict[str, Any]:
    """Train, save, load, save what is loaded, and return the state."""
    training = Training(case)
    for _ in range(2):
        training.step()
    training.save(folder)
    state = whole_state(training)
    copied = Training(case, seed=2)
    copied.load(folder)
    copied.save(again)
    return state


def loaded(case: Case, folder: Path) -> dict[str, Any]:
    """The state of another training that has loaded it."""
    training = Training(case, seed=2)
    training.load(folder)
    return whole_state(training)


def refused(case: Case) -> str:
    """What the call raises."""
    try:
        Training(case)
    except CanzonaError as error:
        return str(error)
    return "nothing"


def unwrapped(case: Case) -> str:
    """What the first step raises if Megatron's own function is called with our name."""
    training = Training(case, make=get_megatron_optimizer)
    try:
        training.step()
    except CanzonaError as error:
        return str(error)
    return "nothing"


def wrong_calls() -> list[str]:
    """What is raised for a model that the optimizer was not made of, for groups of other ranks, and without groups."""
    others = Training(Case(tp=2)).chunks
    training = Training(Case(tp=2))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    partial_groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "expt_tp"])
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1)
    alone = ProcessGroupCollection.use_mpu_process_groups()
    told = []
    for chunks, known in ((others, groups), (training.chunks, alone), (training.chunks, partial_groups)):
        for own in training.wrapped:
            canzona_compile.unwrap(own)
        try:
            megatron.wrap_inner(training.optimizer, chunks, known)
        except CanzonaError as error:
            told.append(str(error))
    return told
