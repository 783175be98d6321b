"""The grammar of traps: what an optimizer reads and writes, where and when, in pieces of Python that make its source.

    attributes("attribute-float", begin="self.factor = 1.0", scale="self.factor", edit="optimizer.factor = 2.0")

is an optimizer whose step reads a number on the optimizer, and a user who writes it before the third step. Most of what
tempts a wrapper is a matter of source: Dynamo traces it, globals and closures are found in it. So each trap is a module
of its own, with a file name under which its source is found. Traps of more pieces have them in a text, see `pieces_of`.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType
from typing import Any

from tests.harness.traps import kit
from tests.harness.traps.trap import Expected, Params, Trap

EQUAL: Expected = "equal"
REFUSED: Expected = "refused"
EITHER: Expected = "either"
Said = Callable[[str], None]  # takes more pieces of a trap, see `pieces_of`


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """What an optimizer is made of, in Python. Without any it adds a matrix product times the learning rate.

    Pieces of the step see `self`, `param`, `grad`, `group` and `state`; also `place`, the number of a parameter in its
    group, and `number`, that of the group. Names that a module does not assign come from `kit`. `Made` is the class.

    Attributes:
        outside: what the module holds; run anew for every optimizer.
        base: the base class. One that is not PerParameter steps by itself.
        groups: what the constructor hands on as parameters.
        hypers: hyperparameters, as keyword arguments.
        begin: the rest of the constructor.
        body: attributes and methods of the class. One that is called `step` or `update` stands for all that follows.
        whole: the body of `step`, in place of all that follows.
        step: what comes before all groups.
        group: what comes before the parameters of each group.
        always: whether parameters without a gradient count as well.
        param: what comes before the update of a parameter.
        only_if: a condition of the update.
        update: the update, before it is multiplied; nothing if other pieces do all. Without this piece it is the
            variable `update` if `param` assigns that, and a matrix product if not.
        rate: the learning rate.
        scale: a number that the learning rate is multiplied by.
        times: the same; it may be a tensor.
        then: what comes after the update of a parameter.
        end: what comes after all groups.
    """

    outside: str = ""
    base: str = "PerParameter"
    groups: str = "params"
    hypers: str = ""
    begin: str = ""
    body: str = ""
    whole: str = ""
    step: str = ""
    group: str = ""
    always: bool = False
    param: str = ""
    only_if: str = ""
    update: str | None = None
    rate: str = 'group["lr"]'
    scale: str = ""
    times: str = ""
    then: str = ""
    end: str = ""

    @property
    def text(self) -> str:
        """What is done to a parameter."""
        update, scale = self.update, f" * ({self.scale})" if self.scale else ""
        if update is None:
            update = "update" if "update" in names(nested("def f():", self.param), ast.Store) else "cube(grad)"
        if not update:
            return lines(self.param, self.then)
        if self.times:
            text = f"param.sub_(({update}) * ({self.rate} * ({self.times})))"
        else:
            text = f"param.add_(({update}), alpha=-{self.rate}{scale})"
        return lines(self.param, nested(f"if {self.only_if}:", text) if self.only_if else text, self.then)


# How a gradient becomes an update, for traps that come in several forms.
ELEMENTWISE = {"update": "grad * 1.0"}
AVERAGE = {
    "param": 'average = state.setdefault("average", torch.zeros_like(param))\naverage.lerp_(grad, 0.1)',
    "update": "average",
}
# Nobody can trace it.
ON_HOST = {"param": "update = cube(grad)\nif update.norm().item() > 2:\n    update = update / update.norm()"}
IN_COLUMNS = "value.t().contiguous().t() if place == 1 else value"  # a start


# -- source ----------------------------------------------------------------------------------------


def lines(*pieces: str) -> str:
    """Statements one after another, without what is empty."""
    return "\n".join(dedent(piece).strip("\n") for piece in pieces if piece.strip())


def nested(head: str, *pieces: str) -> str:
    """A compound statement."""
    return f"{head}\n{indent(lines(*pieces) or 'pass', '    ')}"


def names(text: str, context: type[ast.expr_context] | None = None) -> set[str]:
    """The names of variables, functions and classes in a text, or those that are loaded or stored."""
    found = set()
    for node in ast.walk(ast.parse(lines(text))):
        if isinstance(node, ast.Name) and (context is None or isinstance(node.ctx, context)):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef) and context is not ast.Load:
            found.add(node.name)
    return found


def function(head: str, text: str, outside: str = "") -> str:
    """A function with statements for its body, which may write what the module holds."""
    shared = names(outside, ast.Store) & names(nested("def f():", text), ast.Store)
    return nested(f"def {head}:", f"global {', '.join(sorted(shared))}" if shared else "", text)


def returned(text: str) -> str:
    """The statement that returns an expression; statements are left as they are."""
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return text
    return f"return {text}"


def class_of(name: str, pieces: Pieces) -> str:
    """The source of an optimizer's class."""
    members = [f'"""{name}"""', pieces.body]
    if pieces.begin or pieces.hypers or pieces.groups != "params":
        made = f"super().__init__({pieces.groups}{', ' if pieces.hypers else ''}{pieces.hypers})"
        members.append(function("__init__(self, params)", lines(made, pieces.begin), pieces.outside))
    if pieces.base.endswith("PerParameter") and not {"step", "update"} & names(pieces.body, ast.Store):
        members.append(step_of(pieces))
    return nested(f"class {class_name(name)}({pieces.base}):", *members)


