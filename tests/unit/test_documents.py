"""Code blocks of the documentation and examples of docstrings run as they stand."""

import ast
import doctest
import importlib
import pkgutil
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import mpdp

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [
    name
    for _, name, _ in pkgutil.walk_packages(mpdp.__path__, "mpdp.")
    if not name.endswith("__main__")
    and ".cuda" not in name
    and ".peers." not in name  # scripts for an interpreter that has another system
]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_python_blocks_run_one_after_another(path, tmp_path, monkeypatch):
    """Blocks of one file share their names; ``<!-- skip: why -->`` before one leaves it out of the run only.

    What needs PyTorch runs where that is installed.
    """
    monkeypatch.chdir(tmp_path)
    text = path.read_text(encoding="utf-8")
    names = {"__name__": "__main__"}
    mpdp.seed(0)
    for match in re.finditer(r"(<!-- skip: [^>]+ -->\n)?```python\n(.*?)```", text, re.DOTALL):
        ast.parse(match[2])
        if match[1] is None or ("needs PyTorch" in match[1] and find_spec("torch")):
            line = text[: match.start(2)].count("\n")
            exec(compile("\n" * line + match[2], str(path), "exec"), names)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    assert results.failed == 0
