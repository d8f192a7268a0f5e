"""The examples in the docstrings of nn run."""

import doctest
import importlib
import pkgutil

import pytest

from mpdp import nn


@pytest.mark.parametrize("name", [m.name for m in pkgutil.walk_packages(nn.__path__, "mpdp.nn.")])
def test_examples(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_public_names_exist():
    assert all(hasattr(nn, name) for name in nn.__all__)
