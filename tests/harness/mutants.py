"""Changes lines of core files one at a time and runs the tests of their room: what survives, no test notices.

    make mutants MUTANTS_ARGS="--seed 2 --count 30 --minutes 60"

Run it when `make test` passes. Tests run in a copy of the tree, those that import the changed module first. Which lines
a seed draws depends on their texts, so that it draws much the same from a changed tree.
"""

import argparse
import ast
import copy
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WHOLE = "tests/end_to_end/test_parity.py tests/session/test_variants.py tests/session/test_split.py"
ROOMS = {  # core files, and the tests that whoever changes one would run; without bounds that only prune a search
    "canzona_compile/capture/*.py": "tests/capture tests/session/test_stagger.py",
    "canzona_compile/codegen/*.py": "tests/codegen tests/lowering",
    "canzona_compile/data_parallel/[ceghnr]*.py": "tests/data_parallel",
    "canzona_compile/ir/[blsv]*.py": f"tests/ir tests/passes tests/api/test_chain.py {WHOLE}",
    "canzona_compile/lowering/*.py": f"tests/lowering tests/passes {WHOLE} tests/fake_cuda/test_trainings.py",
    "canzona_compile/ownership/*.py": "tests/ownership tests/passes/test_planning_passes.py",
    "canzona_compile/runtime/[abcegs]*.py": "tests/runtime tests/fake_cuda tests/session",
    "canzona_compile/session/[bghsw]*.py": "tests/session tests/end_to_end/test_one_per_matrix.py",
    "canzona_compile/views/*.py": f"tests/views tests/session tests/data_parallel/test_split.py {WHOLE}",
    "passes/*.py": f"tests/passes tests/lowering tests/session/test_planned_runs.py {WHOLE}",
}
PAIRS = ["Lt LtE", "Gt GtE", "Eq NotEq", "In NotIn", "Is IsNot", "Add Sub", "And Or"]
OPPOSITES = {getattr(ast, a): getattr(ast, b) for p in PAIRS for a, b in (p.split(), p.split()[::-1])}
LEFT = {"tell", "warn", "debug", "isinstance", "attrgetter", "TypeVar", "dataclass", "field"}  # calls left alone
WORDS = {"strict", "hint", "at", "name"}  # arguments that say or check something
NOT_RUN = {"annotation", "returns", "decorator_list", "bases"}  # parts of statements
Mutant = tuple[str, int, str, bytes]  # a path, a line, its text before and after, the source after


def called(node: ast.AST) -> str:
    """The last name of the function that a node calls, if it is a call."""
    node = node.value if isinstance(node, ast.Expr) else node
    return ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def changed(node: ast.AST, names: list[str]) -> Iterator[str]:
    """What may stand for a node in a function with these variables."""
    other = copy.copy(node)
    match node:
        case ast.Compare(ops=[op]) | ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in OPPOSITES:
            other.op = OPPOSITES[type(op)]()
            other.ops = [other.op]
            yield f"({ast.unparse(other)})"
        case ast.UnaryOp(op=ast.Not()):
            yield f"({ast.unparse(node.operand)})"
        case ast.Subscript(slice=ast.Constant(value=0) | ast.UnaryOp(operand=ast.Constant(value=1)) as index):
            yield f"{ast.unparse(node.value)}[{-1 if isinstance(index, ast.Constant) else 0}]"
        case ast.Constant(value=bool() | int()):
            yield str(not node.value if isinstance(node.value, bool) else node.value + 1)
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "pass"
        case ast.Continue() | ast.Break():
            yield "break" if isinstance(node, ast.Continue) else "continue"
        case ast.Call(args=[one, two, *rest]) if called(node) not in {"min", "max", "equal", "times"}:
            other.args = [two, one, *rest]
            yield ast.unparse(other)
        case ast.Return(value=ast.Name(id=own)):
            yield from (f"return {name}" for name in names if name != own)


