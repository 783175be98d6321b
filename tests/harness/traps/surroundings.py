"""Surroundings: globals, closures, class attributes, default arguments, the environment, changed by the user."""

from __future__ import annotations

from typing import Any

from tests.harness.toy_optimizers import PerParameter, cube
from tests.harness.traps.grammar import EITHER, ELEMENTWISE, ON_HOST, Family
from tests.harness.traps.trap import Params

surroundings = Family("surroundings", EITHER)

# Where a factor lies, how the step reads it, and how the user changes it before the third step.
GLOBAL = ("FACTOR = 1.0", "FACTOR", "FACTOR = 2.0")
TABLE = ('TABLE = {"factor": 1.0}', 'TABLE["factor"]', 'TABLE["factor"] = 2.0')
SETTINGS = ("SETTINGS = Settings()", "SETTINGS.factor", "SETTINGS.factor = 2.0")
VARIABLE = 'os.environ["CANZONA_TRAP_FACTOR"]'
ENVIRONMENT = (f'{VARIABLE} = "1.0"', f"float({VARIABLE})", f'{VARIABLE} = "2.0"')
CONTEXT = (
    'CONTEXT = contextvars.ContextVar("trap_factor", default=1.0)\nCONTEXT.set(1.0)',
    "CONTEXT.get()",
    "CONTEXT.set(2.0)",
)
for name, (outside, read, edit), says, form in (
    ("global", GLOBAL, "FACTOR", {}),
    ("global-elementwise", GLOBAL, "FACTOR", ELEMENTWISE),
    ("global-on-host", GLOBAL, "FACTOR", ON_HOST),
    ("global-dict", TABLE, "TABLE", {}),
    ("global-settings", SETTINGS, "SETTINGS", {}),
    ("environment", ENVIRONMENT, "environ", {}),
    ("context-variable", CONTEXT, "CONTEXT", {}),
):
    surroundings(name, EITHER, says=says, outside=outside, **form, scale=read, edit=edit)

surroundings("class-attribute")("""
    says: common
    body: common = 1.0
    scale: self.common
    after: Made.common = 1.0
    edit: Made.common = 2.0
""")
TABLE_OF_DEFAULT = 'Made.factor.__defaults__[0]["value"]'
surroundings("default-argument", after=f"{TABLE_OF_DEFAULT} = 1.0", edit=f"{TABLE_OF_DEFAULT} = 2.0")("""
    says: factor
    body:
        def factor(self, table={"value": 1.0}):
            return table["value"]
    scale: self.factor()
""")
surroundings("global-function", says="helper")("""
    outside:
        def helper(grad):
            return cube(grad)
    update: helper(grad)
    edit: helper = torch.sign
""")
# The precision is lower for one step: on a CPU 'high' rounds as 'highest' does.
surroundings("precision-of-torch")("""
    scale: 1.0 if torch.get_float32_matmul_precision() == "highest" else 0.5
    call:
        torch.set_float32_matmul_precision("high" if step == 2 else "highest")
        try:
            return optimizer.step()
        finally:
            torch.set_float32_matmul_precision("highest")
""")
surroundings("generator-of-its-own")("""
    begin: self.generator = torch.Generator().manual_seed(3)
    times: torch.rand((), generator=self.generator)
""")


def by_closure(params: Params) -> Any:
    """A class that reads a variable of the function that made it."""
    factor = 1.0

    class ByClosure(PerParameter):
        """Reads a cell."""

        def update(self, param: Any, grad: Any, group: Any, state: Any) -> None:
            param.add_(cube(grad), alpha=-group["lr"] * factor)

    def change(value: float) -> None:
        nonlocal factor
        factor = value

    optimizer = ByClosure(params)
    optimizer.change = change  # type: ignore[attr-defined]
    return optimizer


surroundings("closure-variable", says="factor", make=by_closure, edit="optimizer.change(2.0)")
