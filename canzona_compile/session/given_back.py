"""What a plan takes over before its first step, and gives back if there is no such step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch.optim import Optimizer

from canzona_compile.compat.torch_private import pytree


@contextlib.contextmanager
def given_back_on_error(optimizer: Optimizer, end: Callable[[BaseException], None]) -> Iterator[None]:
    """If anything ends this context early, give the optimizer the state that it has now, and put back what was lent.

    This needs no other rank, so it works whichever ranks fail. The tensors of the state must not be written inside.
    They stay alive until the end, beside those that owners gather from them.

    Args:
        optimizer: the optimizer, whose state is portable.
        end: is given what ended it; it puts back the gradients that were lent.
    """
    kept = [(param, own, containers_of(own)) for param, own in optimizer.state.items()]
    try:
        yield
    except BaseException as error:
        optimizer.state.clear()
        for param, own, content in kept:
            if isinstance(own, dict):
                own.clear()
                own.update(content)
            optimizer.state[param] = own
        end(error)
        raise


def containers_of(state: Any) -> Any:
    """Copy the dicts, lists and tuples of a state. What lies in them stays the same."""
    return pytree.tree_map(lambda leaf: leaf, state)
