"""The structure of the code is what `docs/architecture.md` says: rooms, imports one way, names with one meaning.

Each rule is a function of sources by module name that returns what breaks it. `test_a_planted_violation_is_found`
plants a violation of each, so that no rule passes because it looks at nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path

import networkx as nx
import pytest

import canzona_compile

ROOT = Path(__file__).parents[1]
PACKAGE = "canzona_compile"
FOLDERS = ("canzona_compile", "passes", "kernels", "tests", "examples", "benchmarks", "acceptance")
MOST_STATEMENT_LINES = 60  # of a function, without its signature and docstring
MOST_IMPORTS = 25  # of modules of ours, in a module that is no list of others

HEAVY = {"networkx", "plotly", "triton"}  # loaded where they are used

Sources = Mapping[str, str]  # by module name: kernels.ops, ir.step, errors; "" is the package itself

PUBLIC = {
    "CanzonaError",
    "Chain",
    "Choice",
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
    "chain",
    "explain",
    "hidden_matrices",
    "is_wrapped",
    "kl_soap_adamw",
    "muon_adamw",
    "optimizer_for",
    "plan",
    "round_state",
    "soap_adamw",
    "unwrap",
    "verify",
    "wrap",
    "wrap_cls",
    "zero1",
}


@cache
def rooms() -> tuple[str, ...]:
    """The rooms in order, from the list in docs/architecture.md that readers see."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = re.search(r"<!-- rooms -->\n+((?: {4}.*\n)+)", text)
    assert block is not None, "docs/architecture.md has no list of rooms"
    return tuple(line.split()[0] for line in block.group(1).splitlines())


def python_files(*folders: str) -> list[Path]:
    """Python files below folders of the repository, each once: not through the symlinks."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return sorted(p for p in paths if not any(parent.is_symlink() for parent in p.parents))


@cache
def module_paths() -> Mapping[str, Path]:
    """Every module of the package by its name below `canzona_compile`."""
    named = {}
    for path in python_files("canzona_compile", "passes", "kernels", "examples/optimizers"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[1:] if parts[0] in (PACKAGE, "examples") else parts)
        named["" if name == "__init__" else name.removesuffix(".__init__")] = path
    return named


@cache
def our_sources() -> Sources:
    return {name: path.read_text(encoding="utf-8") for name, path in module_paths().items()}


@cache
def parsed(source: str) -> ast.Module:
    """The tree of a source, which nobody changes."""
    return ast.parse(source)


# -- rules -----------------------------------------------------------------------------------------


def imports(source: str, modules: Sources) -> set[str]:
    """The full names that a source imports, anywhere in it; `from a import b` is a.b where that is a module of ours."""
    names: set[str] = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full.removeprefix(f"{PACKAGE}.") in modules else str(node.module))
    return names


def our_imports(source: str, modules: Sources) -> set[str]:
    """The modules of ours that a source imports, below `canzona_compile`."""
    return {n.removeprefix(PACKAGE).removeprefix(".") for n in imports(source, modules) if n.split(".")[0] == PACKAGE}


def room_of(module: str) -> str:
    return module.split(".")[0]


def upward_imports(sources: Sources) -> list[str]:
    """Imports of a room that comes after the importer's own in the list."""
    order = {room: i for i, room in enumerate(rooms())}
    order[""] = order["__main__"]  # the package itself
    return [
        f"{name} imports {other}"
        for name, source in sources.items()
        if name
        for other in sorted(our_imports(source, sources))
        if order.get(room_of(other), len(order)) > order[room_of(name)]
    ]


def import_circles(sources: Sources) -> list[str]:
    """Modules of one room that import one another."""
    graph = nx.DiGraph((name, other) for name, source in sources.items() for other in our_imports(source, sources))
    return [" and ".join(sorted(circle)) for circle in nx.strongly_connected_components(graph) if len(circle) > 1]


def homeless_modules(sources: Sources) -> list[str]:
    """Modules in no room of the list."""
    return [name for name in sources if name and room_of(name) not in rooms()]


def flat_modules(sources: Sources) -> list[str]:
    """Modules beside the rooms that define nothing that users import; `tensors` is a room of one file."""
    packages = {room_of(name) for name in sources if "." in name}
    flat = {name for name in sources if name and "." not in name} - packages - {"__main__", "tensors"}
    return sorted(name for name in flat if not set(definitions(sources[name])) & PUBLIC)


def definitions(source: str) -> dict[str, str]:
    """Public classes and type aliases at the top level of a module, with their text."""
    found = {}
    for node in parsed(source).body:
        if isinstance(node, ast.ClassDef):
            found[node.name] = ast.unparse(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z][a-z]\w*", target.id):
                found[target.id] = ast.unparse(node.value)
    return {name: text for name, text in found.items() if not name.startswith("_")}


