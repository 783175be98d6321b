"""What differs between two plans, by their JSON: decisions, and figures where both have a forecast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from canzona_compile.analysis.flops import readable_bytes
from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import MAKE_ANEW, PlannedTask, read_plan
from canzona_compile.report.charts import duration, plural
from canzona_compile.report.terminal import columns

MOST = 20  # matrices that are listed
FIGURES = ("seconds", "imbalance", "wire_bytes", "buffers", "hardware")


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Both plans side by side.

    Returns:
        "same": do they decide the same? "parts": which digests differ. "only_before", "only_after": names. "changed":
        by name, the fields that differ as [before, after]. "figures": the same for the forecast's figures.

    Raises:
        CanzonaError: one of them is no plan.
    """
    a, b = read_plan(before), read_plan(after)
    own, other = {t.name: t for t in a.tasks}, {t.name: t for t in b.tasks}
    home = [{name: i for i, group in enumerate(plan.groups) for name in group} for plan in (a, b)]
    changed = {}
    for name in own.keys() & other.keys():
        fields = changes(own[name], other[name])
        if home[0].get(name) != home[1].get(name):
            fields["group"] = [home[0].get(name), home[1].get(name)]
        if fields:
            changed[name] = fields
    return {
        "schema": 1,
        "same": a.fingerprint == b.fingerprint,
        "fingerprints": [a.fingerprint, b.fingerprint],
        "parts": [name for name, digest in a.digests if dict(b.digests).get(name) != digest],
        "only_before": sorted(own.keys() - other.keys()),
        "only_after": sorted(other.keys() - own.keys()),
        "changed": dict(sorted(changed.items())),
        "figures": figures(before.get("forecast"), after.get("forecast")),
    }


def changes(a: PlannedTask, b: PlannedTask) -> dict[str, list[Any]]:
    names = ("shape", "layout", "strategy", "owner", "reason")
    return {n: [getattr(a, n), getattr(b, n)] for n in names if getattr(a, n) != getattr(b, n)}


def figures(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, list[Any]]:
    """Predicted figures; empty where a plan, as a run writes it, has no forecast."""
    if before is None or after is None:
        return {}
    a, b = headline(before, "the first plan"), headline(after, "the second plan")
    return {name: [a.get(name), b.get(name)] for name in [*FIGURES, *sorted((a.keys() | b.keys()) - set(FIGURES))]}


def headline(forecast: Mapping[str, Any], at: str) -> dict[str, Any]:
    """FIGURES of a forecast, and its options."""
    try:
        simulation = forecast["simulation"]
        found = (
            simulation["seconds"],
            forecast["imbalance"],
            sum(count for *_, count in simulation["sent"]),
            forecast["memory"]["buffers"],
            forecast["hardware"]["name"],
        )
        return dict(zip(FIGURES, found, strict=True)) | dict(forecast["options"])
    except (LookupError, TypeError, ValueError) as error:
        said = f"its forecast is wrong: {type(error).__name__}: {error}"
        raise CanzonaError(said, at=at, hint=MAKE_ANEW) from error


def difference_table(found: Mapping[str, Any]) -> RenderableType:
    """For people."""
    parts: list[RenderableType] = []
    short = [text[:12] for text in found["fingerprints"]]
    if found["same"]:
        parts.append(Text(f"the same plan, {short[0]}", "green"))
    else:
        parts.append(
            Text(f"{short[0]} and {short[1]} differ in {' and '.join(found['parts']) or 'their text'}", "bold")
        )
    shown = columns("", ">before", ">after")
    for name, (a, b) in found["figures"].items():
        if a != b:
            shown.add_row(Text(name), Text(value(name, a)), Text(value(name, b)))
    if shown.row_count:
        parts.append(shown)
    for key, words in (("only_before", "only in the first"), ("only_after", "only in the second")):
        if names := found[key]:
            parts.append(Text(f"{len(names)} {words}: {', '.join(names[:MOST])}{' ...' if len(names) > MOST else ''}"))
    decided = {name: {k: v for k, v in own.items() if k != "reason"} for name, own in found["changed"].items()}
    if changed := {name: own for name, own in decided.items() if own}:
        listed = columns("matrix", "what", ">before", ">after")
        for name, fields in list(changed.items())[:MOST]:
            for field, (a, b) in fields.items():
                listed.add_row(Text(name), field, Text(str(a)), Text(str(b)))
        parts.append(listed)
        if len(changed) > MOST:
            parts.append(Text(f"and {len(changed) - MOST} more", "dim"))
    elif decided:
        name, (a, b) = next((name, own["reason"]) for name, own in found["changed"].items())
        count = plural(len(decided), "matrix", "matrices")
        parts.append(Text(f"{count} decided alike for another reason: {name} {a}, then {b}"))
    return Group(*parts)


def value(name: str, number: Any) -> str:
    if number is None:
        return "-"
    if name == "seconds":
        return duration(number)
    if name in ("wire_bytes", "buffers"):
        return readable_bytes(number)
    return f"{number:.3g}" if isinstance(number, float) else str(number)
