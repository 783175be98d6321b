"""Hooks by which frameworks make optimizers, called by the frameworks: `make test-recipes` installs them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import canzona_compile
from tests.harness.beside import BesidePlain
from tests.harness.ranks import run

Found = tuple[int, list[str]]
STEPS = 3


def needs(name: str) -> None:
    """Skip a test without this package. Ranks import it, because some of them change what others import."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"the package {name} is not installed")


def tiny() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.Linear(32, 64))


def on_shards() -> Any:
    model = tiny()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def backward(model: nn.Module, step: int) -> None:
    torch.manual_seed(100 * step + (dist.get_rank() if dist.is_initialized() else 0))
    tokens = torch.randint(64, (32,))
    nn.functional.cross_entropy(model(tokens), tokens.roll(1)).backward()


def compared(model: nn.Module, step: Callable[[], Any]) -> Found:
    """Train, and compare with plain optimizers on whole tensors."""
    with BesidePlain() as beside:
        for i in range(STEPS):
            backward(model, i)
            step()
            model.zero_grad()
    return beside.compared, beside.differing


# -- each with the hook of one framework ---------------------------------------------------------------


def verl() -> Found:
    engine = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    importlib.import_module("verl.utils.fsdp_utils").get_device_id = lambda: "cpu"  # it takes a GPU for granted

    class Engine(engine.FSDPEngine):  # type: ignore[name-defined, misc]
        def _build_optimizer(self, module: nn.Module) -> Any:
            return canzona_compile.muon_adamw(module, lr=self.optimizer_config.lr)

    own = Engine.__new__(Engine)
    own.module, own._qat_enabled = on_shards(), False
    own.optimizer_config = SimpleNamespace(lr=1e-2, clip_grad=0.5)
    own.optimizer = own._build_optimizer(own.module)
    return compared(own.module, own.optimizer_step)


def verl_on_megatron() -> Found:
    models = importlib.import_module("tests.harness.megatron_models")
    integration = importlib.import_module("canzona_compile.integrations.megatron")
    framework = importlib.import_module("verl.utils.megatron.optimizer")

    def make(config: Any, chunks: Any) -> Any:
        return integration.wrap_inner(framework.get_megatron_optimizer(chunks, config), chunks)

    training = models.Training(models.Case(tp=2, clip=0.5), make=make)
    (beside,) = [models.Beside(training, own) for own in training.wrapped]
    for _ in range(STEPS):
        training.step()
    return beside.compared, beside.different


def llama_factory() -> Found:
    plugins = importlib.import_module("llamafactory.v1.plugins.trainer_plugins.optimizer")
    trainer = importlib.import_module("llamafactory.v1.core.base_trainer")

    @plugins.OptimizerPlugin("canzona").register()  # type: ignore[untyped-decorator]
    def made(model: nn.Module, config: Any) -> Any:
        return canzona_compile.muon_adamw(model, lr=config.lr)

    config = SimpleNamespace(name="canzona", lr=1e-2)
    own: Any = SimpleNamespace(args=SimpleNamespace(optim_config=config, lr_scheduler_config=None), model=on_shards())
    trainer.BaseTrainer._init_optimizer(own)
    trainer.BaseTrainer._init_lr_scheduler(own)

    def step() -> None:
        own.optimizer.step()
        own.lr_scheduler.step()

    return compared(own.model, step)


def ms_swift() -> Found:
    swift = importlib.import_module("swift.optimizers")
    transformers = importlib.import_module("transformers")

    class OfCanzona(swift.OptimizerCallback):  # type: ignore[name-defined, misc]
        def create_optimizer(self, model: Any = None) -> Any:
            return canzona_compile.muon_adamw(self.trainer.model, lr=self.args.learning_rate)

    swift.optimizers_map["canzona"] = OfCanzona
    args = transformers.TrainingArguments(learning_rate=1e-2, lr_scheduler_type="linear", report_to=[])
    own: Any = SimpleNamespace(args=args, model=on_shards(), lr_scheduler=None, _created_lr_scheduler=False)
    swift.optimizers_map["canzona"](args, own).create_optimizer_and_scheduler(8)

    def step() -> None:
        own.optimizer.step()
        own.scheduler.step()

    return compared(own.model, step)


def axolotl(folder: Path) -> Found:
    base = importlib.import_module("axolotl.integrations.base")
    trainers = importlib.import_module("axolotl.core.trainers.base")
    arguments = importlib.import_module("axolotl.core.training_args")
    llama = importlib.import_module("transformers.models.llama.modeling_llama")

    class Trainer(trainers.AxolotlTrainer):  # type: ignore[name-defined, misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = canzona_compile.muon_adamw(model or self.model, lr=self.args.learning_rate)
            return self.optimizer

    class Plugin(base.BasePlugin):  # type: ignore[name-defined, misc]
        def get_trainer_cls(self, cfg: Any) -> Any:
            return Trainer

    manager = base.PluginManager.get_instance()
    manager.plugins["canzona"] = Plugin()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = llama.LlamaForCausalLM(llama.LlamaConfig(vocab_size=64, **sizes))
    rows = [torch.randint(64, (8,)).tolist() for _ in range(8)]
    data = importlib.import_module("datasets").Dataset.from_dict({"input_ids": rows, "labels": rows})
    args = arguments.AxolotlTrainingArguments(
        output_dir=str(folder), learning_rate=1e-2, max_steps=STEPS, use_cpu=True, report_to=[], save_strategy="no"
    )
    with BesidePlain() as beside:
        manager.get_trainer_cls(None)(model=model, args=args, train_dataset=data).train()
    return beside.compared, beside.differing


TRAINED = {"verl": verl, "llamafactory": llama_factory, "swift": ms_swift}


@pytest.mark.parametrize("name", TRAINED)
def test_shards_are_stepped_as_whole_matrices(name: str) -> None:
    needs(name)
    for number, differing in run(2, TRAINED[name]):
        assert number > 0
        assert differing == []


def test_verl_makes_the_optimizer_of_megatron() -> None:
    needs("verl")
    needs("megatron")
    for number, differing in run(2, verl_on_megatron):
        assert number > 0
        assert differing == []


def test_a_plugin_of_axolotl_has_a_trainer_with_ours(tmp_path: Path) -> None:
    needs("axolotl")
    ((number, differing),) = run(1, axolotl, tmp_path)
    assert number > 0
    assert differing == []


def replica_group(lighthouse: str) -> Found:
    """A replica group of one rank, whose gradients torchft averages with those of the others."""
    torchft = importlib.import_module("torchft")
    model = tiny()
    own = canzona_compile.muon_adamw(model, lr=1e-2)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
        load_state_dict=lambda state: own.load_state_dict(state),
        state_dict=own.state_dict,
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"group{dist.get_rank()}",
    )
    optimizer = torchft.Optimizer(manager, own)
    with BesidePlain() as beside, contextlib.closing(SimpleNamespace(close=manager.shutdown)):
        for i in range(STEPS):
            optimizer.zero_grad()
            backward(model, i)
            for param in model.parameters():
                manager.allreduce(param.grad).wait()
            optimizer.step()
        assert manager.current_step() == STEPS
    return beside.compared, [*beside.differing, *(str(float(p.detach().sum())) for p in model.parameters())]


def test_replica_groups_of_torchft_step_alike() -> None:
    needs("torchft")
    coordination = importlib.import_module("torchft.coordination")
    lighthouse = coordination.LighthouseServer(bind="[::]:0", min_replicas=2)
    try:
        one, other = run(2, replica_group, lighthouse.address())
    finally:
        lighthouse.shutdown()
    assert one == other
    assert one[0] > 0
