"""How Dynamo is called: `math.pow` is another function while Dynamo traces, and at no other time."""

from __future__ import annotations

import math
import signal
import threading
from typing import Any

import pytest
import torch
from torch import fx

from canzona_compile.capture import dynamo
from canzona_compile.capture.dynamo import as_recorder, compiled

REAL = math.pow


class Counting:
    """What a step sees of an optimizer."""

    def __init__(self) -> None:
        self.number = 1
        self.value = torch.ones(2)


def correction(number: Any) -> Any:
    """A helper, as published optimizers have it in other modules."""
    return 1.0 - math.pow(0.5, number)


def step(own: Any) -> Any:
    return own.value * correction(own.number)


def test_powers_are_traced_once_for_all_steps() -> None:
    traced = []

    def backend(graph: fx.GraphModule, _examples: Any) -> Any:
        assert math.pow is dynamo.power
        traced.append(graph)
        return graph.forward

    own, run = Counting(), compiled(step, backend)
    found = []
    for number in (3, 4, 5, 6):
        own.number = number
        with as_recorder():
            found.append(float(run(own)[0]))
        assert math.pow is REAL
    assert found == [1.0 - 0.5**n for n in (3, 4, 5, 6)]
    assert len(traced) == 1


def test_math_is_left_alone_where_nothing_is_traced() -> None:
    with as_recorder():
        assert math.pow is REAL


def test_math_is_put_back_when_a_trace_fails() -> None:
    def backend(_graph: fx.GraphModule, _examples: Any) -> Any:
        raise KeyError("no")

    with pytest.raises(Exception, match="no"), as_recorder():
        compiled(step, backend)(Counting())
    assert math.pow is REAL


def test_other_threads_have_the_real_power_while_dynamo_traces() -> None:
    with pytest.raises(ValueError, match=r"math domain error|expected"):
        dynamo.power(-1.0, 0.5)
    assert dynamo.power(2, 3) == 8.0


def test_a_trace_of_another_thread_has_the_real_power() -> None:
    found: list[Any] = []
    x = torch.ones(2)

    def backend(graph: fx.GraphModule, _examples: Any) -> Any:
        found.append(math.pow)
        return graph.forward

    with as_recorder():
        thread = threading.Thread(target=lambda: found.append(torch.compile(lambda y: y + 1, backend=backend)(x)))
        thread.start()
        thread.join()
    assert found[0] is REAL
    assert torch.equal(found[1], x + 1)


def test_interrupts_wait_for_the_end_of_guards() -> None:
    """An exception inside of Dynamo's guards would end the process."""
    went_on = []
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    before = signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        with as_recorder():
            signal.raise_signal(signal.SIGINT)
            went_on.append(True)

    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert went_on
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, found)


def test_interrupts_are_nothing_to_other_threads() -> None:
    found: list[Any] = []

    def other() -> None:
        with as_recorder():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
