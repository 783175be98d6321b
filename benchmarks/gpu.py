"""Everything that has to be measured on a GPU, in one call that is meant to stay under eight minutes.

    python benchmarks/gpu.py                     # results in benchmarks/results/
    python benchmarks/gpu.py --only products     # also kernels, steps, calibration
    python benchmarks/gpu.py --dry               # every line of it on the CPU, tiny: the figures say nothing

Results are checked against 64 bits first. Variants run in turn; beside every figure stand the rates that dense products
and copies reached in the same minute. The baseline is `torch.compile(fullgraph=True, dynamic=False)` in its default
mode; products are replayed from CUDA graphs on all sides. The JSON is written after every record, so that what fails,
or a time limit, costs no figure that was measured before. `hardware-*.json` beside it holds the rates for
`wrap(hardware=...)` and `plan --hardware`. Exit codes: 0; 1 where something failed or is wrong; 2 without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # a GPU machine's own Python need not have it installed

from canzona_compile.tools.calibration.calibrate import calibrate
from canzona_compile.tools.calibration.clock import NO_CUDA, Clock
from canzona_compile.tools.calibration.measure import MeasurementSizes
from gpu_clock import Ceilings, Extent, going_on, plain
from gpu_products import Products
from gpu_steps import Steps, warm

RESULTS = Path(__file__).parent / "results"
PARTS = ("steps", "kernels", "products", "calibration")
TINY = MeasurementSizes((16, 32), (16,), (16, 32), 2**16, 2)
SCHEMA = 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny matrices")
    parser.add_argument("--minutes", type=float, metavar="M", help="begin no record after M minutes")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for results (default: %(default)s)")
    return parser.parse_args(arguments)


def versions(device: torch.device) -> dict[str, Any]:
    try:
        import triton

        compiler = str(triton.__version__)
    except ImportError:
        compiler = ""
    found = {"torch": torch.__version__, "triton": compiler, "cuda": torch.version.cuda or ""}
    if device.type != "cuda":
        return {"device": "cpu", **found}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "processors": properties.multi_processor_count,
        "memory": properties.total_memory,
        "capability": list(torch.cuda.get_device_capability(device)),
        **found,
    }


def measured(given: argparse.Namespace, device: torch.device, path: Path, start: float) -> dict[str, Any]:
    """All parts that were asked for, and what failed or was wrong; written to `path` after every record."""
    extent, problems = Extent(given.dry), list[str]()
    clock = Clock(device, extent.rounds)
    end = start + 60 * (given.minutes or float("inf"))
    result: dict[str, Any] = {"schema": SCHEMA, "dry": given.dry, **versions(device)}
    result |= {"problems": problems, "left out": []}
    warm(device, 5.0)
    result["ceilings"] = plain(Ceilings.measure(clock, extent))
    products, steps = Products(clock, extent, problems), Steps(clock, extent, given.output, problems)
    works: dict[str, Callable[[], list[Callable[[], dict[str, Any]]]]] = {
        "products": products.orthogonalizations,
        "kernels": products.kernels,
        "steps": steps.sets,
    }
    for part in (own for own in PARTS if own in (given.only or PARTS)):
        if part == "calibration":
            if time.monotonic() > end:
                result["left out"].append(part)
                continue
            with going_on(part, problems):
                hardware, _ = calibrate(device=device.type, ranks=1, quick=True, extent=TINY if given.dry else None)
                rates = given.output / f"hardware-{hardware.name}.json"
                rates.write_text(hardware.to_json(), encoding="utf-8")
                result[part] = rates.name
        else:
            result[part] = []
            for number, work in enumerate(works[part]()):
                if time.monotonic() > end:
                    result["left out"].append(f"{part}, number {number}")
                    continue
                with going_on(f"{part}, number {number}", problems):
                    result[part].append(work())
                result["seconds"] = time.monotonic() - start
                write_json(path, result)
                gc.collect()  # optimizers hold one another; memory of recordings goes back only now
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        result["seconds"] = time.monotonic() - start
        write_json(path, result)
    return result


def shown(result: dict[str, Any]) -> Iterator[str]:
    """Times and ratios to what torch.compile, or cuBLAS, made of the same; without rich, which a machine may lack."""
    for part, label in (("products", "case"), ("kernels", "size"), ("steps", "set")):
        if part in result:
            yield f"\n{part:<26}{'variant':<14}{'ms':>10}{'ratio':>8}  {'quartiles':<14}bf16 TFLOP/s, TB/s"
        for record in result.get(part, ()):
            what = f"{record.get('kernel', '')} {record[label]}".strip()
            best = record["ceilings"]
            for name, own in record["variants"].items():
                low, high = own["quartiles"]
                rate = f"{best['bf16']:.0f}, {best['bandwidth']:.2f}"
                times = f"{own['seconds'] * 1e3:>10.3f}{own['ratio']:>8.2f}"
                yield f"{what:<26}{name:<14}{times}  {f'{low:.2f} to {high:.2f}':<14}{rate}"
            yield from (f"    {name}: {why}" for name, why in record.get("notes", {}).items() if why != NO_CUDA)
    yield from (f"wrong: {problem}" for problem in result["problems"])
    if result["left out"]:
        yield f"no time for {len(result['left out'])} records: {', '.join(result['left out'])}"


def write_json(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    start = time.monotonic()
    given = parse(arguments)
    if not given.dry and not torch.cuda.is_available():
        print(
            "benchmarks/gpu.py measures a CUDA device, and torch sees none here; --dry runs it on the CPU.",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu") if given.dry else torch.device("cuda", torch.cuda.current_device())
    given.output.mkdir(parents=True, exist_ok=True)
    name = "dry" if given.dry else torch.cuda.get_device_name(device).lower().replace(" ", "-")
    path = given.output / f"gpu-{name}-torch{torch.__version__.partition('+')[0]}.json"
    # Products and steps compile one function for many shapes, which is no reason to give up.
    torch._dynamo.config.recompile_limit = 64
    result = measured(given, device, path, start)
    for line in shown(result):
        print(line)
    print(f"{path}: {result['seconds']:.0f} s")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
