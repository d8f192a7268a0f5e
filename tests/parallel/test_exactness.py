"""n ranks compute what a plain NumPy loop computes on the whole global batch."""

import json

import numpy as np
import pytest
import reference
from launching import PROGRAMS

KINDS = [("float64", "sgd"), ("float64", "adamw"), ("float32", "sgd")]
TOLERANCE = {
    ("cpu", "float64"): 1e-12,
    ("cpu", "float32"): 1e-5,
    ("cuda", "float64"): 1e-10,
    ("cuda", "float32"): 1e-4,
}


@pytest.fixture(scope="module")
def expected():
    """Train with plain NumPy, once for each dtype and optimizer."""
    results = {}

    def train(dtype, kind):
        if (dtype, kind) not in results:
            x, y = reference.digits(dtype)
            x, y = x[:301], y[:301]
            params = reference.weights(1, dtype)
            update = {
                "sgd": reference.Sgd(0.1, 0.9, 1e-3, nesterov=True),
                "adamw": reference.AdamW(3e-3, weight_decay=0.05),
            }[kind]
            losses, epochs = reference.train(
                params,
                x,
                y,
                update,
                seed=3,
                batch=53,
                updates=20,
                accumulate=3,
                clip=0.5,
                schedule=lambda t: (t + 1) / 5 if t < 5 else (40 - t) / 35,
            )
            loss, count, _, logits = reference.loss_and_gradients(params, x[:101], y[:101], None)
            correct = int((logits.argmax(axis=1) == y[:101]).sum())
            results[dtype, kind] = params, losses, epochs, loss / count, correct
        return results[dtype, kind]

    return train


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_ranks_equal_a_plain_loop(job, expected, tmp_path, size, dtype, kind):
    check(job, expected, tmp_path, size, dtype, kind, "cpu")


@pytest.mark.parametrize(("size", "dtype", "kind"), [(3, "float64", "adamw"), (4, "float32", "sgd")])
def test_ranks_over_mpi_equal_a_plain_loop(job, expected, tmp_path, size, dtype, kind):
    check(job, expected, tmp_path, size, dtype, kind, "cpu", "mpi")


@pytest.mark.parametrize(
    ("size", "dtype", "kind"), [(2, "float64", "sgd"), (3, "float64", "adamw"), (4, "float32", "sgd")]
)
def test_ranks_on_two_nodes_equal_a_plain_loop(job, expected, tmp_path, size, dtype, kind):
    check(job, expected, tmp_path, size, dtype, kind, "cpu", "two_level", "2")


@pytest.mark.parametrize(
    ("transport", "size"),
    [("auto", 1), ("cuda_ipc", 2), ("cuda_ipc", 3), ("cuda_ipc", 4), ("staged", 2), ("staged", 3)],
)
@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_ranks_on_a_gpu_equal_a_plain_loop(gpu, job, expected, tmp_path, transport, size, dtype, kind):
    """Several ranks may share one GPU; gradients travel through memory that all have mapped, or through the host."""
    check(job, expected, tmp_path, size, dtype, kind, "cuda", transport)


def check(job, expected, tmp_path, size, dtype, kind, device, transport="auto", nodes=None):
    params, losses, epochs, loss, correct = expected(dtype, kind)
    words = dtype, kind, tmp_path, device
    environ = {"MPDP_TRANSPORT": transport, "MPDP_NODES": nodes}
    job(PROGRAMS / "exactness.py", *words, n=size, timeout=120, environ=environ).check()
    result = json.loads((tmp_path / f"n{size}.json").read_text())
    arrays = np.load(tmp_path / f"n{size}.npz")
    tolerance = TOLERANCE[device, dtype]
    assert result["size"] == size
    assert len(result["losses"]) == len(losses)
    assert reference.relative(result["losses"], losses) <= tolerance
    assert reference.relative([row["loss"] for row in result["history"]], epochs) <= tolerance
    for name, array in zip(arrays.files, params):
        assert arrays[name].dtype == dtype
        assert reference.relative(arrays[name], array) <= tolerance
    assert reference.relative([result["loss"]], [loss]) <= tolerance
    assert result["accuracy"] == correct / 101
    assert result["correct"] == [correct, 101]
