"""The Trainer of transformers with a small Llama on random tokens, beside the same run with the plain optimizer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

import canzona_compile
from tests.harness.beside import BesidePlain
from tests.harness.marks import first
from tests.harness.ranks import run
from tests.harness.toys import TwoKinds

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from canzona_compile.integrations.transformers import GatherStateCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),  # of transformers itself
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

STEPS = 6


class Mixed(TwoKinds):
    """A class that takes what the Trainer gives: groups by weight decay; matrices go to Muon."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        given = [p for group in params for p in (group["params"] if isinstance(group, dict) else [group])]
        groups = [(True, [p for p in given if p.ndim == 2]), (False, [p for p in given if p.ndim != 2])]
        super().__init__([{"params": own, "use_muon": muon, "lr": lr} for muon, own in groups])


def model_of() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,  # as many as hidden ones, so that there are few shapes to capture
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def data() -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 32, (12,), generator=random) for _ in range(4 * STEPS)]
    return [{"input_ids": t, "labels": t} for t in tokens]


def trainer_of(folder: Path, steps: int = STEPS, save: str = "steps", **optimizer: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.02,
        lr_scheduler_type="linear",
        save_strategy=save,
        save_steps=3,
        eval_strategy="steps" if save == "best" else "no",
        eval_steps=3,
        metric_for_best_model="loss" if save == "best" else None,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        dataloader_pin_memory=False,
    )
    model = optimizer.pop("model", None) or model_of()
    return transformers.Trainer(model=model, args=arguments, train_dataset=data(), eval_dataset=data(), **optimizer)


def by_class(kind: Any) -> dict[str, Any]:
    return {"optimizer_cls_and_kwargs": (kind, {"lr": 0.02})}


def by_object(wrapped: bool) -> dict[str, Any]:
    model = model_of()
    optimizer: Optimizer = Mixed(list(model.parameters()))
    if wrapped:
        canzona_compile.wrap(optimizer, model=model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return {"model": model, "optimizers": (optimizer, schedule)}


def same_parameters(one: Any, other: Any) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def wrapped_inside(trainer: Any) -> Any:
    """The optimizer within what Accelerate put around it."""
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    assert canzona_compile.is_wrapped(optimizer)
    assert optimizer.canzona.report().tasks
    return optimizer


@pytest.mark.full
def test_by_class(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path / "plain", **by_class(Mixed))
    wrapped = trainer_of(tmp_path / "wrapped", **by_class(canzona_compile.wrap_cls(Mixed)))
    for trainer in (plain, wrapped):
        trainer.train()
    assert same_parameters(plain, wrapped)
    assert not same_parameters(plain, trainer_of(tmp_path / "new", **by_class(Mixed)))
    wrapped_inside(wrapped)


@pytest.mark.full
def test_by_object(tmp_path: Path) -> None:
    plain = trainer_of(tmp_path / "plain", **by_object(False))
    wrapped = trainer_of(tmp_path / "wrapped", **by_object(True))
    for trainer in (plain, wrapped):
        trainer.train()
    assert same_parameters(plain, wrapped)
    names = [task.name for task in wrapped_inside(wrapped).canzona.report().tasks]
    assert "model.layers.0.self_attn.q_proj.weight" in names


@pytest.mark.full
def test_resumed_from_a_checkpoint(tmp_path: Path) -> None:
    """In mid-training, by another Trainer: it goes on as the one that was not stopped."""
    plain = trainer_of(tmp_path / "plain", **by_class(Mixed))
    plain.train()
    kind = canzona_compile.wrap_cls(Mixed)
    trainer_of(tmp_path / "wrapped", **by_class(kind)).train()
    resumed = trainer_of(tmp_path / "wrapped", **by_class(kind))
    resumed.train(resume_from_checkpoint=str(tmp_path / "wrapped" / "checkpoint-3"))
    assert same_parameters(plain, resumed)
    wrapped_inside(resumed)


# -- under DDP, where the Trainer calls `state_dict` on rank 0 alone ---------------------------------


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """Inside this context, ranks have the environment that a launcher gives; Accelerate forgets itself afterwards."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with mock.patch.dict(os.environ, ranks):
        try:
            yield
        finally:
            PartialState._reset_state()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def saved_under_ddp(folder: str, callbacks: list[type[Any]], save: str) -> str:
    """Train and save on this rank; rank 0 compares the checkpoint with what all ranks gather at the end."""
    with as_launched():
        kind = canzona_compile.wrap_cls(Mixed, replicate=dist.group.WORLD, strategy="owner")
        trainer = trainer_of(Path(folder), save=save, callbacks=[made() for made in callbacks], **by_class(kind))
        try:
            trainer.train()
        except canzona_compile.CanzonaError as error:
            return str(error)
        optimizer = wrapped_inside(trainer)
        optimizer.canzona.session._consolidated = None
        expected = optimizer.state_dict()["state"]
        saved = torch.load(Path(folder) / f"checkpoint-{STEPS}" / "optimizer.pt")["state"]
        same = all(torch.equal(saved[i][k], v) for i in expected for k, v in expected[i].items() if torch.is_tensor(v))
        return "equal" if same and saved.keys() == expected.keys() else "different"


@pytest.mark.parametrize("save", first(["steps", "epoch", "best"]))
def test_under_ddp(tmp_path: Path, save: str) -> None:
    imported = partial(trainer_of, tmp_path / "imports")  # transformers, which takes seconds
    outcomes = run(2, saved_under_ddp, str(tmp_path), [GatherStateCallback], save, fresh=True, after=imported)
    assert outcomes == ["equal", "equal"]


# -- under FSDP2 -------------------------------------------------------------------------------------


def train_sharded(folder: str) -> tuple[list[str], int, list[str]]:
    """What differs from the plain optimizer, the number of ranks, and how matrices are computed."""
    import accelerate

    kind = canzona_compile.wrap_cls(Mixed, strategy="owner")
    with as_launched():
        trainer = trainer_of(Path(folder), save="no", **by_class(kind))
        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        state, fsdp = trainer.accelerator.state, accelerate.DistributedType.FSDP
        accelerate.PartialState().distributed_type = fsdp  # where there are only CPUs it would take FSDP for DDP
        state.distributed_type, state.fsdp_plugin, trainer.is_fsdp_enabled = fsdp, plugin, True
        with BesidePlain() as beside:
            trainer.train()
        report = wrapped_inside(trainer).canzona.report()
        wrong = beside.finish()
    return wrong, report.world_size, sorted({task.strategy for task in report.tasks})


@pytest.mark.full
def test_under_fsdp2(tmp_path: Path) -> None:
    assert run(2, train_sharded, str(tmp_path), fresh=True) == [([], 2, ["owner"])] * 2
