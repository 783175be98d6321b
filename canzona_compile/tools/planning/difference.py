"""What differs between two plans: decisions, and predicted figures where both have a forecast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from canzona_compile.errors import CanzonaError
from canzona_compile.ir.plan_file import MAKE_ANEW, PlannedTask, read_plan
from canzona_compile.report.page import Block, PageModel, PageTable, note
from canzona_compile.report.units import format_bytes, format_seconds, plural

MOST = 20  # how many matrices the table lists
FIELDS = {"group": "micro-group", "owner": "owner (replica, shard)"}  # what people call the fields of a task
FIGURES = ("seconds", "imbalance", "wire_bytes", "buffers", "hardware")


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two plans.

    Args:
        before, after: plans as JSON objects, as a run or `canzona_compile.plan` writes them.

    Returns:
        "same": whether their decisions are the same. "parts": the digests that differ. "only_before", "only_after": the
        matrices that only one of them has. "changed": the fields as [before, after] of each matrix that the plans
        treat differently. "figures": the forecasts' figures as [before, after].

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
    """Find the fields in which two plans of the same matrix differ."""
    names = ("shape", "layout", "strategy", "owner", "replica", "reason")
    return {n: [getattr(a, n), getattr(b, n)] for n in names if getattr(a, n) != getattr(b, n)}


def figures(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, list[Any]]:
    """Pair the predicted figures. A plan that a run wrote has no forecast; then there are none."""
    if before is None or after is None:
        return {}
    a, b = headline(before, "the first plan"), headline(after, "the second plan")
    return {name: [a.get(name), b.get(name)] for name in [*FIGURES, *sorted((a.keys() | b.keys()) - set(FIGURES))]}


def headline(forecast: Mapping[str, Any], at: str) -> dict[str, Any]:
    """Take FIGURES and the options out of a forecast."""
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
        said = f"its forecast cannot be read: {type(error).__name__}: {error}"
        raise CanzonaError(said, at=at, hint=MAKE_ANEW) from error


def difference_page(found: Mapping[str, Any]) -> PageModel:
    """Build a page of what `difference` found: figures, matrices of one plan only, and decisions that differ."""
    return PageModel(tuple(difference_parts(found)))


def difference_parts(found: Mapping[str, Any]) -> Iterator[Block]:
    first, second = (text[:12] for text in found["fingerprints"])
    if found["same"]:
        yield note(f"the same plan, {first}", "green")
    else:
        yield note(f"{first} and {second} differ in {' and '.join(found['parts']) or 'their text'}", "bold")
    differing = [(name, pair) for name, pair in found["figures"].items() if pair[0] != pair[1]]
    if predicted := tuple((name, *(figure_text(name, own) for own in pair)) for name, pair in differing):
        yield PageTable(("", "before:>", "after:>"), predicted, "Figures")
    for key, words in (("only_before", "only in the first"), ("only_after", "only in the second")):
        if names := found[key]:
            yield note(f"{len(names)} {words}: {', '.join(names[:MOST])}{' ...' if len(names) > MOST else ''}")
    decided = {name: {k: v for k, v in fields.items() if k != "reason"} for name, fields in found["changed"].items()}
    if changed := {name: fields for name, fields in decided.items() if fields}:
        listed = [
            (name, FIELDS.get(field, field), str(a), str(b))
            for name, fields in list(changed.items())[:MOST]
            for field, (a, b) in fields.items()
        ]
        yield PageTable(("matrix", "decision", "before:>", "after:>"), tuple(listed), "Decisions")
        if len(changed) > MOST:
            yield note(f"and {len(changed) - MOST} more", "dim")
    elif decided:
        name, (a, b) = next((name, fields["reason"]) for name, fields in found["changed"].items())
        count = plural(len(decided), "matrix", "matrices")
        yield note(f"{count} decided in the same way for another reason: {name} {a}, then {b}")


def figure_text(name: str, value: Any) -> str:
    """Write a figure of a forecast in its unit."""
    if value is None:
        return "-"
    if name == "seconds":
        return format_seconds(value)
    if name in ("wire_bytes", "buffers"):
        return format_bytes(value)
    return f"{value:.3g}" if isinstance(value, float) else str(value)
