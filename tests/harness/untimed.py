"""Hypothesis without clocks and dice: a slow machine fails no test, and every run tries the same examples."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def untimed(examples: int = 100) -> settings:
    slow = [HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=slow)
