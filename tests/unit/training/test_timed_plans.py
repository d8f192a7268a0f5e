"""Plans of the first update's products: timed after it, written down, and the same after a resumption."""

import json

import numpy as np
import pytest
from on_device import world

import mpdp
from mpdp import data, kernels, nn, optim
from mpdp.device import CPU
from mpdp.kernels.plan_book import PlanBook

DATA = data.ArrayDataset(
    np.random.default_rng(0).standard_normal((16, 3)).astype("f4"), np.arange(16, dtype="i8") % 2
)


@pytest.fixture
def asked(monkeypatch):
    """A CPU whose products ask the plan book, and the answers they got, by call."""
    k, answers = kernels.for_device(CPU), []
    plain = type(k).linear

    def linear(self, x, *rest):
        answers.append(self.plan_book.find(f"product {len(x)}", lambda: f"fast {len(x)}"))
        return plain(self, x, *rest)

    monkeypatch.setattr(type(k), "linear", linear)
    monkeypatch.setattr(k, "plan_book", PlanBook())
    return answers


def trainer(folder, plans="timed"):
    return mpdp.Trainer(
        nn.Linear(3, 2), nn.cross_entropy, optim.SGD(lr=0.1), world=world(), plans=plans, run_dir=folder
    )


def test_plans_are_timed_after_the_first_update(tmp_path, asked):
    run = trainer(tmp_path)
    run.fit(DATA, updates=3, global_batch_size=8)
    assert asked == [None, "fast 8", "fast 8"]
    assert json.loads((tmp_path / "plans.json").read_text()) == {"product 8": "fast 8"}
    run.evaluate(data.ArrayDataset(DATA.arrays[0][:5], DATA.arrays[1][:5]))
    assert asked[3:] == [None] and kernels.for_device(CPU).plan_book.missing == 0  # not of the first update


def test_a_resumed_run_computes_by_the_same_plans(tmp_path, asked, monkeypatch):
    run = trainer(tmp_path)
    run.fit(DATA, updates=2, global_batch_size=8)
    run.save()
    monkeypatch.setattr(kernels.for_device(CPU), "plan_book", PlanBook())
    again = trainer(tmp_path)
    del asked[:]
    assert again.resume()
    again.fit(DATA, updates=4, global_batch_size=8)
    assert asked == ["fast 8", "fast 8"] and not kernels.for_device(CPU).plan_book.timed


def test_nothing_is_timed_unless_asked_for(tmp_path, asked):
    trainer(tmp_path, "suggested").fit(DATA, updates=2, global_batch_size=8)
    assert asked == [None, None] and not (tmp_path / "plans.json").exists()


def test_other_words_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r'plans: expected "suggested" or "timed", got \'best\'; leave it out'
    ):
        trainer(tmp_path, "best")
