"""Which room may import which, held by reading the source itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "p2pllm"

LEAVES = {"errors", "config", "identity", "records", "logs", "state", "__init__"}
BELOW: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "logs": {"errors"},
    "config": {"errors"},
    "addresses": {"config"},
    "children": {"errors"},
    "identity": {"errors"},
    "machine": {"execution", "scheduling", "config"},
    "state": {"config", "errors"},
    "ports": {"config", "dht", "transport", "errors"},
    "records": {"errors", "identity"},
    "scheduling": {"errors"},
    "execution": {"errors"},
    "dht": {"records", "identity", "config", "errors"},
    "transport": {"dht", "records", "identity", "config", "errors"},
    "swarm": {"transport", "dht", "scheduling"} | LEAVES,
    "serving": {"swarm", "transport", "dht", "execution", "scheduling"} | LEAVES,
    "terminal": {"addresses", "serving"},
    "cluster": {"scheduling", "errors"},
    "plan": {"cluster", "scheduling", "errors"},
    "bench": {"cluster", "scheduling", "swarm", "transport", "dht", "ports"}
    | {"serving", "execution", "children"}
    | LEAVES,
    "demo": {"serving", "execution", "scheduling", "children", "machine"} | LEAVES,
    "portrait": {"swarm", "transport", "execution", "scheduling", "machine"} | LEAVES,
    "peer": {"serving", "swarm", "transport", "dht", "execution", "scheduling"}
    | {"addresses", "machine", "ports", "portrait"}
    | LEAVES,
    "flags": {"config", "errors", "__init__"},
    "cli": {"addresses", "children", "peer", "demo", "terminal", "plan", "bench"}
    | {"flags", "config", "errors", "logs"},
    "__main__": {"cli"},
}
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted module, at import time) of every import of a file."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: imports are written in full"
            if node.module == "p2pllm":
                for alias in node.names:
                    known = alias.name in ROOMS or (PACKAGE / f"{alias.name}.py").exists()
                    yield f"p2pllm.{alias.name}" if known else "p2pllm.__init__", id(node) in top
            else:
                yield str(node.module), id(node) in top


def own_imports(path: Path) -> Iterator[tuple[list[str], bool]]:
    """Imports of our own modules, as parts below the package."""
    for module, at_import in imports(path):
        parts = module.split(".")
        if parts[0] == "p2pllm":
            yield parts[1:] or ["__init__"], at_import


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    room = room_of(path)
    for parts, _ in own_imports(path):
        assert parts[0] == room or parts[0] in BELOW[room], f"{room} must not import {'.'.join(parts)}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_rooms_use_only_what_a_package_names(path: Path) -> None:
    room = room_of(path)
    for parts, at_import in own_imports(path):
        if parts[0] == room or len(parts) == 1:
            continue
        # What needs torch cannot be named by execution/__init__ without importing torch; it is imported
        # lazily.
        is_lazy = parts[0] == "execution" and not at_import
        assert is_lazy, f"{room} reaches into {'.'.join(parts)}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_execution_knows_torch(path: Path) -> None:
    # What it is measured against is not ours, and nobody but its measure needs an executor's logits.
    measures = {PACKAGE / "bench" / "rival.py", PACKAGE / "bench" / "quality.py"}
    if room_of(path) != "execution" and path not in measures:
        assert not {"torch", "transformers", "accelerate"} & {
            module.split(".")[0] for module, _ in imports(path)
        }


def test_every_module_says_what_it_exports() -> None:
    for path in sources():
        tree = ast.parse(path.read_text())
        assert ast.get_docstring(tree), f"{path} has no docstring"
        if path.name != "__main__.py":
            assert any(
                isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
                for node in tree.body
            ), f"{path} has no __all__"


def test_nothing_but_the_executor_needs_torch() -> None:
    modules = (
        "p2pllm.cli, p2pllm.peer, p2pllm.demo, p2pllm.terminal, p2pllm.plan, p2pllm.serving, "
        "p2pllm.execution, p2pllm.dht"
    )
    code = f"import sys, {modules}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == ""
