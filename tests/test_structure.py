"""The structure of the code: imports run one way, files are short, names and packages are what is promised."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

import canzona_compile

ROOT = Path(__file__).parents[1]
PACKAGE = "canzona_compile"
FOLDERS = ("canzona_compile", "passes", "kernels", "tests", "examples", "benchmarks")
MOST_LINES = 400

# A module may import those before it. Whoever adds one decides where it stands.
LAYERS = (
    "tools",
    "api",
    "report",
    "session",
    "lowering",
    "analysis",
    "ir",
    "kernels.dispatch kernels.tuning_cache kernels.tensor_args kernels.padding kernels.triangle kernels.descriptors",
    "kernels.sym_gemm_pointer kernels.sym_gemm_tma kernels.sym_gemm",
    "kernels kernels.gemm_axpby_pointer kernels.gemm_axpby_tma kernels.gemm_axpby kernels.tune",
    "kernels.batched kernels.full_precision kernels.minimax kernels.inverse_root kernels.cholesky_qr",
    "kernels.root_ops kernels.ops",
    "errors ir.hardware ir.layout ir.step",
    "ownership.jobs ownership.buffer ownership.greedy ownership.static ownership.alpha ownership.local_search",
    "ownership.lpt ownership.permuted ownership.milp ownership.exact ownership",
    "ir.bit_exactness analysis.flops analysis.roofline ir.program_ops ir.program lowering.stream_sync lowering.rank_view ir.printer ir.graph_checks ir.verifier lowering.batch_graph",
    "lowering.builder analysis.spectral",
    "codegen.arithmetic codegen.values codegen.rules codegen.expressions codegen.source codegen.tables codegen.launch",
    "codegen lowering.elementwise_kernels",
    "analysis.linear_algebra analysis.symmetry_proof analysis.norm_bounds analysis.newton_schulz analysis.gram_restarts ir.plan_file analysis.holistic_tasks",
    "passes.assign_owners passes.batch passes.canonicalize passes.emit passes.follow_plan passes.fuse_collectives",
    "passes.gram passes.micro_group passes.padding passes.place passes.roots passes.schedule passes.symmetry passes",
    "ir.pipeline ir.observers",
    "capture.leaves capture.variant_period capture.error_origin capture.dynamo capture.functional capture.twin",
    "capture.external_counters capture.randomness capture.dynamo_oracle capture.eager_fallback capture.eager_parity",
    "capture.sharding_rules capture.separability capture.batch_dim capture.templates capture",
    "runtime.process_groups runtime.store_agreement runtime.buffers runtime.streams runtime.scalar_ops runtime.device_scalars",
    "runtime.cuda_graph runtime.executor runtime",
    "split session.fused_params options session.bind session.stagger session.plan session.state session.local_step session.variant_selection session.plan_execution runtime.rank_agreement",
    "report.schema report.charts report.terminal report.build report.run_facts report.explain",
    "session.checkpoint_probe session.session api.handle api.wrap api.wrap_cls",
    "tools.simulation.figures tools.simulation.engine tools.simulation.traffic tools.simulation.rounds tools.simulation.simulate tools.simulation",
    "tools.planning.gc_pause tools.planning.figures tools.planning.weights tools.planning.mesh tools.planning.offline tools.planning.request",
    "tools.planning.gram tools.planning.mixed tools.planning.strategies tools.planning.forecast tools.planning.table tools.planning.markdown",
    "tools.planning.trace tools.planning.page_style tools.planning.page_timeline tools.planning.page_charts tools.planning.page_document tools.planning.page tools.planning.difference tools.planning.result tools.planning.plan tools.planning.command tools.planning",
    "tools.calibration.clock tools.calibration.links tools.calibration.measure tools.calibration.bookkeeping tools.calibration.ranks",
    "tools.calibration.calibrate tools.calibration.command tools.calibration",
    "tools.verification.failure tools.verification.compare tools.verification.layouts tools.verification.user_model tools.verification.reference_log tools.verification.findings",
    "tools.verification.workers tools.verification.processes tools.verification.table tools.verification.check tools.verification.command tools.verification",
    "tools.tuning.command tools.tuning __main__",
)
ORDER = [name for layer in LAYERS for name in layer.split()]

PUBLIC = {
    "CanzonaError",
    "Explanation",
    "InvalidGradient",
    "OfflinePlan",
    "Options",
    "PlanFile",
    "RankMismatch",
    "Report",
    "Split",
    "UnsupportedLayout",
    "UnsupportedOptimizer",
    "Verification",
    "explain",
    "is_wrapped",
    "plan",
    "unwrap",
    "verify",
    "wrap",
    "wrap_cls",
}


def sources(*folders: str) -> list[Path]:
    """Python files below folders of the repository, each once: not through the symlinks."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(p for p in found if not any(parent.is_symlink() for parent in p.parents))


