"""What zero1 communicates and holds in backward, step and forward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.data_parallel.fused import BUCKETS, SPLITS, FusedModel, inputs, named, tensor_parallel
from tests.data_parallel.models import Model, batch, hidden
from tests.data_parallel.runs import set_up
from tests.harness.layouts import full, mesh_of
from tests.harness.marks import first, only
from tests.harness.model_pairs import train, update, zero1
from tests.harness.ranks import collectives, run


class Traffic(TorchDispatchMode):
    """While active, records (operator, bytes sent by this rank) of every collective in `calls`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append((func.overloadpacket.__name__, sent(func.overloadpacket.__name__, args)))
        return func(*args, **(kwargs or {}))

    def of(self, *names: str) -> list[int]:
        """The bytes of the calls of some operators."""
        return [count for name, count in self.calls if name in names]


def sent(name: str, args: tuple[Any, ...]) -> int:
    """The bytes that a rank sends: each of its elements once per rank that needs it, sums along a ring."""
    world = dist.get_world_size()
    tensors = [args[1] if name.startswith(("_reduce_scatter", "_allgather", "reduce_scatter", "alltoall")) else args[0]]
    while isinstance(tensors[0], list | tuple):
        tensors = [t for own in tensors for t in own]
    size = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
    if name == "_allgather_base_":
        return size * (world - 1)
    return size * (world - 1) // world


REDUCTIONS = ("alltoall_base_",)  # over gloo, as all ranks of tests
GATHERS = ("broadcast_",)  # one for each owner


def measure(gather: str) -> SimpleNamespace:
    """What a rank counts in a steady iteration, and what its buckets are."""
    model: Any = Model()
    seen: list[int] = []
    late: list[bool] = []
    model.embed.weight.register_post_accumulate_grad_hook(lambda _: seen.append(collectives()))
    model, optimizers, handle = set_up(model, make="muon and adamw", gather=gather)
    model.embed.register_forward_hook(lambda *_: late.append(bool(handle.zero1.gathering.outstanding)))
    train(model, optimizers, 3)
    rank, engine = dist.get_rank(), handle.zero1
    counts = [collectives()]
    traffic = Traffic()
    with traffic:
        loss = model(batch(5, rank))
    counts.append(collectives())
    matrices = {name for name, p in model.named_parameters() if any(p is own for own in hidden(model))}
    reduced: list[int] = []
    unreduced: list[int] = []

    def look(_: Tensor) -> None:
        reduced.append(engine.reduction.held_bytes())
        unreduced.append(sum(bytes_of(p.grad) for p in model.parameters()))

    hooks = [p.register_post_accumulate_grad_hook(look) for p in model.parameters()]
    with traffic:
        loss.backward()
    for hook in hooks:
        hook.remove()
    counts.append(collectives())
    held = sum(part.numel() * part.element_size() for f in engine.fragments.values() for part in f.param.grad.parts)
    with traffic:
        update(optimizers)
    counts.append(collectives())
    state = sum(bytes_of(v) for optimizer in optimizers for s in optimizer.state.values() for v in s.values())
    handle.synchronize()
    whole = sum(bytes_of(v) for o in optimizers for s in o.state_dict()["state"].values() for v in s.values())
    return SimpleNamespace(
        buckets=len(engine.buckets),
        # those with parameters of several optimizers
        shared=sum(bool(own & matrices) and not own <= matrices for own in map(set, engine.gathering.filling.names)),
        elements=sum(b.elements for b in engine.buckets),
        padding=sum(b.padding for b in engine.buckets),
        started=seen[-1] - counts[1],  # collectives, when the last gradient was complete
        backward=counts[2] - counts[1],  # collectives of each phase
        step=counts[3] - counts[2],
        forward=counts[1] - counts[0],
        reduced=sum(traffic.of(*REDUCTIONS)),  # bytes sent
        gathered=sum(traffic.of(*GATHERS)),
        late=late[-1],  # whether buckets were outstanding when the first module ran
        gradients=held,  # bytes that this rank holds after backward
        most_reduced=max(reduced),  # bytes of buckets and shards during backward
        most_unreduced=max(unreduced),  # bytes of gradients that were waiting for their bucket
        largest_bucket=max(4 * b.starts[-1] for b in engine.buckets),
        state=state,  # bytes that this rank holds
        whole_state=whole,
    )


def bytes_of(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) and value.ndim else 0


