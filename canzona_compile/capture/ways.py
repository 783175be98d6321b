"""The ways to capture a step, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Callable

from canzona_compile.capture.dispatch_oracle import DispatchOracle
from canzona_compile.capture.dynamo_oracle import DynamoOracle
from canzona_compile.capture.oracle import Oracle
from canzona_compile.capture.variant import FormChange, Untraceable

WAYS: tuple[type[Oracle], ...] = (DynamoOracle, DispatchOracle)


def open_oracle(capture: Callable[[type[Oracle]], Oracle], failed: str = "") -> Oracle:
    """Capture a step in the first way that can.

    Args:
        capture: makes an oracle of a class, as `Oracle.__init__` does.
        failed: why Dynamo cannot; empty if that is not known yet.

    Returns:
        The oracle.

    Raises:
        Untraceable: neither can. The message says why each cannot.
        FormChange: the first step that it would capture changes the form of the state.
        UnsupportedOptimizer: as for `Oracle`.
    """
    reasons = [failed] if failed else []
    for way in WAYS[len(reasons) :]:
        try:
            oracle = capture(way)
        except FormChange:
            raise
        except Untraceable as reason:
            reasons.append(str(reason))
            continue
        oracle.why = "; ".join(reasons)
        return oracle
    raise Untraceable("; by dispatch: ".join(dict.fromkeys(reasons)))
