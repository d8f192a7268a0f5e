"""Plans of cuDNN with a stand-in for the package: which one is taken, and what is made once."""

import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from mpdp.errors import MissingDependencyError
from mpdp.kernels.cudnn_convolution import CudnnConvolution, Problem
from mpdp.kernels.windows import Windows

WINDOWS = Windows((3, 3), (1, 1), (1, 1), (1, 1))
PROBLEM = Problem("forward", "bfloat16", False, (2, 8, 6, 6), (4, 8, 3, 3), WINDOWS)
NAMES = ["slow", "refused", "fast"]


class Unsupported(Exception):
    """What cuDNN raises for a graph that it has no plan for."""


class Graph(MagicMock):
    """A graph with the plans of NAMES; the second cannot be built, and none of images of one channel."""

    selected = None
    channels = 0

    def tensor(self, name, dim, **_):
        if name == "x":
            self.channels = dim[1]
        return MagicMock()

    def create_execution_plans(self, modes):
        if self.channels == 1:
            raise Unsupported

    def get_execution_plan_count(self):
        return len(NAMES)

    def get_plan_name_at_index(self, index):
        return NAMES[index]

    def select_plan(self, index):
        self.selected = NAMES[index]

    def build_plans(self):
        if self.selected == "refused":
            raise RuntimeError("its notes are refused")

    def get_workspace_size(self):
        return 0


@pytest.fixture
def handles(monkeypatch):
    made = []
    package = SimpleNamespace(
        pygraph=lambda **_: Graph(),
        cudnnGraphNotSupportedError=Unsupported,
        create_handle=lambda: made.append(object()) or made[-1],
        set_stream=lambda handle, stream: None,
        backend_version=lambda: 91900,
        data_type=MagicMock(),
        heur_mode=MagicMock(),
        numerical_note=MagicMock(),
    )
    monkeypatch.setitem(sys.modules, "cudnn", package)
    return made


def test_the_plan_that_was_chosen_is_taken(handles):
    plans, keys = CudnnConvolution("a GPU"), []
    plan = plans.plan(PROBLEM, 7, lambda key: keys.append(key) or "fast")
    assert plan.graph.selected == plan.name == "fast" and plan.workspace_bytes == 1
    assert plans.plan(PROBLEM, 7, keys.append) is plan, "it is remembered"
    assert len(keys) == 1 and "a GPU" in keys[0] and "91900" in keys[0] and "(2, 8, 6, 6)" in keys[0]
    plans.forget()
    assert plans.plan(PROBLEM, 7, lambda key: None).graph.selected is None, "the library's own first"


@pytest.mark.parametrize("name", ["refused", "unknown"])
def test_a_name_that_gives_no_plan_leaves_the_first(handles, name):
    assert CudnnConvolution("a GPU").plan(PROBLEM, 7, lambda key: name).graph.selected is None


def test_candidates_leave_out_what_cannot_be_built(handles):
    plans = CudnnConvolution("a GPU")
    assert [plan.name for plan in plans.candidates(PROBLEM, 7, 5)] == ["slow", "fast"]
    assert [plan.name for plan in plans.candidates(PROBLEM, 7, 1)] == ["slow"]


def test_a_problem_without_a_plan_is_remembered_and_nothing_is_chosen_for_it(handles):
    plans, asked = CudnnConvolution("a GPU"), []
    problem = PROBLEM._replace(x=(2, 1, 6, 6), weight=(4, 1, 3, 3))
    assert plans.plan(problem, 7, asked.append) is None and plans.plan(problem, 7, asked.append) is None
    assert asked == []


def test_a_handle_for_each_stream(handles):
    plans = CudnnConvolution("a GPU")
    plan = plans.plan(PROBLEM, 7)
    for stream in (7, 8, 7):
        plans.run(plan, (1, 2, 3), 4, stream)
    assert len(handles) == 2
    (addresses, workspace), options = plan.graph.execute.call_args
    assert list(addresses.values()) == [1, 2, 3] and workspace == 4 and options["handle"] is handles[0]


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(
        MissingDependencyError, match=r'^convolution by cuDNN: .*pip install "mpdp\[cuda13\]"'
    ):
        CudnnConvolution("a GPU")
