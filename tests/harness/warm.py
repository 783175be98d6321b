"""Imported by the server that ranks are forked from: what ranks would otherwise each do for themselves.

Dynamo takes seconds to start, and the captures that `share_captures` shares a third of a second each.
"""

from __future__ import annotations

import traceback

import torch

import canzona_compile
from tests.harness.optimizers import RECIPES, Recipe, param_groups, shapes_of, share_captures


def capture(recipe: Recipe, dtype: torch.dtype) -> None:
    params = [torch.nn.Parameter(torch.zeros(s, dtype=dtype)) for s in shapes_of(recipe.groups)]
    optimizer = recipe.make(param_groups(recipe.groups, params))
    canzona_compile.wrap(optimizer)
    share_captures(optimizer)
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()


def warm_up() -> None:
    try:
        for recipe in RECIPES.values():
            for dtype in recipe.dtypes:
                capture(recipe, dtype)
    except Exception:  # the tests will say what is wrong; without a server they could not
        traceback.print_exc()


warm_up()
