"""What the names of places in objects tell, such as `self.blocks[0].factors['left']`.

`contents` names places so. Here they tell whether a place is there once for all parameters, or once for each.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from canzona_compile.rehearsal.diagnosis import attribute_of
from canzona_compile.replica.snapshot import Contents


def held_in(after: Contents) -> dict[str, list[Any]]:
    """By place in an object of one parameter, what the objects hold there."""
    held: dict[str, list[Any]] = {}
    for place, value in after.items():
        if place.startswith("object "):
            held.setdefault(place.partition(": ")[2], []).append(value)
    return held


def once_for_all(first: Contents, last: Contents, held: dict[str, list[Any]], params: int) -> set[str]:
    """The places in attributes that are there once for all parameters, and not once for each.

    Args:
        first: what the optimizer of all parameters held before its first step.
        last: what it holds later.
        held: the same of each object.
        params: the number of parameters. Of a single one, what a container has for a number or a parameter belongs to
            it, if the container was there before the first step.
    """
    own = {place for place in last if attribute_of(place)}
    if params == 1:
        numbered = re.compile(r"\[(?!')|\['parameter")
        return {p for p in own if not numbered.search(p) or f"self.{attribute_of(p)}" not in first}
    here, there = (Counter(map(without_digits, places)) for places in (own, held))
    return {
        place
        for place in own
        if here[without_digits(place)] == there[without_digits(place)] and not in_a_map_of_parameters(place, last, held)
    }


def in_a_map_of_parameters(place: str, last: Contents, held: dict[str, list[Any]]) -> bool:
    """Tell whether a place lies in a container that has an entry per parameter, whose keys may look the same.

    Args:
        place: the place.
        last: what the optimizer of all parameters holds in the end, with the lengths of containers.
        held: the same of each object.
    """
    while found := re.match(r"(.*)(\[[^\[\]]*\]|\.\w+)$", place):
        place = found[1]
        if place in last and place in held and last[place] not in held[place]:
            return True
    return False


def is_held(place: str, first: Contents, last: Contents) -> bool:
    """Tell whether what holds a place was there before the first step, and is of the same kind in the end."""
    holder = re.sub(r"(\[[^\[\]]*\]|\.\w+)$", "", place)
    kinds = [v[0] if isinstance(v, tuple) else v for v in (found.get(holder) for found in (first, last))]
    return "." not in holder or (kinds[0] is not None and kinds[0] == kinds[1])


def is_option(place: str, first: Contents) -> bool:
    """Tell whether a place lies in an entry of a group that was there before the first step: users have set it."""
    home = re.match(r"param_groups\[\d+\]\['[^']*'\]", place)
    if home is None:
        return False
    return home[0] in first or any(known.startswith((f"{home[0]}.", f"{home[0]}[")) for known in first)


def in_a_list(place: str) -> bool:
    """Tell whether a place is an entry of a list, such as a log."""
    return re.search(r"\[\d+\]$", place) is not None


def without_digits(place: str) -> str:
    """A place that is the same for all entries of a list."""
    return re.sub(r"\d+", "*", place)


def path_of(place: str) -> str:
    """Turn a place that `contents` found in an attribute into a path of `kept`."""
    parts = re.findall(r"\.(\w+)|\['([^']*)'\]|\[([^\]]*)\]", place.removeprefix("self"))
    return "/".join(["self", *("".join(part).replace(".", "_").replace("/", "_") for part in parts)])
