"""What objects hold."""

from __future__ import annotations

import torch

from canzona_compile.replica.snapshot import Snapshot


def test_views_that_autograd_does_not_follow() -> None:
    """A view from within `no_grad` whose base was written outside: autograd raises if it is asked for its history."""
    base = torch.nn.Parameter(torch.ones(2, 3)).clone()
    with torch.no_grad():
        view = base[0]
    base.mul_(2.0)
    walk = Snapshot()
    walk.add("self.view", view)
    assert [*walk.found] == ["self.view"]