def mutants(path: str) -> Iterator[Mutant]:
    """All changes of a file, except of messages, annotations, checks and sizes that are only measured."""
    source = (ROOT / path).read_bytes()
    lines = source.splitlines(keepends=True)

    def walk(node: ast.AST, names: list[str]) -> Iterator[Mutant]:
        match node:
            case ast.Assert() | ast.Raise() | ast.JoinedStr() | ast.FunctionDef(name="__repr__"):
                return
            case ast.keyword(arg=name) | ast.If(test=ast.Name(id=name)) if name in {*WORDS, "TYPE_CHECKING"}:
                return
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() | ast.BinOp()) if name.isupper():
                return
            case ast.FunctionDef():
                names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        if called(node) in LEFT:
            return
        for new in changed(node, names):
            before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
            after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
            found = before + new.encode() + after
            texts = (text.splitlines()[node.lineno - 1].decode().strip() for text in (source, found))
            yield path, node.lineno, "\n    - {}\n    + {}".format(*texts), found
        for child in (c for field in node._fields if field not in NOT_RUN for c in [getattr(node, field)]):
            for own in child if isinstance(child, list) else [child]:
                yield from walk(own, names) if isinstance(own, ast.AST) else ()

    return walk(ast.parse(source), [])


def drawn(seed: str, count: int) -> list[Mutant]:
    """The changes whose texts have the smallest hashes, one of a line at most."""
    paths = sorted(str(p.relative_to(ROOT)) for room in ROOMS for p in ROOT.glob(room))
    ranked = {hashlib.sha256(f"{seed} {m[0]} {m[2]}".encode()).digest(): m for p in paths for m in mutants(p)}
    found: dict[tuple[str, int], Mutant] = {}
    for _, mutant in sorted(ranked.items()):
        found.setdefault(mutant[:2], mutant)
    return list(found.values())[:count]


def killer(path: str, source: bytes, tree: Path) -> str:
    """The first test that fails with another source in a copy of the tree; empty if none does."""
    module, own = Path(path).stem, next(own for room, own in ROOMS.items() if Path(path).match(room))
    files = [p for o in own.split() for p in sorted(tree.glob(o if o.endswith(".py") else f"{o}/test_*.py"))]
    near = [p for p in files if re.search(rf"\.{module} import|import {module}$", p.read_text(), re.MULTILINE)]
    near = near or [p for p in files if p.is_relative_to(tree / own.split()[0])]
    (tree / path).write_bytes(source)
    for some in filter(None, (near, [p for p in files if p not in near])):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not full", "--tb=no", *map(str, some)]
        settings = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        with open(tree / "said", "w+") as said:  # `timeout` ends ranks as well
            command = ["timeout", "--signal=KILL", "1200", *command]
            failed = subprocess.run(command, cwd=tree, env=settings, stdout=said, stderr=said).returncode
            said.seek(0)
            if failed:
                return next(iter(re.findall(r"^(?:FAILED|ERROR) .*", said.read(), re.MULTILINE)), f"exit {failed}")
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", default="1")
    parser.add_argument("--count", type=int, default=30, help="changes to try")
    parser.add_argument("--minutes", type=float, default=60, help="begin no change after these")
    asked, killed, tried, begin = parser.parse_args(), 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        skipped = shutil.ignore_patterns(".git", ".venv*", ".*_cache", "__pycache__", "build", "dist")
        tree = shutil.copytree(ROOT, Path(folder, "tree"), symlinks=True, ignore=skipped)
        for path, line, text, source in drawn(asked.seed, asked.count):
            if time.monotonic() < begin + 60 * asked.minutes:
                test = killer(path, source, tree)
                shutil.copyfile(ROOT / path, tree / path)
                killed, tried = killed + bool(test), tried + 1
                print(f"{path}:{line}: {test or 'SURVIVED'}{text}", flush=True)
    print(f"{killed} of {tried} killed: {killed / max(tried, 1):.0%}")
