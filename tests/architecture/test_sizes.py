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
    assert [function.name for function in functions if _length(function) > 80] == []
    constructors = [function for function in functions if function.name == "__init__"]
    assert [
        len(constructor.args.args + constructor.args.kwonlyargs) - 1
        for constructor in constructors
        if _too_many(constructor)
    ] == []


def _length(function):
    """Lines; classes that are made in it count by themselves."""
    inside = [node for node in ast.walk(function) if isinstance(node, ast.ClassDef)]
    return function.end_lineno - function.lineno + 1 - sum(item.end_lineno - item.lineno + 1 for item in inside)


def _too_many(constructor):
    return len(constructor.args.args + constructor.args.kwonlyargs) - 1 > 8
