"""A layout that no DTensor has, planned like any other: python docs/scripts/a_layout.py"""

import torch

from canzona_compile.capture.templates import Capture
from canzona_compile.ir.layout import Box, Grid, Layout
from canzona_compile.ir.options import Options
from canzona_compile.ir.pipeline import run
from canzona_compile.ir.step import Form, Step, Task
from canzona_compile.machine.hardware import Machine
from canzona_compile.passes import lowering_passes, planning_passes
from canzona_compile.replica.parameter_spec import ParameterSpec, ParamExample
from canzona_compile.report.build import Facts, make_report


# --8<-- [start:layout]
def corners(shape: tuple[int, int], ranks: tuple[int, int, int]) -> Layout:
    """The upper half of a matrix on one rank, and each quarter of the lower half on another."""
    (rows, columns), (m, n) = shape, (shape[0] // 2, shape[1] // 2)
    upper = Box(start=(0, 0), size=(m, columns))
    left = Box(start=(m, 0), size=(rows - m, n))
    right = Box(start=(m, n), size=(rows - m, columns - n))
    return Layout(shape, Grid((ranks,)), (upper, left, right), "corners")  # one replica of three shards


# --8<-- [end:layout]
# --8<-- [start:plan]
muon = torch.optim.Muon([torch.nn.Parameter(torch.zeros(64, 48))])
spec = ParameterSpec((64, 48), torch.float32, torch.float32, torch.device("cpu"))
template = Capture(muon).kind_of(ParamExample(muon.param_groups[0], spec, "weight")).template
task = Task("weight", 0, 0, template.name, corners((64, 48), ranks=(0, 1, 2)))
captured = Step(Form.CAPTURED, "Muon", Machine("cpu", "gloo", 1), (template,), (task,))
options = Options(strategy="owner")
owned, _ = run(captured, planning_passes(options))
scheduled, _ = run(owned, lowering_passes(options))
print(make_report(scheduled, Facts(world_size=3)))
# --8<-- [end:plan]
