"""Imports go one way: apps -> strategies -> privet; Flower is known to few; the two apps never meet."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("privet", "strategies", "server_app", "client_app")
FILES = [f for p in PACKAGES for f in sorted((ROOT / p).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    package = name.partition("/")[0]
    allowed = {
        "privet": {"privet"},
        "strategies": {"privet", "strategies"},
        "server_app": {"privet", "strategies", "server_app"},
        "client_app": {"privet", "strategies", "client_app"},
    }[package]
    # The command line is where the parts meet.
    allowed = allowed | {
        "privet/cli.py": {"server_app", "client_app"},
        "privet/operate.py": {"client_app"},
    }.get(name, set())
    found = set(imports(path))
    assert found & set(PACKAGES) <= allowed
    if package == "privet" and name != "privet/wire.py":
        assert "flwr" not in found
    assert "pickle" not in found


def test_the_client_app_imports_nothing_that_can_fail_outside_its_handlers() -> None:
    tree = ast.parse((ROOT / "client_app" / "app.py").read_text())
    top = {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
    assert {m for m in top if m and not m.startswith(("flwr", "collections"))} == set()


def test_every_method_has_one_file_and_one_yaml() -> None:
    files = {f.stem for f in (ROOT / "strategies").glob("*.py")}
    assert {f.stem for f in (ROOT / "conf" / "method").glob("*.yaml")} == files - {
        "__init__",
        "base",
        "checkpoint",
        "exchange",
        "folding",
        "merging",
        "rounds",
    }
