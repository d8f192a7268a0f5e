"""Devices as values, and arrays that must share one."""

import numpy as np
import pytest

from mpdp.device import CPU, Device, as_device, cuda, device_of, same_device
from mpdp.errors import DeviceError, DeviceMismatchError


class FakeArray:
    """Looks like an array of a GPU."""

    def __init__(self, ordinal):
        self.device = type("FakeDevice", (), {"id": ordinal})()


def test_equality_is_by_kind_and_ordinal():
    assert Device("cuda:1") == Device("cuda", 1) == cuda(1) != Device("cuda") == Device("cuda:0")
    assert Device("cpu") == CPU and len({Device("cuda", 1), Device("cuda:1"), CPU}) == 2
    assert cuda(1) is cuda(1) and [str(d) for d in (CPU, cuda(3))] == ["cpu", "cuda:3"]
    assert as_device("cuda:2") == cuda(2) and as_device(CPU) is CPU and CPU.use() is CPU


@pytest.mark.parametrize("kind", ["gpu", "cuda:", "cuda:x", "cuda:-1", ""])
def test_names_that_are_none(kind):
    with pytest.raises(ValueError, match=r'device: expected "cpu", "cuda" or "cuda:<ordinal>", got'):
        Device(kind)


def test_ordinals_and_types_that_are_none():
    for kind, ordinal in (("cuda", -1), ("cpu", 1), ("cpu:1", 0), ("cuda", "0")):
        with pytest.raises(
            ValueError, match=r"device: expected an ordinal of 0 or more \(0 on the CPU\), got"
        ):
            Device(kind, ordinal)
    with pytest.raises(TypeError, match=r'device: expected a Device or a string such as "cpu", got int'):
        as_device(0)


def test_device_of():
    assert device_of(np.zeros(2)) is CPU and device_of(np.float32(1)) is CPU and device_of(1.0) is CPU
    assert device_of(FakeArray(3)) is cuda(3)
    with pytest.raises(DeviceError, match=r"array: expected one of NumPy or CuPy, got Odd"):
        device_of(type("Odd", (), {"device": "tpu"})())


def test_arrays_must_share_a_device():
    assert same_device("add", np.zeros(1), np.zeros(2)) is CPU
    assert same_device("add", FakeArray(1), FakeArray(1), FakeArray(1)) == Device("cuda:1")
    message = (
        r"^add: expected operands on one device, got cuda:0, cuda:1, cpu; move one with tensor.to\(device\)$"
    )
    with pytest.raises(DeviceMismatchError, match=message):
        same_device("add", FakeArray(0), FakeArray(1), np.zeros(1))