def names_with_two_meanings(sources: Sources) -> list[str]:
    """Type names that two modules define differently."""
    meanings: dict[str, dict[str, str]] = defaultdict(dict)
    for module, source in sources.items():
        for name, text in definitions(source).items():
            meanings[name][module] = text
    return [f"{name} in {', '.join(sorted(of))}" for name, of in meanings.items() if len(set(of.values())) > 1]


def private_names_of_torch(sources: Sources) -> list[str]:
    """Private names of torch outside of the one module that collects them; torch documents `torch._foreach_*`."""
    private = re.compile(r"torch\.(?!ops\.)([\w.]*\.)?_(?!_|foreach_)[\w.]*$")
    found = []
    for module, source in sources.items():
        for node in ast.walk(parsed(source)) if module != "compat.torch_private" else ():
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            found += [f"{module}: {name}" for name in names if private.match(name)]
    return found


MAKERS = {
    *("tensor", "as_tensor", "scalar_tensor", "empty", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("rand", "randn", "randint", "randperm"),
}


def tensors_on_the_default_device(sources: Sources) -> list[str]:
    """Calls of torch that make a tensor where the user's default device is, which may be any."""
    return [
        f"{module}:{node.lineno} torch.{node.func.attr}"
        for module, source in sources.items()
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKERS) == ("torch", True)
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def long_functions(sources: Sources) -> list[str]:
    """Functions that nobody takes in at a glance."""
    return [
        f"{module}.{node.name}"
        for module, source in sources.items()
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef) and statement_lines(node) > MOST_STATEMENT_LINES
    ]


def statement_lines(function: ast.FunctionDef) -> int:
    """The lines of a function's statements, of which its docstring is none."""
    first = function.body[1:2] if ast.get_docstring(function) else function.body[:1]
    return (function.end_lineno or 0) - first[0].lineno + 1 if first else 0


def knowing_too_many(sources: Sources) -> list[str]:
    """Modules that import more of ours than one idea needs."""
    listing = {"", "passes"}  # they list what there is
    return [
        f"{name} imports {len(found)}"
        for name, source in sources.items()
        if name not in listing and len(found := our_imports(source, sources)) > MOST_IMPORTS
    ]


def passes_that_import_passes(sources: Sources) -> list[str]:
    """A pass is one decision: what two of them share lies in a room below."""
    return [
        name
        for name, source in sources.items()
        if name.startswith("passes.") and any(room_of(n) == "passes" for n in our_imports(source, sources))
    ]


def passes_at_work(sources: Sources) -> list[str]:
    """Passes that know process groups: plans are made without any."""
    return [
        name
        for name, source in sources.items()
        if name.startswith("passes") and any(n.startswith("torch.distributed") for n in imports(source, sources))
    ]


def tools_in_the_core(sources: Sources) -> list[str]:
    """Imports of tools from rooms that training needs, also by name; the package itself may name them for types."""
    tools = re.compile(rf"{PACKAGE}\.tools(\.\w+)*")
    found = []
    for name, source in sources.items():
        if room_of(name) in ("tools", "__main__"):
            continue
        for_types = {
            node for guard in parsed(source).body if not name and type_checking(guard) for node in ast.walk(guard)
        }
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                names = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            found += [f"{name}:{node.lineno} {n}" for n in names if tools.fullmatch(n) and node not in for_types]
    return found