def scaler_run(bad_rank: int | None, fused: bool = False) -> tuple[list[bool], list[float], float]:
    """Three iterations with a GradScaler; on the second one a rank's gradient overflows.

    Args:
        bad_rank: that rank; None if there is none.
        fused: whether matrices are pieces of weights that tensor parallelism cuts, so that ranks lack rows of some.

    Returns:
        For each iteration whether a parameter changed; the scales; the parameters' sum at the end.
    """
    if fused:
        mesh = mesh_of((dist.get_world_size() // 2, 2), ("dp", "tp"))
        model: Any = FusedModel()
        tensor_parallel(model, mesh["tp"])
        split = {"split": SPLITS["uneven"], "bucket_bytes": BUCKETS}
        optimizers = zero1(model, named("muon", model), mesh=mesh["dp"], **split)
        weight = model.get_parameter("blocks.0.qkv.weight")
        loss = lambda step: model(inputs(step, mesh.get_local_rank("dp")))  # noqa: E731
    else:
        model, optimizers, _ = set_up()
        weight = model.blocks[0].up.weight
        loss = lambda step: model(batch(step, dist.get_rank()))  # noqa: E731
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    moved, scales = [], []
    for step in range(3):
        before, bad = full(weight).clone(), step == 1 and dist.get_rank() == bad_rank
        scaler.scale(loss(step) * (float("inf") if bad else 1.0)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
        moved.append(not torch.equal(before, full(weight)))
        scales.append(scaler.get_scale())
    return moved, scales, float(sum(full(p).double().sum() for p in model.parameters()))


def keys_of_scaled_steps(steps: int) -> list[int]:
    """How many keys the store has after each iteration in which gradients are scaled by hand."""
    model, optimizers, _ = set_up()
    store: Any = dist.distributed_c10d._get_default_store()
    found = []
    for step in range(steps):
        model(batch(step, dist.get_rank())).backward()
        for param in model.parameters():
            param.grad.mul_(0.5)
        update(optimizers)
        dist.barrier()
        found.append(store.num_keys())
        dist.barrier()
    return found


class Gated(nn.Module):
    """A model of which only a part takes part in each forward pass, decided by step and rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes, self.never = (nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor, gate: bool) -> Tensor:
        x = self.always(x)
        x = self.sometimes(x) if gate else x
        return x.square().mean()


def gated_run(gates: list[list[bool]]) -> list[list[bool]]:
    """Which of the three weights moved in each step; `gates` says by step and rank what takes part."""
    model: Any = Gated()
    model, optimizers, _ = set_up(model, make="adamw")
    moved = []
    for step, own in enumerate(gates):
        before = [p.detach().clone() for p in model.parameters()]
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, 16), own[dist.get_rank()]).backward()
        update(optimizers)
        moved.append([not torch.equal(a, b.detach()) for a, b in zip(before, model.parameters(), strict=True)])
    return moved


FP32 = 4
OPTIMIZERS = 2


@pytest.mark.parametrize("gather", first(["step", "forward"]))
def test_a_step_has_no_collective_of_its_own(gather: str) -> None:
    owners = 2
    for found in run(owners, measure, gather):
        assert found.buckets > 2
        assert found.shared
        # The announcement on the host, a reduction per bucket, and one exchange of who has gradients.
        assert found.backward == 1 + found.buckets + 1
        # Each optimizer announces its step. Of a bucket with parameters of both, each gathers its own, so that they are
        # whole when its step returns. An owner that has none of them sends nothing.
        most = owners * (found.buckets + found.shared if gather == "step" else 0)
        assert most - found.shared <= found.step - OPTIMIZERS <= most
        assert found.forward == owners * (found.buckets if gather == "forward" else 0)
        assert 1 <= found.started - 1 < found.buckets  # the last gradient was not there yet
        assert found.late == (gather == "forward")
        assert found.reduced == FP32 * (found.elements + found.padding) // 2
        assert FP32 * found.elements // 2 <= found.gathered <= 1.03 * found.reduced  # each parameter once
        assert found.padding <= 0.03 * found.elements


@pytest.mark.full
def test_gradients_and_state_are_held_once() -> None:
    world = 3
    ranks = run(world, measure, "step")
    whole = FP32 * ranks[0].elements
    assert sum(found.gradients for found in ranks) == whole
    assert sum(found.state for found in ranks) == ranks[0].whole_state
    for found in ranks:
        assert found.state <= 1.25 * found.whole_state / world
        # Shards that have arrived, one bucket, what all ranks sent for this rank's shard of it, and the memory of a
        # second bucket, which gathers keep.
        assert 0 < found.most_reduced <= 1.03 * whole / world + 3 * found.largest_bucket
        assert found.most_unreduced <= 2 * found.largest_bucket


@pytest.mark.parametrize(("bad", "fused"), only([(1, False)], [None, 0, 1], [False, True]))
def test_an_infinity_on_one_rank_skips_the_step_on_all(bad: int | None, fused: bool) -> None:
    found = run(4 if fused else 2, scaler_run, bad, fused)
    moved, scales, _ = found[0]
    assert found == found[:1] * len(found)
    assert moved == [True, bad is None, True]
    assert scales[1] == (4.0 if bad is None else 2.0)


def test_parameters_that_no_rank_used_are_left_alone() -> None:
    """A parameter that some rank used is updated, with zeros from the others; one that none used is skipped."""
    gates = [[True, True], [False, True], [False, False], [True, False]]
    one, two = run(2, gated_run, gates)
    assert one == two
    assert one == [[True, any(own), False] for own in gates]


def test_the_store_does_not_grow_with_steps() -> None:
    """Also where gradients are scaled by hand, which ranks tell one another."""
    for first_step, *later in run(2, keys_of_scaled_steps, 4):
        assert later == [first_step] * 3
