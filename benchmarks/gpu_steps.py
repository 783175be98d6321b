"""Whole optimizer steps on one GPU: torch's Muon, the same compiled by torch, and ours, exact and fast."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Muon
from torch.profiler import ProfilerActivity, profile

import canzona_compile
from canzona_compile.ir import program_ops
from canzona_compile.tools.calibration.clock import Clock
from gpu_clock import Ceilings, Extent, Watched, alone, compared, going_on, in_turn, plain
from gpu_products import newton_schulz, program_of
from latency_cases import Shape, qwen_layer

LR, MOMENTUM, DECAY = 1e-3, 0.95, 0.1
LAYERS_8B = 6  # of 36: four optimizers at once have to fit
VARIANTS = ("plain", "compiled", "exact", "fast")
# `torch.compile` of `torch.optim.Muon.step` itself unrolls all matrices into one graph, which takes minutes to compile
# for a whole model. It takes part where there are few; "compiled" is a graph per shape with the same arithmetic.
WHOLE, MOST_WHOLE = "compiled muon", 16
IN_TURN = "exact, one batch after the other"  # where the batches of few matrices would compute side by side
OURS = ("exact", "fast")


def sets(extent: Extent) -> dict[str, tuple[Shape, ...]]:
    """The matrices of Qwen3-1.7B (28 layers), and of some layers as those of an 8B model (Qwen3-8B)."""

    def layers(count: int, hidden: int, intermediate: int, q: int, kv: int) -> tuple[Shape, ...]:
        sizes = (extent.size(n) for n in (hidden, intermediate, q, kv))
        return qwen_layer(*sizes) * extent.count(count)

    return {
        "qwen3-1.7b-1-layer": layers(1, 2048, 6144, 2048, 1024),
        "qwen3-1.7b": layers(28, 2048, 6144, 2048, 1024),
        f"8b-{LAYERS_8B}-layers": layers(LAYERS_8B, 4096, 12288, 4096, 1024),
    }


def update(param: Tensor, gradient: Tensor, buffer: Tensor, lr: Tensor, adjusted: float) -> None:
    """Muon's step for one matrix, as torch.optim.Muon takes it with Nesterov momentum; what torch compiles."""
    buffer.lerp_(gradient, 1 - MOMENTUM)
    direction = newton_schulz(torch.lerp(gradient, buffer, MOMENTUM))
    param.mul_(1 - lr * DECAY)
    param.sub_(direction * (lr * adjusted))


class CompiledMuon:
    """A graph per shape, compiled by torch with everything fused that it fuses; the rate is a tensor, so that it may
    change."""

    def __init__(self, params: list[Tensor], backend: str) -> None:
        self.params = params
        self.buffers = [torch.zeros_like(p) for p in params]
        self.lr = torch.tensor(LR, device=params[0].device)
        self._update: Callable[..., None] = torch.compile(update, dynamic=False, fullgraph=True, backend=backend)

    def step(self) -> None:
        with torch.no_grad():
            for param, buffer in zip(self.params, self.buffers, strict=True):
                assert param.grad is not None
                adjusted = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
                self._update(param, param.grad, buffer, self.lr, adjusted)


class Timed(fx.Interpreter):
    """Runs a rank program with the device's time taken around each call, by what the call is for."""

    def __init__(self, module: fx.GraphModule, clock: Clock) -> None:
        super().__init__(module)
        self.clock = clock
        self.seconds: dict[str, float] = defaultdict(float)

    def run_node(self, n: fx.Node) -> Any:
        kind = kind_of(n)
        if not kind:
            return super().run_node(n)
        result: list[Any] = []
        self.seconds[kind] += alone(self.clock, lambda: result.append(super(Timed, self).run_node(n)))
        return result[0]


def kind_of(node: fx.Node) -> str:
    """prepare, compute, apply or copy; empty for what no device does."""
    if node.op == "call_module":  # generated kernels that copy are named after what they do: unpack, pack, forward
        return next((k for k in ("prepare", "compute", "apply") if f"_{k}" in str(node.target)), "copy")
    if node.op != "call_function":
        return ""
    if node.target is program_ops.each:
        return "compute"
    return "copy" if node.target in (program_ops.copy, program_ops.compact) else ""


