"""Wrapped chains: their optimizers are wrapped, and `chain.canzona` shows them as one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from canzona_compile.api.chain import Chain, loss_of
from canzona_compile.api.handle import Canzona
from canzona_compile.api.wrapped_class import rebind_scheduled_step
from canzona_compile.compat.torch_private import outside_dynamo
from canzona_compile.replica.raised import freed_on_error


class CanzonaChain(Chain):
    """The class of a chain whose optimizers are wrapped; see `Canzona.ready` for what it does more."""

    _canzona_plain_class = Chain
    canzona: Canzona

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all optimizers in order, see `Chain.step`."""
        loss = loss_of(closure)
        with freed_on_error(), self.canzona.ready():
            self.step_all()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of all optimizers between two steps, see `Chain.state_dict`."""
        with self.canzona.session.turns.lock:
            return super().state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the optimizers of a copy or a pickle."""
        super().__setstate__(state)
        attach_chain(self)


# Optimizer.__init__ does this to a class on first use. A train step that is compiled as a whole breaks here.
hooked: Any = outside_dynamo(Optimizer.profile_hook_step(CanzonaChain.step))
hooked.hooked = True
CanzonaChain.step = hooked  # type: ignore[method-assign]


def parts_of(optimizers: Sequence[Optimizer]) -> tuple[Canzona, ...]:
    """What wrapped optimizers have as `.canzona`."""
    return tuple(own.canzona for own in optimizers)  # type: ignore[attr-defined]


def handle_of(optimizers: Sequence[Optimizer], known: Any = None) -> Canzona:
    """Make the handle of optimizers that are wrapped. The known one stays if it is theirs as they are wrapped now."""
    parts = parts_of(optimizers)
    if isinstance(known, Canzona) and [*map(id, known.parts)] == [*map(id, parts)]:
        return known
    return parts[0].together(parts)


def attach_chain(chain: Chain) -> None:
    """Give a chain whose optimizers are wrapped its class and its handle."""
    chain.__class__ = CanzonaChain
    chain.canzona = handle_of(chain.optimizers, vars(chain).get("canzona"))  # type: ignore[attr-defined]
    for part in parts_of(chain.optimizers):
        part.chain = weakref.ref(chain)
    rebind_scheduled_step(chain)


def detach_chain(chain: Chain) -> None:
    """Give a chain whose optimizers are no longer wrapped its old class."""
    chain.__class__ = Chain
    del chain.canzona  # type: ignore[attr-defined]
    rebind_scheduled_step(chain)
