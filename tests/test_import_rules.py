"""Which module may import which: read from the source, so that no import is missed because it is lazy."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import orch

ROOT = Path(__file__).parents[1]
PACKAGE_OF_FOLDER = {"comm": "orch.comm", "odb": "orch.odb", "encoders": "orch.encoders", "orch": "orch"}
PURE = {
    "orch.comm.counts",
    "orch.comm.topology",
    "orch.comm.launchers",
    "orch.comm.splits",
    "orch.comm.predict",
    "orch.comm.two_hops",
    "orch.comm.layout",
    "orch.comm.placement",
    "orch.comm.placement_search",
    "orch.comm.placement_ilp",
    "orch.comm.collective_log",
    "orch.odb.budget",
    "orch.odb.grouping",
    "orch.odb.alignment",
    "orch.config",
    "orch.cost",
    "orch.plan",
    "orch.metrics",
    "orch.lengths",
    "orch.balance",
    "orch.balancing",
    "orch.bounds",
}
PURE_PACKAGES = ("orch.dispatch",)
MAY_IMPORT = {
    "orch.comm": {"orch.comm"},
    "orch.odb": {"orch.odb", "orch.comm"},
    "orch.encoders": {"orch.encoders", "orch.comm"},
    "orch": {"orch", "orch.comm"},
}
# Those that look up by class, inside a function.
LAZY_ENCODERS = {"orch.stages", "orch.unstaged", "orch.setup", "orch.calibration"}
_IMPORTERS = ("import_module", "__import__")
HEAVY = ("torch", "transformers", "deepspeed")


def _module_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).with_suffix("").parts
    return ".".join([PACKAGE_OF_FOLDER[folder], *(part for part in rest if part != "__init__")])


def _sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "egg-info" not in str(path))


MODULES = {_module_name(path): path for path in _sources(*PACKAGE_OF_FOLDER)}


def _imports(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every import, lazy ones and `importlib.import_module("...")` too, by the name that is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from ((node, f"{start}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            yield from [(node, str(node.args[0].value))] if ast.unparse(node.func).endswith(_IMPORTERS) else []


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _package_of(name: str) -> str | None:
    """The package of ours that a dotted name lies in."""
    for package in ("orch.comm", "orch.odb", "orch.encoders", "orch"):
        if name == package or name.startswith(package + "."):
            return package
    return None


def _is_pure(module: str) -> bool:
    return module in PURE or module.startswith(PURE_PACKAGES)


def _imported_modules(path: Path) -> set[str]:
    """Modules of ours that a file imports, at its top level or lazily."""
    found = set()
    for _, name in _imports(_parsed(path)):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        found.add(name)
    return found - {""}


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_go_one_way(module):
    package = _package_of(module)
    for node, name in _imports(_parsed(MODULES[module])):
        imported = _package_of(name)
        if imported is None or imported in MAY_IMPORT[package]:
            continue
        where = f"{module}:{node.lineno} imports {name}"
        assert imported == "orch.encoders", where
        assert module in LAZY_ENCODERS, where
        assert _is_inside_function(MODULES[module], node.lineno), f"{where} outside a function"


def _is_inside_function(path: Path, line: int) -> bool:
    return any(
        node.lineno < line <= (node.end_lineno or 0)
        for node in ast.walk(_parsed(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )


@pytest.mark.parametrize("module", sorted(name for name in MODULES if _is_pure(name)))
def test_pure_modules_reach_no_torch(module):
    reached, ahead = set(), {module}
    while ahead:
        current = ahead.pop()
        reached.add(current)
        for node, name in _imports(_parsed(MODULES[current])):
            assert name.split(".")[0] not in HEAVY, f"{module} reaches {current}:{node.lineno}, which imports {name}"
        ahead |= _imported_modules(MODULES[current]) - reached


@pytest.mark.parametrize("module", sorted(name for name, path in MODULES.items() if path.name == "__init__.py"))
def test_packages_import_no_torch_by_themselves(module):
    top_level = ast.Module(
        [node for node in _parsed(MODULES[module]).body if isinstance(node, (ast.Import, ast.ImportFrom))], []
    )
    for _, name in _imports(top_level):
        assert name.split(".")[0] not in HEAVY, f"{module} imports {name}"


def test_listed_pure_modules_exist():
    assert PURE - set(MODULES) <= {"orch.balance", "orch.balancing"}


@pytest.mark.parametrize(
    "path", _sources(*PACKAGE_OF_FOLDER, "examples", "tests"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_bare_names_are_never_imported(path):
    for node, name in _imports(_parsed(path)):
        assert name.split(".")[0] not in ("comm", "odb", "encoders"), f"{path}:{node.lineno} imports {name}"
        assert name.split(".")[0] != "tests" or path.is_relative_to(ROOT / "tests"), f"{path}:{node.lineno}: {name}"


@pytest.mark.parametrize("path", _sources(*PACKAGE_OF_FOLDER), ids=lambda p: str(p.relative_to(ROOT)))
def test_packages_import_absolutely_and_no_examples(path):
    for node, name in _imports(_parsed(path)):
        assert not name.startswith("."), f"{path}:{node.lineno} imports {name} relatively"
        assert name.split(".")[0] != "examples", f"{path}:{node.lineno} imports {name}"


def test_planning_leaves_torch_unimported():
    names = [name for name, home in orch._HOME_OF_NAME.items() if _is_pure(home) and home in MODULES]
    assert {"Topology", "plan_step", "StepLengths"} <= set(names)
    code = (
        f"import sys, orch; [getattr(orch, name) for name in {names}]\n"
        "import orch.comm.placement, orch.comm.placement_search, orch.comm.placement_ilp\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert out.stdout.strip() == "[]"


def test_the_walk_finds_lazy_imports():
    tree = ast.parse("def f():\n    import torch\n    from orch.odb import loader\n    g.import_module('comm.x')")
    assert [name for _, name in _imports(tree)] == ["torch", "orch.odb.loader", "comm.x"]
