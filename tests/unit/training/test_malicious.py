"""Checkpoints that somebody else wrote: they raise one error, and reach nothing outside of their directory."""

import ast
import copy
import json
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpdp
from mpdp import nn, optim
from mpdp.errors import CheckpointError
from mpdp.training import checkpoint, manifest
from mpdp.training.manifest import Piece

TENSORS = {
    "weights/a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "weights/scalar": np.array(1.5),
    "weights/empty": np.zeros((0, 3), dtype=np.float32),
    "buffers/n": np.arange(3),
}
FEW = settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def path(tmp_path):
    return checkpoint.write(tmp_path / "checkpoints", 7, TENSORS, {"step": 7}, {"loss": 0.5})


@pytest.fixture
def pristine(path):
    return {file.name: file.read_bytes() for file in path.iterdir()}


def change(path, edit):
    """Edit the manifest as somebody would who knows the format."""
    text = json.loads((path / checkpoint.MANIFEST).read_text())
    edit(text)
    text["digest"] = manifest.digest(text)
    (path / checkpoint.MANIFEST).write_text(json.dumps(text))


def refused(path, match):
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(checkpoint.read(path))
    assert checkpoint.newest(path.parent)[0] is None


def entry(**fields):
    return lambda text: text["tensors"][0].update(fields)


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (entry(file="../../part"), "expected file names inside it, got '../../part'"),
        (entry(file="/etc/passwd"), "expected file names inside it"),
        (entry(file="part\0"), "expected file names inside it"),
        (entry(file="manifest.json"), "expected file names inside it"),
        (entry(file=["part"]), "expected file names inside it"),
        (entry(name=""), "expected names of tensors"),
        (entry(name="a" * 5000), "expected names of tensors"),
        (entry(dtype="object"), "expected a dtype of .* for weights/a, got 'object'"),
        (entry(dtype="O"), "expected a dtype"),
        (entry(dtype={"names": []}), "expected a dtype"),
        (entry(dtype="float64"), "expected weights/a as the manifest says|less than the manifest says"),
        (entry(shape=[4, 3]), None),
        (entry(shape=[3, -4]), "expected a shape"),
        (entry(shape=[2**40, 2**40]), "expected a shape that some machine can hold"),
        (entry(shape=[2**40, 2**40, 0]), "expected a shape that some machine can hold"),
        (entry(shape=[1] * 40), "expected a shape"),
        (entry(shape=[True, 12]), "expected a shape"),
        (entry(shape=[3.0, 4]), "expected a shape"),
        (entry(shape=[2**30, 2**10], stop=2**40), "less than the manifest says"),
        (entry(stop=11), "expected ranges that cover 12 elements of weights/a, got 11"),
        (entry(stop=13), "expected ranges that cover 12 elements of weights/a, got 13"),
        (entry(start=1), "expected ranges that cover weights/a once, got 1 to 12 after 0"),
        (entry(start=-1), "start is -1"),
        (entry(start=2**70), "start is"),
        (entry(stop=False), "stop is False"),
        (entry(sha256="0" * 64), "expected intact bytes of weights/a"),
        (entry(sha256="g" * 64), "expected a SHA-256"),
        (entry(sha256=None), "expected a SHA-256"),
        (lambda text: text["tensors"].append(dict(text["tensors"][0])), "expected one piece called weights/a"),
        (
            lambda text: text["tensors"].append(dict(text["tensors"][0], file="part-00001.safetensors")),
            "expected ranges that cover weights/a once, got 0 to 12 after 12",
        ),
        (lambda text: text.update(tensors={}), "torn one"),
        (lambda text: text.update(tensors=[7]), "torn one"),
        (lambda text: text.update(tensors=[{}]), "torn one"),
        (lambda text: text.update(state=[]), "torn one"),
        (lambda text: text.update(step=-1), "step is -1"),
        (lambda text: text.update(serial="7"), "serial is 7"),
        (lambda text: text.update(metrics={"loss": "low"}), "metric loss is 'low'"),
        (lambda text: text.update(version="1"), "version is 1"),
        (lambda text: text.update(version=99), "expected version 1 or older, got 99; it was written by a newer mpdp"),
        (lambda text: text.update(format="other"), "expected a manifest of format 'mpdp-checkpoint'"),
    ],
)  # fmt: skip
def test_a_manifest_that_knows_the_format_is_refused(path, edit, match):
    change(path, edit)
    if match is None:  # the same bytes in another shape do no harm
        assert checkpoint.load(checkpoint.read(path))["weights/a"].shape == (4, 3)
    else:
        refused(path, match)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_numbers_that_are_none_are_refused(path, number):
    text = (path / checkpoint.MANIFEST).read_text().replace('"loss": 0.5', f'"loss": {number}')
    assert number in text
    (path / checkpoint.MANIFEST).write_text(text)
    refused(path, "torn one")


