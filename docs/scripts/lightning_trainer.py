"""Lightning's Trainer under FSDP2 or DDP: torchrun --nproc-per-node 2 docs/scripts/lightning_trainer.py [--ddp]"""

import argparse
import os
import tempfile
from collections import OrderedDict

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import canzona_compile

parser = argparse.ArgumentParser()
parser.add_argument("--ddp", action="store_true")
parser.add_argument("--output", default=f"{tempfile.gettempdir()}/canzona_lightning")
parser.add_argument("--resume", action="store_true", help="go on from the checkpoint of the first epoch")
options = parser.parse_args()


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)]
        parts = {"embedding": nn.Embedding(64, 32), "hidden": nn.Sequential(*layers), "head": nn.Linear(32, 64)}
        self.model = nn.Sequential(OrderedDict(parts))

    def configure_model(self) -> None:
        for part in () if options.ddp else [*self.model.hidden, self.model]:
            fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return canzona_compile.muon_adamw(self, lr=1e-2, replicate=dist.group.WORLD if options.ddp else None)

    def training_step(self, tokens: Tensor, step: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(tokens), (tokens + 1) % 64)
        self.print(f"step {step}: loss {loss.item():.3f}")
        return loss


ranks = int(os.environ["WORLD_SIZE"])
sharded = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
trainer = lightning.Trainer(
    devices=ranks,
    strategy=DDPStrategy() if options.ddp else sharded,
    max_epochs=2,
    logger=False,
    callbacks=[ModelCheckpoint(options.output, "{epoch}", save_top_k=-1)],
    enable_progress_bar=False,
)
torch.manual_seed(0)
data = DataLoader(torch.randint(64, (16 * ranks * 5,)), batch_size=16)
trainer.fit(Module(), data, ckpt_path=f"{options.output}/epoch=0.ckpt" if options.resume else None)
if dist.is_initialized():
    dist.destroy_process_group()
