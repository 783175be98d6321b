"""Lightning's Trainer: torchrun --nproc-per-node 2 docs/scripts/lightning_trainer.py"""

import os

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import canzona_compile


class Module(lightning.LightningModule):
    """Learns to shift vectors by one place."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(32, 96, bias=False), nn.GELU(), nn.Linear(96, 32, bias=False))

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return canzona_compile.wrap(torch.optim.Muon(self.model.named_parameters(), lr=2e-2))

    def training_step(self, batch: Tensor, step: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(batch), batch.roll(1, dims=1))
        if self.global_rank == 0:
            print(f"step {step}: loss {loss.item():.3f}")
        return loss


ranks = int(os.environ["WORLD_SIZE"])
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1),
    max_steps=10,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
torch.manual_seed(0)
trainer.fit(Module(), DataLoader(torch.randn(16 * ranks * 10, 32), batch_size=16))
if dist.is_initialized():
    dist.destroy_process_group()
