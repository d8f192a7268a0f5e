"""The examples in the docstrings of autodiff run."""

import doctest
import importlib
import pkgutil

import pytest

from mpdp import autodiff

NAMES = [m.name for m in pkgutil.walk_packages(autodiff.__path__, "mpdp.autodiff.")]


@pytest.mark.parametrize("name", NAMES)
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_public_names_exist():
    assert all(hasattr(autodiff, name) for name in autodiff.__all__)
    assert all(callable(getattr(autodiff.ops, name)) for name in autodiff.ops.__all__)