def step_of(pieces: Pieces) -> str:
    """The method that steps: one for each parameter, unless something comes before, after or between them."""
    text, named = pieces.text, names(nested("def f():", pieces.group, pieces.text))
    if not (pieces.whole or pieces.step or pieces.group or pieces.end or pieces.always or {"place", "number"} & named):
        return function("update(self, param, grad, group, state)", text, pieces.outside)
    text = lines("state = self.state[param]" if "state" in named else "", text)
    counted = 'place, param in enumerate(group["params"])' if "place" in named else 'param in group["params"]'
    each = nested(
        f"for {counted}:", "grad = param.grad", text if pieces.always else nested("if grad is not None:", text)
    )
    counted = "number, group in enumerate(self.param_groups)" if "number" in named else "group in self.param_groups"
    whole = pieces.whole or lines(pieces.step, nested(f"for {counted}:", pieces.group, each), pieces.end)
    return lines("@torch.no_grad()", function("step(self, closure=None)", whole, pieces.outside))


def class_name(name: str) -> str:
    """count-in-list -> CountInList"""
    return "".join(word.capitalize() for word in name.split("-"))


ARGUMENTS = {
    "edit": "optimizer, params, step",
    "prepare": "params",
    "grads": "grad, place, step",
    "call": "optimizer, feed, step",
    "seen": "optimizer",
    "start": "value, place",
    "given": "params",
    "after": "optimizer, params",
}


