"""Backward passes that are not one gradient per parameter in the order of registration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import canzona_compile
from canzona_compile.errors import CanzonaError
from tests.data_parallel.models import MAKERS, WIDTH, Model, batch, different
from tests.harness.marks import full, only
from tests.harness.model_pairs import ModelPair, under_zero1, zero1
from tests.harness.model_pairs import train as train_model
from tests.harness.pairs import left_after
from tests.harness.plain_shards import Rated
from tests.harness.ranks import run


class Tied(Model):
    """The head is the embedding: one parameter in two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Twice(Model):
    """Each block runs twice, so its parameters are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*self.blocks, *self.blocks)


class Frozen(Model):
    """Some parameters take no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)
        self.blocks[0].up.weight.requires_grad_(False)


class ReadEarly(Model):
    """Its forward pass reads parameters of modules that it calls later; nothing saves them for the backward pass."""

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of some tokens."""
        tokens = tokens % self.embed.num_embeddings
        x = F.embedding(tokens, self.head.weight)
        biases: Any = sum(block.get_parameter("up.bias").sum() for block in self.blocks)
        x = self.blocks(x + self.embed(tokens))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(-1, 1).flatten()) * (1 + biases)


class Attention(Model):
    """`MultiheadAttention` reads the weights of its output layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss of some tokens."""
        x = self.embed(tokens % self.embed.num_embeddings)
        x = self.blocks(x + self.attention(x, x, x)[0])
        return F.cross_entropy(self.head(x).float().flatten(0, 1), tokens.roll(-1, 1).flatten())


class Checkpointed(nn.Module):
    """A block that forgets what it computed in forward."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return found


def checkpointed(reentrant: bool) -> Model:
    model = Model()
    model.blocks = nn.Sequential(*(Checkpointed(block, reentrant) for block in model.blocks))
    return model


def compiled() -> Any:
    return torch.compile(Model(), backend="aot_eager")


def compiled_head() -> ReadEarly:
    model = ReadEarly()
    model.head = torch.compile(model.head, backend="aot_eager")  # type: ignore[assignment]
    return model


LATER = "read early, compiled under zero1"
VARIATIONS: dict[str, Callable[[], Any]] = {
    "plain": Model,
    "tied": Tied,
    "read early": ReadEarly,
    "attention": Attention,
    "twice": Twice,
    "frozen": Frozen,
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "compiled": compiled,
    "compiled head that is read early": compiled_head,
    LATER: ReadEarly,
}


def pair_of(variation: str = "plain", gather: str = "step") -> ModelPair:
    """A model under zero1, and its copy with plain optimizers."""
    model = VARIATIONS[variation]()
    plain = VARIATIONS[variation]() if variation.startswith("compiled") else None
    pair = under_zero1(model, MAKERS["muon and adamw"], plain=plain, bucket_bytes=20_000, gather=gather)
    if variation == LATER:
        pair.model = torch.compile(model, backend="aot_eager")
    return pair


def train(variation: str, gather: str) -> list[str]:
    """Train both ways on this rank; what differs."""
    pair = pair_of(variation, gather)
    pair.train(*range(3))
    return pair.different()


def scaled() -> list[str]:
    """Give a parameter an attribute, change it, and take it away."""
    model = nn.Linear(8, 8)
    pair = under_zero1(model, lambda m: [Rated(m.parameters())], lambda m, step, _: sum_of_squares(m, 1.0 + step))
    for step in range(4):
        for own in (pair.model, pair.plain):
            if step == 3:
                del own.weight.lr_mul
            elif step:
                own.weight.lr_mul = 1.0 + step
        pair.train(step)
    return pair.different()


def sum_of_squares(model: nn.Module, value: float) -> Tensor:
    found: Tensor = model(torch.full((2, 8), value)).square().sum()
    return found


def adapted() -> str:
    """Take a step of adapters in reentrant checkpoints, all else frozen and one adapter unused, and clip by torch."""
    model = nn.Sequential(*(Checkpointed(nn.Linear(8, 8), reentrant=True) for _ in range(3)))
    model.unused = nn.Linear(8, 8)
    found = zero1(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_bytes=300)
    for depth in (1, 2):  # checkpoints in checkpoints
        x: Any = torch.full((2, 8), 1.0 + dist.get_rank(), requires_grad=True)
        x = model[:3](x) if depth == 1 else checkpoint(model[:3], x, use_reentrant=True)
        x.square().sum().backward()
        kinds = {type(p.grad).__name__ for p in model[:3].parameters()}
        if kinds != {"ReducedGradient"}:
            return f"depth {depth}: {kinds}"
        found.step()
        found.zero_grad()
    try:
        model[:3](torch.ones(2, 8, requires_grad=True)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    except CanzonaError as error:
        return str(error)
    return "no error"


def loaded_in_mid_forward() -> list[str]:
    """Load a checkpoint after a forward pass that ended early, while parameters of the last step are on their way."""
    pair = pair_of(gather="forward")
    pair.train(0)
    before = copy.deepcopy(pair.model.state_dict())
    pair.train(1)
    pair.model.embed(batch(2, dist.get_rank()))
    pair.model.load_state_dict(before)
    pair.handle.synchronize()
    return [name for name, value in pair.model.state_dict().items() if not torch.equal(value, before[name])]


def unwrapped() -> list[str]:
    """Train under zero1, unwrap, and train on under DDP: the model is as if zero1 had never seen it."""
    pair = pair_of()
    pair.train(0, 1)
    for optimizer in pair.optimizers:
        canzona_compile.unwrap(optimizer)
    model, pair.model = pair.model, DistributedDataParallel(pair.model)
    pair.train(2, 3)
    return different(model, pair.plain)


def freed(gather: str) -> list[str]:
    """What is alive of a model and its optimizers under zero1 once nobody holds them, before a search for garbage."""
    models = list[nn.Module]()

    def make() -> Any:
        models.append(Model())
        own = canzona_compile.chain(*MAKERS["muon and adamw"](models[0]))
        return zero1(models[0], own, bucket_bytes=20_000, gather=gather)

    def use(optimizer: Any) -> None:
        train_model(models[0], [optimizer], 3)
        optimizer.canzona.measure(1)
        assert optimizer.state_dict()["state"]
        models.clear()

    left_after(make, use)  # what torch loads at its first use
    return left_after(make, use)


@pytest.mark.parametrize(
    ("variation", "gather"),
    only([("tied", "forward"), ("read early", "forward")], list(VARIATIONS), ["step", "forward"]),
)
def test_unusual_backward_passes(variation: str, gather: str) -> None:
    assert run(2, train, variation, gather) == [[], []]


def test_an_attribute_of_a_parameter_that_comes_and_goes() -> None:
    assert run(2, scaled) == [[], []]


def test_backward_ends_where_all_gradients_arrive_in_checkpoints() -> None:
    for text in run(2, adapted):
        assert "its norm would differ" in text


def test_a_load_in_mid_forward_is_not_overwritten() -> None:
    assert run(2, loaded_in_mid_forward) == [[], []]


@pytest.mark.parametrize("gather", ["step", full("forward")])
def test_nothing_is_left_of_a_model_that_nobody_holds(gather: str) -> None:
    assert run(2, freed, gather) == [[], []]


@pytest.mark.full
def test_an_unwrapped_model_is_ddp_s_again() -> None:
    assert run(2, unwrapped) == [[], []]
