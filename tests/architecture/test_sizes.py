"""Files of at most 400 lines, functions of at most 80, constructors of at most eight parameters besides self."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("megaasync", "tools", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_functions_and_constructors_are_short(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert [one.name for one in functions if _length(one) > 80] == []
    constructors = [one for one in functions if one.name == "__init__"]
    assert [len(one.args.args + one.args.kwonlyargs) - 1 for one in constructors if _too_many(one)] == []


def _length(function):
    """Lines; classes that are made in it count by themselves."""
    inside = [node for node in ast.walk(function) if isinstance(node, ast.ClassDef)]
    return function.end_lineno - function.lineno + 1 - sum(one.end_lineno - one.lineno + 1 for one in inside)


def _too_many(constructor):
    return len(constructor.args.args + constructor.args.kwonlyargs) - 1 > 8
