"""What processor this is. Figures without it say little: processors differ in speed, and in how products round."""

from __future__ import annotations

import platform
import re
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def this_processor() -> str:
    """The name of the processor: "AMD EPYC, family 25 model 17"."""
    text = CPUINFO.read_text(encoding="utf-8") if CPUINFO.exists() else ""
    return name_in(text) or platform.processor() or platform.machine()


def name_in(cpuinfo: str) -> str:
    """The name in the text of /proc/cpuinfo, with numbers, as many have the same name; empty if none is there."""
    said = {key: value.strip() for key, value in re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo, re.MULTILINE)}
    numbers = [f"{word} {said[key]}" for word, key in (("family", "cpu family"), ("model", "model")) if key in said]
    return ", ".join(part for part in (said.get("model name", ""), " ".join(numbers)) if part)
