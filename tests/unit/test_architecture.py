"""What holds the shape of the code: the two columns, the size of files, the walk in the documentation."""

import ast
import re
from pathlib import Path

import pytest

import mpdp

PACKAGE = Path(mpdp.__file__).parent
DOCS = Path(__file__).resolve().parents[2] / "docs"
BELOW = {"errors", "device", "device_choice", "device_memory", "kernels"}
ARITHMETIC = {"autodiff", "nn", "optim"}
MESSAGES = {"comm"}
# Process-wide by nature: one launcher, one set of hooks. They stand beside the columns.
PROCESS = {"guard", "notice", "launch", "processes", "cores"}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def parts_imported(path):
    """Return the top-level parts of mpdp that a module imports, also inside functions."""
    here = path.relative_to(PACKAGE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = here[: len(here) - node.level]
                full = (*base, *(node.module.split(".") if node.module else ()))
                found |= {full[0]} if full else {alias.name for alias in node.names}
            elif node.module and node.module.split(".")[0] == "mpdp":
                found.add((node.module.split(".") + [""])[1])
        elif isinstance(node, ast.Import):
            found |= {(a.name.split(".") + [""])[1] for a in node.names if a.name.split(".")[0] == "mpdp"}
    return found - {""}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arithmetic_and_messages_never_see_each_other(path):
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    imported = parts_imported(path) - {part}
    if part in BELOW:
        assert imported <= BELOW
    elif part in ARITHMETIC:
        assert imported <= BELOW | ARITHMETIC
    elif part in MESSAGES:
        assert imported <= BELOW | MESSAGES | PROCESS
    elif part == "data":
        assert imported <= BELOW
    elif part in PROCESS:
        assert imported <= BELOW | MESSAGES | PROCESS


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_holds_one_thing(path):
    assert len(path.read_text().splitlines()) <= 500
    assert path.stem not in {"utils", "helpers", "common", "manager", "misc"}
    assert ast.get_docstring(ast.parse(path.read_text())), "a module says what it owns"


def test_mpi_is_spoken_in_one_place():
    spelled = re.compile(r"\.(Allreduce|Bcast|Reduce|Send|Recv)\(")
    users = {p.relative_to(PACKAGE).as_posix() for p in modules() if spelled.search(p.read_text())}
    assert users <= {"comm/mpi.py", "world.py"}


def test_public_names_have_docstrings():
    for name in mpdp.__all__:
        thing = getattr(mpdp, name)
        if callable(thing):
            assert (thing.__doc__ or "").strip(), name
            if isinstance(thing, type):
                for method, value in vars(thing).items():
                    if callable(value) and not method.startswith("_"):
                        assert (value.__doc__ or "").strip(), f"{name}.{method}"


def test_the_walk_names_things_that_exist():
    text = (DOCS / "architecture.md").read_text()
    names = re.findall(r"`(mpdp/[\w/]+\.py)::([\w.]+)`", text)
    assert len(names) >= 8
    for file, name in names:
        tree = ast.parse((PACKAGE.parent / file).read_text()) if (PACKAGE.parent / file).exists() else None
        assert tree is not None, file
        body = tree.body
        for part in name.split("."):
            node = next(
                (n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == part), None
            )
            assert node is not None, f"{file}::{name}"
            body = node.body
