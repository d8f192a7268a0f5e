"""Convolutions and norms in 16 bits, over ranks."""

import numpy as np
import pytest
from launching import PROGRAMS

PROGRAM = PROGRAMS / "layers_precision.py"


@pytest.fixture(scope="module")
def exact(request):
    """Losses and running statistics in float32 at one rank."""
    from launching import launch

    return launch(PROGRAM, "float32", n=1, form="python").check().results[0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 2.0**-7), ("float16", 2.0**-10)])
def test_a_network_with_norms_in_16_bits(job, exact, precision, tolerance, size):
    """Norms keep float32 weights and statistics; replicas hold equal bits (checked in the program)."""
    results = job(PROGRAM, precision, n=size, form="mpirun" if size > 1 else "python").check().results
    for result in results:
        assert result == results[0]
        assert result["dtypes"] == ["float32"]
        np.testing.assert_allclose(result["losses"], exact["losses"], rtol=tolerance)
        np.testing.assert_allclose(result["running"], exact["running"], rtol=8 * tolerance, atol=tolerance)
    assert results[0]["losses"] != exact["losses"]
    assert results[0]["losses"][-1] < results[0]["losses"][0]


@pytest.mark.parametrize("size", [1, 3])
def test_batch_norm_that_runs_again_in_backward(job, size):
    """It takes the statistics of the first time, without a message; its running statistics move once."""
    form = "mpirun" if size > 1 else "python"
    kept = job(PROGRAM, "float32", n=size, form=form).check().results
    again = job(PROGRAM, "float32", "again", n=size, form=form).check().results
    assert again == kept
