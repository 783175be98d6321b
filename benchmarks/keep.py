"""Run a command and keep what it prints, and where it ran, as a result that others can check.

    python benchmarks/keep.py steps-epyc python benchmarks/step_latency.py --ranks 4

writes benchmarks/results/steps-epyc/about.txt and output.txt. benchmarks/results/README.md says what they contain.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from acceptance.machine import ROOT, facts

RESULTS = ROOT / "benchmarks" / "results"


def main(name: str, *command: str) -> int:
    """Run the command in the folder of the repository; its exit code. Folders of this machine are kept by name only."""
    folder, began = RESULTS / name, time.time()
    folder.mkdir(parents=True, exist_ok=True)
    folders = sorted({str(ROOT), sys.prefix, *os.environ.get("PYTHONPATH", "").split(os.pathsep)} - {""}, reverse=True)
    line = [sys.executable if word == "python" else word for word in command]
    with (folder / "output.txt").open("w", encoding="utf-8") as output:
        running = subprocess.Popen(
            line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert running.stdout is not None
        for said in running.stdout:
            print(said, end="", flush=True)
            for own in folders:
                said = said.replace(own, Path(own).name)
            output.write(said)
        code = running.wait()
    about = {
        "command": shlex.join(command),
        "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(began)),
        "seconds": f"{time.time() - began:.0f}",
        "exit code": str(code),
        **facts("cuda" if torch.cuda.is_available() else "cpu"),
    }
    lines = [f"{key}: {value}\n" for key, value in about.items() if value]
    (folder / "about.txt").write_text("".join(lines), encoding="utf-8")
    return code


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