def type_checking(node: ast.stmt) -> bool:
    """Whether a statement is `if TYPE_CHECKING`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


RULES: dict[Callable[[Sources], list[str]], tuple[str, str]] = {  # with a violation: a module and its text
    upward_imports: ("ir.planted", "from canzona_compile.passes import Place\n"),
    import_circles: ("errors", "from canzona_compile.ir.options import Options\n"),
    homeless_modules: ("attic.planted", ""),
    flat_modules: ("planted", "class Helper: ...\n"),
    names_with_two_meanings: ("tools.planted", "class Step: ...\n"),
    private_names_of_torch: ("tools.planted", "import torch\n\nprint(torch._C._cuda_getDevice)\n"),
    tensors_on_the_default_device: ("tools.planted", "import torch\n\nx = torch.zeros(3)\n"),
    long_functions: ("tools.planted", "def long():\n" + "    x = 1\n" * (MOST_STATEMENT_LINES + 1)),
    knowing_too_many: ("tools.planted", "".join(f"import canzona_compile.a{i}\n" for i in range(MOST_IMPORTS + 1))),
    passes_that_import_passes: ("passes.planted", "from canzona_compile.passes.place import Place\n"),
    passes_at_work: ("passes.planted", "import torch.distributed as dist\n"),
    tools_in_the_core: ("session.planted", "def f():\n    from canzona_compile.tools.processes import run\n"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules_are_kept(rule: Callable[[Sources], list[str]]) -> None:
    assert rule(our_sources()) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_planted_violation_is_found(rule: Callable[[Sources], list[str]]) -> None:
    module, text = RULES[rule]
    assert rule({**our_sources(), module: text}) != []


# -- the rest of the repository --------------------------------------------------------------------


def test_every_room_of_the_list_is_there() -> None:
    assert {room_of(name) for name in our_sources() if name} == set(rooms())


@pytest.mark.parametrize("folder", FOLDERS)
def test_nobody_imports_passes_or_kernels_bare(folder: str) -> None:
    """A bare import would make a second copy of every class."""
    for path in python_files(folder):
        names = imports(path.read_text(encoding="utf-8"), our_sources())
        assert not {name for name in names if name.split(".")[0] in ("passes", "kernels")}, path


def test_the_package_does_not_import_the_rest_of_the_repository() -> None:
    for name, source in our_sources().items():
        others = {n.split(".")[0] for n in imports(source, our_sources())}
        assert not others & {"tests", "examples", "benchmarks", "acceptance"}, name


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks", "acceptance"])
def test_no_function_is_long(folder: str) -> None:
    sources = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8") for p in python_files(folder)}
    assert sources
    assert long_functions(sources) == []


def test_every_file_says_what_it_is() -> None:
    paths = python_files(*FOLDERS)
    assert [p for p in paths if not ast.get_docstring(parsed(p.read_text(encoding="utf-8")))] == []


def test_tests_lie_in_folders_like_the_rooms() -> None:
    beside = {"harness", "end_to_end", "clients", "packages", "benchmarks", "fake_cuda", "docs", "acceptance"}
    whole = {"conftest.py", "test_selection.py", Path(__file__).name}  # of all tests
    folders = {p.relative_to(ROOT / "tests").parts[0] for p in python_files("tests")} - whole
    assert folders <= set(rooms()) | beside


def test_public_names() -> None:
    assert set(canzona_compile.__all__) == PUBLIC
    assert all(hasattr(canzona_compile, name) for name in PUBLIC)
    assert sorted(canzona_compile.__all__) == canzona_compile.__all__


@cache
def lazy_names() -> Mapping[str, str]:
    """The module of each public name, as type checkers see it."""
    guards = [node for node in parsed(our_sources()[""]).body if type_checking(node)]
    imported = [node for guard in guards for node in guard.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imported for alias in node.names}


def test_type_checkers_and_programs_see_the_same_public_names() -> None:
    assert lazy_names().keys() == PUBLIC
    for name, module in lazy_names().items():
        assert getattr(canzona_compile, name) is getattr(import_module(module), name)
    assert set(dir(canzona_compile)) >= PUBLIC
    with pytest.raises(AttributeError, match="module 'canzona_compile' has no attribute 'wrapper'"):
        _ = canzona_compile.wrapper  # type: ignore[attr-defined]


def loaded_by(*statements: str) -> set[str]:
    """The modules that a fresh Python has loaded after some statements."""
    code = "; ".join(["import sys", *statements, "print(*sys.modules)"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_no_torch() -> None:
    loaded = loaded_by("import canzona_compile")
    assert not {name.split(".")[0] for name in loaded} & {"torch", "rich", "numpy", *HEAVY}
    assert len({name for name in loaded if name.split(".")[0] == PACKAGE}) < 10


def test_packages_that_pages_name_are_there_after_the_import_of_ours() -> None:
    names = [f"{PACKAGE}.{name}" for name in ("integrations", "kernels", "optimizers", "passes")]
    assert {*names, f"{PACKAGE}.optimizers.soap"} <= loaded_by(
        f"import {PACKAGE}", f"{PACKAGE}.optimizers.SOAP", *names
    )


def test_what_trains_loads_no_tools() -> None:
    core = [name for name, module in lazy_names().items() if not module.startswith(f"{PACKAGE}.tools.")]
    loaded = loaded_by("import canzona_compile", *(f"canzona_compile.{name}" for name in core))
    assert f"{PACKAGE}.api.wrap" in loaded
    assert not {name for name in loaded if name.startswith(f"{PACKAGE}.tools")}
    assert not {name.split(".")[0] for name in loaded} & HEAVY


def test_every_package_is_installed() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = {f"{PACKAGE}.{n}".rstrip("."): p for n, p in module_paths().items() if p.name == "__init__.py"}
    linked = {f"{PACKAGE}.optimizers"}  # a folder of examples, for the planner
    assert set(config["packages"]) == packages.keys() | linked
    for name, path in packages.items():
        folder = config["package-dir"].get(name, name.replace(".", "/"))
        assert (ROOT / folder).resolve() == path.parent
    assert (ROOT / PACKAGE / "py.typed").exists()
    assert "py.typed" in config["package-data"][PACKAGE]


@pytest.mark.parametrize("name", ["passes", "kernels"])
def test_top_level_folders_are_seen_inside_the_package(name: str) -> None:
    link = ROOT / PACKAGE / name
    assert link.is_symlink()
    assert not link.readlink().is_absolute()
    assert link.resolve() == ROOT / name
