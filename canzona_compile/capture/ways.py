"""The ways to capture a step, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from canzona_compile.capture.dispatch_oracle import DispatchOracle
from canzona_compile.capture.dynamo_oracle import DynamoOracle
from canzona_compile.capture.oracle import Oracle
from canzona_compile.capture.variant import FormChange, ParameterSpec, Untraceable

WAYS: tuple[type[Oracle], ...] = (DynamoOracle, DispatchOracle)


def open_oracle(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    spec: ParameterSpec,
    count: int = 1,
    bake: set[str] | None = None,
    state: Mapping[str, Any] | None = None,
    failed: str = "",
) -> Oracle:
    """Capture a step in the first way that can.

    Args:
        optimizer, group, spec, count, bake, state: as for `Oracle`.
        failed: why Dynamo cannot; empty if that is not known yet.

    Returns:
        The oracle.

    Raises:
        Untraceable: neither can. The message says why each cannot.
        FormChange: the first step that it would capture changes the form of the state.
        UnsupportedOptimizer: as for `Oracle`.
    """
    if not failed:
        try:
            return DynamoOracle(optimizer, group, spec, count, bake, state)
        except FormChange:
            raise
        except Untraceable as reason:
            failed = str(reason)
    try:
        oracle = DispatchOracle(optimizer, group, spec, count, bake, state)
    except FormChange:
        raise
    except Untraceable as reason:
        raise Untraceable(failed if str(reason) == failed else f"{failed}; by dispatch: {reason}") from reason
    oracle.why = failed
    return oracle