class Source:
    """A module made of pieces: an optimizer's class, and what its user does.

    Args:
        name: of the trap.
        pieces: of the optimizer, unless its class is written elsewhere.
        users: by name in `ARGUMENTS`, an expression or statements. `given` is what the class is called with, `after`
            what is done to a new optimizer, and the others are attributes of `Trap`.
    """

    def __init__(self, name: str, pieces: Pieces | None, users: Mapping[str, str]) -> None:
        self.name, self.outside = name, lines(pieces.outside) if pieces else ""
        functions = [function(f"{key}({ARGUMENTS[key]})", returned(text), self.outside) for key, text in users.items()]
        self.text = "\n\n".join([self.outside, class_of(name, pieces) if pieces else "", *functions])
        self.file = str(Path(__file__).with_name("made") / f"{name}.py")

    @cached_property
    def module(self) -> dict[str, Any]:
        """What the module holds. It has of the kit what it names, as what lies outside is searched by name."""
        module = ModuleType(f"{__package__}.made.{self.name.replace('-', '_')}")
        found = vars(module)
        found |= {name: vars(kit)[name] for name in names(self.text) & vars(kit).keys()}
        module.__file__ = self.file
        sys.modules[module.__name__] = module
        linecache.cache[self.file] = len(self.text), None, self.text.splitlines(keepends=True), self.file
        exec(compile(self.text, self.file, "exec", dont_inherit=True), found)
        if "Made" in names(self.text):
            found["Made"] = found[class_name(self.name)]
        return found

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the module."""
        return self.module[name](*args)

    def make(self, params: Params) -> Any:
        """Make an optimizer, once all that lies outside is as it was."""
        found = self.module
        exec(compile(self.outside, self.file, "exec", dont_inherit=True), found)
        optimizer = found[class_name(self.name)](found["given"](params) if "given" in found else params)
        if "after" in found:
            found["after"](optimizer, params)
        return optimizer


def optimizer(name: str, **pieces: Any) -> Callable[[Params], Any]:
    """A function that makes an optimizer of these pieces, see `Pieces`."""
    return Source(name, Pieces(**pieces), {}).make


def toy(name: str, **pieces: Any) -> Callable[[str], type[Any]]:
    """A function from the body of an update, or nothing, to the class of an optimizer made of it, and of pieces."""

    def made(body: str = "") -> type[Any]:
        update = {"param": body, "update": ""} if body else {}
        source = Source(name, Pieces(**{**update, **pieces}), {})
        assert source.file not in linecache.cache, f"another toy is called {name}"
        kind: type[Any] = source.module[class_name(name)]
        return kind

    return made


# -- traps -----------------------------------------------------------------------------------------


def pieces_of(text: str) -> dict[str, Any]:
    """Pieces by name: each begins with its name and a colon, and goes on in the lines below that are indented.

    `edit` may have the number of a step, and be there several times.
    """
    found: dict[str, Any] = {}
    edits: dict[int, str] = {}
    for block in re.split(r"\n(?=\w)", lines(text)):
        head, _, piece = block.partition(":")
        name, _, at = head.partition(" ")
        if name == "edit":
            edits[int(at or 2)] = lines(piece)
        else:
            found[name] = lines(piece)
    return found | ({"edit": edits} if edits else {})


def trap(
    name: str,
    family: str,
    expected: Expected,
    *,
    says: str | tuple[str, ...] = (),
    make: Callable[[Params], Any] | None = None,
    edit: str | Mapping[int, str] = "",
    every: str = "",
    **pieces: Any,
) -> Trap:
    """A trap.

    Args:
        says: one or more texts of `Trap.says`.
        make: makes the optimizer, if it is not made of pieces.
        edit: what the user does before the third step, or before others.
        every: what the user does before every step.
        pieces: see `Pieces`, `ARGUMENTS` and, for what is no text, `Trap`.
    """
    edits = [nested(f"if step == {at}:", text) for at, text in ({2: edit} if isinstance(edit, str) else edit).items()]
    users = {key: pieces.pop(key) for key in ARGUMENTS if key in pieces}
    if edit or every:
        users["edit"] = lines(*(edits if edit else ()), every)
    if "prepare" in users:
        users["prepare"] = nested("for place, param in enumerate(params):", users["prepare"])
    plain = {key: pieces.pop(key) for key in Trap.__dataclass_fields__ if key in pieces}
    source = Source(name, None if make else Pieces(**pieces), users)
    made = {key: partial(source.call, key) for key in users.keys() & Trap.__dataclass_fields__.keys()}
    words = (says,) if isinstance(says, str) else says
    return Trap(name, family, make or source.make, expected, words, **made, **plain)


class Family:
    """Traps of one family. A call adds one; a call of what that returns, at once, gives it more pieces as a text.

    Args:
        expected: what is right for a trap that does not say it.
    """

    def __init__(self, name: str, expected: Expected) -> None:
        self.name, self.expected, self.traps = name, expected, list[Trap]()

    def __call__(self, name: str, expected: Expected | None = None, **pieces: Any) -> Said:
        """Add a trap, see `trap`."""
        add = partial(trap, name, self.name, expected or self.expected)
        self.traps.append(add(**pieces))

        def said(text: str) -> None:
            self.traps[-1] = add(**{**pieces, **pieces_of(text)})

        return said
