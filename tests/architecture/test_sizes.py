"""Files of at most 400 lines, functions of at most 80, constructors of at most eight parameters besides self."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("megaasync", "tools") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_constructors_are_short(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert [one.name for one in functions if one.end_lineno - one.lineno >= 80] == []
    constructors = [one for one in functions if one.name == "__init__"]
    assert [len(one.args.args + one.args.kwonlyargs) - 1 for one in constructors if _too_many(one)] == []


def _too_many(constructor):
    return len(constructor.args.args + constructor.args.kwonlyargs) - 1 > 8
