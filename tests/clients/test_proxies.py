"""Objects that frameworks put around an optimizer: they step a wrapped one, and `wrap` finds that inside of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch.optim import Muon

import canzona_compile
from canzona_compile import CanzonaError, UnsupportedOptimizer
from tests.harness.frameworks import Proxy
from tests.harness.pairs import Pair, feed, params_of, same_bits


def test_the_optimizer_inside_of_a_proxy_is_wrapped() -> None:
    pair = Pair()
    inner: Any = pair.wrapped
    canzona_compile.unwrap(inner)
    proxy: Any = Proxy(inner)
    kind = type(proxy)
    with pytest.raises(UnsupportedOptimizer, match="if it is a wrapper around another optimizer, wrap that one"):
        canzona_compile.wrap(proxy)
    canzona_compile.wrap(inner)
    assert type(proxy) is kind
    pair.wrapped = proxy
    pair.steps(2)
    assert pair.report.fallbacks == {}


def test_a_proxy_of_a_wrapped_optimizer() -> None:
    """It is a way to ask the optimizer inside for its report, but not to unwrap it: the proxy would be lost."""
    pair = Pair()
    inner, proxy = pair.wrapped, Proxy(pair.wrapped)
    pair.wrapped = proxy
    pair.steps(2)
    assert isinstance(proxy, Muon)
    assert canzona_compile.is_wrapped(proxy)
    assert canzona_compile.wrap(proxy) is proxy  # type: ignore[type-var]
    assert pair.report.fallbacks == {}
    kind = type(proxy)
    with pytest.raises(CanzonaError, match="is a wrapper around the wrapped optimizer"):
        canzona_compile.unwrap(proxy)  # type: ignore[type-var]
    assert type(proxy) is kind
    pair.steps(2)
    canzona_compile.unwrap(inner)
    assert type(inner) is Muon
    pair.wrapped = inner
    pair.steps(2)


def test_a_copy_of_a_proxy_steps_alone() -> None:
    pair = Pair()
    pair.steps(2)
    before = [p.detach().clone() for p in params_of(pair.wrapped)]
    copied: Any = copy.deepcopy(Proxy(pair.wrapped))
    assert canzona_compile.is_wrapped(copied)
    feed(copied, 2)
    copied.step()
    assert all(map(same_bits, before, params_of(pair.wrapped)))
    pair.step()
    assert all(map(same_bits, params_of(copied), params_of(pair.wrapped)))
