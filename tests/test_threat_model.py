"""docs/threat-model.md: every statement names a test that exists, and no method is forgotten."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from privet.config import options

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)


def statements() -> list[str]:
    """The page's list items, each with its continuation lines, and the rows of the table of methods."""
    items = re.findall(r"^- .*?(?=^- |^$|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)
    table = PAGE[PAGE.index("| method, phase") :].partition("\n\n")[0].splitlines()[2:]
    return [*items, *table]


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_is_named_exists(file: str) -> None:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for where, name in NAMED if where == file} - there == set()


def test_every_statement_names_its_test_or_says_that_there_can_be_none() -> None:
    found = statements()
    assert len(found) > 50
    bare = [text for text in found if not re.search(r"\.py::test_\w+`", text) and "*By nature*" not in text]
    assert bare == []


def test_every_method_has_a_row() -> None:
    rows = [line.split("|")[1] for line in statements() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(options("method")) <= named


def test_the_readme_leads_there() -> None:
    assert "docs/threat-model.md" in (ROOT / "README.md").read_text(encoding="utf-8")