@cache
def modules() -> dict[str, Path]:
    """Every module of the package by the name that imports it."""
    found = {}
    for path in sources("canzona_compile", "passes", "kernels"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts if parts[0] == PACKAGE else (PACKAGE, *parts))
        found[name.removesuffix(".__init__")] = path
    return found


@cache
def imported(path: Path) -> frozenset[str]:
    """Names of all modules that a file imports, anywhere in it; `from a import b` is a.b where that is a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            base = node.module or ""
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found.update(inner & modules().keys())
            if inner - modules().keys():
                found.add(base)
    return frozenset(found)


def ours(path: Path) -> set[str]:
    return {name for name in imported(path) if name == PACKAGE or name.startswith(f"{PACKAGE}.")}


# -- imports -----------------------------------------------------------------------------------


def test_every_module_has_its_place() -> None:
    placed = {f"{PACKAGE}.{name}" for name in ORDER}
    assert len(placed) == len(ORDER)
    assert placed | {PACKAGE} == modules().keys()


@pytest.mark.parametrize("name", ORDER)
def test_imports_run_one_way(name: str) -> None:
    before = {f"{PACKAGE}.{other}" for other in ORDER[: ORDER.index(name)]}
    assert ours(modules()[f"{PACKAGE}.{name}"]) - before == set()


def test_passes_do_not_know_one_another() -> None:
    for path in sources("passes"):
        if path.name != "__init__.py":
            assert not {name for name in ours(path) if name.startswith(f"{PACKAGE}.passes")}, path.name


def test_passes_know_neither_tensors_at_work_nor_process_groups() -> None:
    for path in sources("passes"):
        names = imported(path)
        assert not any(n.startswith(("torch.distributed", f"{PACKAGE}.runtime", f"{PACKAGE}.capture")) for n in names)


def test_kernels_import_nothing_of_ours_but_kernels() -> None:
    assert sources("kernels")
    for path in sources("kernels"):
        assert {n for n in ours(path) if not n.startswith(f"{PACKAGE}.kernels")} == set(), path.name


@pytest.mark.parametrize("folder", FOLDERS)
def test_nobody_imports_passes_or_kernels_bare(folder: str) -> None:
    """A bare import would make a second copy of every class."""
    for path in sources(folder):
        bare = {name for name in imported(path) if name.split(".")[0] in ("passes", "kernels")}
        assert bare == set(), path


def test_the_package_does_not_import_the_rest_of_the_repository() -> None:
    for path in modules().values():
        assert not {n for n in imported(path) if n.split(".")[0] in ("tests", "examples", "benchmarks")}, path


# -- files, names and packages -----------------------------------------------------------------


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_long(folder: str) -> None:
    lengths = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8").count("\n") for p in sources(folder)}
    assert lengths
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def test_every_file_says_what_it_is() -> None:
    silent = [p for p in sources(*FOLDERS) if not ast.get_docstring(ast.parse(p.read_text(encoding="utf-8")))]
    assert silent == []


def test_public_names() -> None:
    assert set(canzona_compile.__all__) == PUBLIC
    assert all(hasattr(canzona_compile, name) for name in PUBLIC)
    assert sorted(canzona_compile.__all__) == canzona_compile.__all__


def test_every_package_is_installed() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {name for name, path in modules().items() if path.name == "__init__.py"}
    linked = {f"{PACKAGE}.optimizers"}  # a folder of examples, for the planner
    assert set(config["packages"]) == packages | linked
    for name in packages:
        folder = config["package-dir"].get(name, name.replace(".", "/"))
        assert (ROOT / folder).resolve() == modules()[name].parent
    assert (ROOT / PACKAGE / "py.typed").exists()
    assert "py.typed" in config["package-data"][PACKAGE]


@pytest.mark.parametrize("name", ["passes", "kernels"])
def test_top_level_folders_are_seen_inside_the_package(name: str) -> None:
    link = ROOT / PACKAGE / name
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / name
