"""Another way to reduce the buckets of ZeRO-1: torchrun --nproc-per-node 2 docs/scripts/a_transport.py"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import canzona_compile
from canzona_compile.data_parallel import reduction
from canzona_compile.data_parallel.collectives import DataParallelGroup, Pending, shards_of, under_way
from canzona_compile.ir.bucket import Bucket


# --8<-- [start:transport]
def reduce_whole(group: DataParallelGroup, bucket: Bucket, filled: Tensor) -> Pending:
    """Sum the whole bucket on every rank and keep this rank's shard: one collective, twice the bytes.

    Args:
        group: the ranks.
        bucket: the bucket.
        filled: its gradients on this rank, [bucket.starts[-1]].
    """
    work = dist.all_reduce(filled, group=group.shard, async_op=True)
    shard = shards_of(bucket, filled)[group.rank]  # a view, [bucket.shard_lengths[group.rank]]
    return Pending(bucket, shard, under_way(True, work))  # True: over gloo


reduction.reduce = reduce_whole  # a transport that stays is a branch of `reduce` in data_parallel/collectives.py
# --8<-- [end:transport]

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
optimizer = canzona_compile.muon_adamw(model, lr=1e-2, zero1=mesh)

torch.manual_seed(dist.get_rank())  # other data on every rank
for step in range(6):
    x = torch.randn(16, 32)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}")
dist.destroy_process_group()