@dataclass(slots=True)
class Steps:
    """Measures whole steps. Files of profiles go to `folder`."""

    clock: Clock
    extent: Extent
    folder: Path
    problems: list[str]

    def sets(self) -> list[Callable[[], dict[str, Any]]]:
        return [partial(self._set, name, shapes) for name, shapes in sets(self.extent).items()]

    def _set(self, name: str, shapes: tuple[Shape, ...]) -> dict[str, Any]:
        device, random = self.clock.device, torch.Generator().manual_seed(0)
        values = [torch.randn(shape, generator=random) for shape in dict.fromkeys(shapes)]
        first = dict(zip(dict.fromkeys(shapes), values, strict=True))
        gradients = [first[shape].to(device) for shape in shapes]
        optimizers: dict[str, Any] = {}
        for variant in (*VARIANTS, *([WHOLE, IN_TURN] if len(shapes) <= MOST_WHOLE else [])):
            with going_on(f"{name} {variant}", self.problems):
                params = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
                for param, gradient in zip(params, gradients, strict=True):
                    param.grad = gradient
                optimizer = self._made(variant, params, optimizers)
                for _ in range(4):  # programs are recorded on the third step with the same addresses
                    optimizer.step()
                optimizers[variant] = optimizer
        with going_on(f"{name}: comparing parameters", self.problems):
            self._check(name, optimizers)
        ceilings = Ceilings.measure(self.clock, self.extent)
        with Watched(self.clock.device) as watched:
            seconds = in_turn(self.clock, {k: o.step for k, o in optimizers.items()}, self.extent)
        floor = self._floor(shapes, ceilings)
        record: dict[str, Any] = {
            "set": name,
            "matrices": len(shapes),
            "elements": sum(rows * columns for rows, columns in shapes),
            "variants": compared(seconds, "compiled"),
            "execution": {},
            "breakdown": {},
            "elementwise by floor": {},
            "launches": {},
            "floor": floor,
            "ceilings": plain(ceilings),
            "clocks": watched.figures(),
        }
        for own in OURS:
            if own in optimizers:
                with going_on(f"{name} {own}: breakdown", self.problems):
                    record["execution"][own] = optimizers[own].canzona.report().execution
                    taken = self._breakdown(optimizers[own], min(seconds[own]))
                    record["breakdown"][own] = taken
                    elementwise = taken.get("prepare", 0.0) + taken.get("apply", 0.0)
                    record["elementwise by floor"][own] = elementwise / floor["elementwise"]
        for own in (*OURS, "compiled"):
            if own in optimizers:
                with going_on(f"{name} {own}: trace", self.problems):
                    record["launches"][own] = self._trace(optimizers[own], f"trace-{name}-{own}")
        return record

    def _made(self, variant: str, params: list[Any], others: dict[str, Any]) -> Any:
        if variant == "compiled":
            return CompiledMuon(params, self.extent.compiler)
        muon = Muon(params, lr=LR, momentum=MOMENTUM, weight_decay=DECAY)
        if variant == WHOLE:
            muon.step = torch.compile(muon.step, dynamic=False, backend=self.extent.compiler)  # type: ignore[method-assign]
            return muon
        if variant == IN_TURN:
            groups = len(others["exact"].canzona.step.micro_groups)
            return canzona_compile.wrap(muon, depth=1, micro_groups=groups)
        return muon if variant == "plain" else canzona_compile.wrap(muon, numerics=variant)  # type: ignore[arg-type]

    def _check(self, name: str, optimizers: dict[str, Any]) -> None:
        """After equal steps all are near the plain one: within the noise of 16-bit products."""
        expected = optimizers["plain"].param_groups[0]["params"]
        for variant, own in optimizers.items():
            found = own.params if variant == "compiled" else own.param_groups[0]["params"]
            for a, b in zip(expected, found, strict=True):
                far = float((a - b).detach().norm() / a.detach().norm().clamp(min=1e-12))
                if not far < 0.05:
                    self.problems.append(f"{name} {variant}: parameters are {far:.1e} from those of the plain Muon")
                    break

    def _breakdown(self, optimizer: Any, whole: float) -> dict[str, float]:
        """Seconds of a step by kind, each call alone; exposed: what the step takes beside them."""
        rounds: list[dict[str, float]] = []
        for _ in range(3):
            with program_of(optimizer) as executor:
                timed = Timed(executor.program.module, self.clock)
                timed.run(*executor.arguments())
            rounds.append(timed.seconds)
        kinds = sorted({kind for found in rounds for kind in found})
        best = {kind: min(found[kind] for found in rounds) for kind in kinds}
        return {**best, "exposed": max(0.0, whole - sum(best.values())), "step": whole}

    def _floor(self, shapes: tuple[Shape, ...], ceilings: Ceilings) -> dict[str, float]:
        """What no program can beat: elementwise work at the bandwidth, dense products at the rate, of this run."""
        elements = sum(rows * columns for rows, columns in shapes)
        # prepare reads gradient and momentum, writes momentum and 16 bits; apply reads 16 bits, parameter; writes it.
        moved = elements * (4 + 4 + 4 + 2 + 2 + 4 + 4)
        flops = sum(newton_schulz_flops(rows, columns) for rows, columns in shapes)
        return {"elementwise": moved / ceilings.bandwidth / 1e12, "dense": flops / ceilings.bf16 / 1e12}

    def _trace(self, optimizer: Any, name: str) -> dict[str, Any]:
        """A step in Perfetto's format; returns the file, the launches per step, and what each kernel took."""
        activities = [ProfilerActivity.CPU]
        if self.clock.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            optimizer.step()
            if self.clock.device.type == "cuda":
                torch.cuda.synchronize(self.clock.device)
        path = self.folder / f"{name}.json.gz"
        profiler.export_chrome_trace(str(path))
        return {"trace": path.name, **launches_in(profiler), "by kernel": times_in(profiler)}


def newton_schulz_flops(rows: int, columns: int) -> int:
    short, long = sorted((rows, columns))
    return 5 * (4 * short * short * long + 2 * short**3)


def launches_in(profiler: Any) -> dict[str, int]:
    """Kernels that the host launched, and graphs of kernels."""
    found = {"kernels": 0, "graphs": 0}
    for event in profiler.events():
        if event.name in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"):
            found["kernels"] += 1
        elif event.name == "cudaGraphLaunch":
            found["graphs"] += 1
    return found


def times_in(profiler: Any) -> dict[str, list[float]]:
    """By the name of a kernel, the longest first: how often it ran, and ms in all. On CPU: by operator."""
    there = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    found: dict[str, list[float]] = {}
    for event in there or profiler.events():
        own = found.setdefault(event.name, [0, 0.0])
        own[0] += 1
        own[1] += (event.self_device_time_total if there else event.self_cpu_time_total) / 1e3
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def warm(device: torch.device, seconds: float) -> None:
    """Wakes the clocks of a device: they rise and settle under load."""
    if device.type != "cuda":
        return
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    clock, spent = Clock(device, 1), 0.0
    while spent < seconds:
        spent += 50 * clock.sample(lambda: torch.mm(a, a), 50)
