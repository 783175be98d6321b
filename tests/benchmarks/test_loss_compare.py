"""Losses of the demo: those that are committed come out again, and one bit of one parameter is found."""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.demo import EXAMPLES, ROOT, train_here
from tests.harness.marks import full
from tests.harness.ranks import run

sys.path.append(str(ROOT / "benchmarks"))
import loss_compare
from demo_runs import Losses, LossRow, read
from loss_compare import LAYOUTS, OPTIMIZERS, first_difference, losses_of, side, text_of

FEW = 2  # steps in `make test`
ELSEWHERE = 0.05  # relative, of the mean loss on another processor: nobody has tried whether it has other bits
SHORT = "--parallel ddp --optimizer adamw --ranks 1 --batch 4 --steps 4 --verify 0"
PLANTED = 3  # step


@pytest.mark.parametrize(
    ("layout", "optimizer", "until"),
    [("one", "soap", FEW), full("zero1-forward", "soap", None)],
)
def test_a_layout_has_the_committed_losses(layout: str, optimizer: str, until: int | None, tmp_path: Path) -> None:
    found = losses_of(ROOT, layout, optimizer, loss_compare.STEPS, until, tmp_path / "log")
    golden = losses_of(None, layout, optimizer, loss_compare.STEPS, until, tmp_path)
    if os.environ.get("GOLDEN") == "accept" and until is None:
        (loss_compare.GOLDEN / f"{layout}-{optimizer}.txt").write_text(text_of(found), encoding="utf-8")
    elif found.machine == golden.machine:
        assert first_difference(found, golden) is None
    elif python_of(found) != python_of(golden):
        pytest.skip(f"the text is the standard library of {python_of(golden)}, this is {python_of(found)}")
    else:
        steps = len(found.rows)
        own, other = (statistics.fmean(float(row.loss) for row in losses.rows[:steps]) for losses in (found, golden))
        assert own == pytest.approx(other, rel=ELSEWHERE)


def python_of(losses: Losses) -> str:
    """The version: "Python 3.11.7"."""
    return losses.machine.split(", ")[1]


def test_all_layouts_and_optimizers_have_committed_losses() -> None:
    names = {f"{layout}-{optimizer}.txt" for layout in LAYOUTS for optimizer in OPTIMIZERS}
    assert {path.name for path in loss_compare.GOLDEN.iterdir()} == names
    for name in names:
        losses = read(loss_compare.GOLDEN / name)
        assert len(losses.rows) == loss_compare.STEPS
        assert float(losses.rows[-1].loss) < 0.8 * float(losses.rows[0].loss)
        assert text_of(losses) == (loss_compare.GOLDEN / name).read_text(encoding="utf-8")


def planted(options: str, meeting_point: str, step: int) -> tuple[bool, str]:
    """Train, and flip a bit of one parameter before a step: of the vector of a byte that no text has."""
    sys.path.insert(0, str(EXAMPLES))
    from lm_model import Decoder

    seen, forward = [0], Decoder.forward

    def flipping(self: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        seen[0] += 1
        if seen[0] == step:
            self.embedding.weight.data[255, :1].view(torch.int32).bitwise_xor_(1)
        loss: Tensor = forward(self, tokens, targets)
        return loss

    Decoder.forward = flipping  # type: ignore[method-assign]
    try:
        return train_here(options, meeting_point)
    finally:
        Decoder.forward = forward  # type: ignore[method-assign]


def test_one_bit_of_one_parameter_is_found(tmp_path: Path) -> None:
    logs = []
    for step in (0, PLANTED):
        logs.append(tmp_path / f"log{len(logs)}")
        options = f"{SHORT} --log {logs[-1]}"
        run(1, planted, options, f"file://{tmp_path}/store{len(logs)}", step, fresh=True, limit=300)
    plain, other = map(read, logs)
    assert f"step {PLANTED} is the first that differs: " in (first_difference(plain, other) or "")


def test_the_first_difference_is_said() -> None:
    one = Losses("", "", (LossRow("2.5", "aa"), LossRow("2.0", "bb")))
    assert first_difference(one, Losses("", "", (LossRow("2.5", "aa"),))) is None
    other = Losses("", "", (LossRow("2.5", "ab"), LossRow("2.1", "bb")))
    assert first_difference(one, other) == "step 1 is the first that differs: parameters, with the same loss 2.5"
    other = Losses("", "", (LossRow("2.5", "aa"), LossRow("2.1", "bc")))
    assert first_difference(one, other) == "step 2 is the first that differs: loss 2.0 and 2.1, by 4.8e-02"


def test_sides() -> None:
    assert side("fsdp") == (str(ROOT), "fsdp")
    assert side("HEAD~1:tp") == ("HEAD~1", "tp")
    assert side("golden") == ("golden", None)
    with pytest.raises(SystemExit, match="there is no layout 'tq'"):
        side("HEAD:tq")