def test_a_manifest_of_any_size_is_not_read(path):
    with open(path / checkpoint.MANIFEST, "r+b") as file:
        file.truncate(manifest.MOST_BYTES + 1)  # takes no room on the disk
    refused(path, "more than 268435456")


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "directory"])
def test_only_regular_files_are_opened(path, tmp_path, name, kind):
    moved = tmp_path / "elsewhere"
    os.rename(path / name, moved)
    if kind == "link":
        (path / name).symlink_to(moved)
    elif kind == "dangling":
        (path / name).symlink_to(tmp_path / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path / name)  # to open it would wait for ever
    else:
        (path / name).mkdir()
    refused(path, "no regular file")


def test_what_a_link_among_the_checkpoints_leads_to_is_never_removed(path, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("")
    other = tmp_path / "other"
    os.rename(checkpoint.write(tmp_path / "more", 1, TENSORS, {}), other)
    (path.parent / ".tmp-1-1").symlink_to(precious)
    (path.parent / "step-0000000001-000000").symlink_to(other)
    checkpoint.write(path.parent, 8, TENSORS, {})
    checkpoint.prune(path.parent, 1)
    assert (precious / "file").exists() and checkpoint.load(checkpoint.read(other))
    assert [entry.name[:15] for entry in path.parent.iterdir()] == ["step-0000000008"]


class Attack:
    def __reduce__(self):
        return (os.mkdir, ("attacked",))


@pytest.mark.parametrize("name", ["manifest.json", "part-00000.safetensors"])
def test_pickle_is_never_loaded(path, name, monkeypatch):
    monkeypatch.chdir(path.parent.parent)
    (path / name).write_bytes(pickle.dumps(Attack()))
    with pytest.raises(CheckpointError):
        checkpoint.load(checkpoint.read(path))
    np.save(path / name, np.array([Attack()], dtype=object))
    os.rename(path / f"{name}.npy", path / name)
    with pytest.raises(CheckpointError):
        checkpoint.load(checkpoint.read(path))
    assert not Path("attacked").exists()


def test_no_module_that_reads_files_of_a_run_knows_how_to_unpickle():
    for file in Path(checkpoint.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [getattr(node, "module", "")]
            if isinstance(node, ast.Import | ast.ImportFrom):
                names += [alias.name for alias in node.names]
            assert not {"pickle", "shelve", "marshal", "dill", "joblib"} & set(names), file
            assert getattr(node, "arg", None) != "allow_pickle", file


# -- fuzzing

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
    | st.sampled_from([-1, 2**31, 2**63, 2**64, "..", "/", "part-00000.safetensors", "float32", [0], {}]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


def places(value, at=()):
    """Yield where each part of a JSON value stands."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*at, key))


def replaced(value, at, new):
    if not at:
        return new
    found = copy.copy(value)
    found[at[0]] = replaced(value[at[0]], at[1:], new)
    return found


def attempt(path):
    """Load a checkpoint that was tampered with: what was written, or the error, and nothing else."""
    try:
        return checkpoint.load(checkpoint.read(path))
    except CheckpointError as error:
        assert str(path) in str(error)
        return None


@FEW
@given(st.binary(max_size=300))
def test_any_bytes_for_a_manifest(path, content):
    (path / checkpoint.MANIFEST).write_bytes(content)
    assert attempt(path) is None


@FEW
@given(st.data())
def test_any_value_anywhere_in_a_manifest(path, pristine, data):
    text = json.loads(pristine[checkpoint.MANIFEST])
    at = data.draw(st.sampled_from([place for place in places(text) if place and place[0] != "digest"]))
    changed = replaced(text, at, data.draw(VALUES))
    changed["digest"] = manifest.digest(changed)
    (path / checkpoint.MANIFEST).write_text(json.dumps(changed))
    found = attempt(path)
    if found is not None:  # it may have got another name or shape, but never other bytes
        written = {array.tobytes() for array in TENSORS.values()}
        assert all(array.tobytes() in written for array in found.values())


@FEW
@given(st.data())
def test_any_change_to_a_part(path, pristine, data):
    part = path / "part-00000.safetensors"
    content = pristine[part.name]
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, min(len(content), start + 16)))
    part.write_bytes(content[:start] + data.draw(st.binary(max_size=16)) + content[stop:])
    found = attempt(path)
    assert found is None or all(np.array_equal(found[name], array) for name, array in TENSORS.items())


@FEW
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=5), st.integers(0, 8))
def test_ranges_are_accepted_where_they_cover_each_element_once(ranges, size):
    pieces = [Piece("t", (size,), "int8", a, b, f"f{i}", "") for i, (a, b) in enumerate(ranges)]
    counts = np.zeros(size + 8, dtype=int)
    for a, b in ranges:
        counts[a:b] += 1
    right = bool(ranges) and all(b > a for a, b in ranges) and (counts == (np.arange(size + 8) < size)).all()
    right = right or (size == 0 and ranges == [(0, 0)]) or not ranges
    try:
        manifest.check_cover(pieces)
        accepted = True
    except CheckpointError:
        accepted = False
    assert accepted == right


KEYS = st.text().filter(lambda key: not key.startswith("__mpdp_"))  # pack() refuses these
STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@FEW
@given(STATES)
def test_a_state_survives_to_the_bit(value):
    arrays = {}
    text = json.dumps(manifest.pack(value, "x", arrays, "y"), allow_nan=False)
    assert repr(manifest.unpack(json.loads(text), arrays)) == repr(value)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def trainer():
        mpdp.seed(0)
        return mpdp.Trainer(
            nn.models.mlp((4, 3)), nn.cross_entropy, optim.Adam(lr=0.1), precision="float16", run_dir=folder
        )

    folder = tmp_path_factory.mktemp("run")
    t = trainer()
    t.fit(mpdp.data.ArrayDataset(np.ones((6, 4), "float32"), np.zeros(6, int)), epochs=2, global_batch_size=4)
    path = t.save()
    return trainer, path, json.loads((path / checkpoint.MANIFEST).read_text())


@FEW
@given(st.data())
def test_any_value_anywhere_in_a_state_is_refused_before_anything_is_changed_or_taken(run, data):
    build, path, text = run
    at = data.draw(st.sampled_from([place for place in places(text["state"]) if place]))
    changed = copy.deepcopy(text)
    changed["state"] = replaced(text["state"], at, data.draw(VALUES))
    changed["digest"] = manifest.digest(changed)
    (path / checkpoint.MANIFEST).write_text(json.dumps(changed))
    t = build()
    before = t.parallel.weights.tobytes(), t.step_count, t.epoch, t.parallel.loss_scale.state()
    try:
        assert t.resume(path)
    except CheckpointError as error:
        assert "nothing was loaded" in str(error)
        assert before == (t.parallel.weights.tobytes(), t.step_count, t.epoch, t.parallel.loss_scale.state())
    else:
        assert math.isfinite(t.position.loss_sum) or not math.isfinite(text["state"]["position"]["loss_sum"])
