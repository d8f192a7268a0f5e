"""The ceiling of products: a plausible rate for each dtype, and one error."""

import pytest
from on_device import here

from mpdp.bench.ceiling import product_rate


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", ["float32", "float64", "tf32"])
def test_rates_are_plausible(dtype):
    rate = product_rate(here.device, dtype, seconds=0.02)
    assert 1e8 < rate < 1e16


def test_unknown_dtype():
    with pytest.raises(ValueError, match=r"dtype: expected one of bfloat16, .*, got 'int8'"):
        product_rate("cpu", "int8")
