"""Free memory of GPUs, and pieces placed by it."""

import sys

import fake_gpus
import pytest

import mpdp
from mpdp.device import Device
from mpdp.device_memory import DeviceInfo, devices, identity, place

GIB = 1 << 30


def gpus(*free, total=100):
    return [DeviceInfo(Device("cuda", i), "GPU", "", f, total) for i, f in enumerate(free)]


def names(placed):
    return [device.ordinal for device in placed]


def test_most_free_takes_the_longest_first():
    assert names(place([20, 40, 30], among=gpus(60, 90))) == [1, 1, 0]
    assert names(place([10, 10, 10, 10], among=gpus(80, 80))) == [0, 1, 0, 1]
    assert names(place([5, 70], among=gpus(90, 50))) == [1, 0]
    assert place([], among=[]) == [] and mpdp.place is place


def test_round_robin_goes_round_those_with_room():
    assert names(place([10, 10, 10], "round_robin", among=gpus(80, 80))) == [0, 1, 0]
    assert names(place([50, 50, 10, 10], "round_robin", among=gpus(60, 20, 90))) == [0, 2, 1, 2]


def test_a_margin_stays_free():
    assert names(place([50], among=gpus(60), margin=0.1)) == [0]
    with pytest.raises(ValueError, match=r"expected piece 0"):
        place([51], among=gpus(60), margin=0.1)
    assert names(place([60], among=gpus(60), margin=0.0)) == [0]
    assert names(place([0], among=gpus(5))) == [0]


def test_what_fits_nowhere_is_shown_in_a_table():
    with pytest.raises(ValueError) as caught:
        place([60 * GIB, 40 * GIB, 50 * GIB], among=gpus(80 * GIB, 70 * GIB, total=100 * GIB))
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        "sizes: expected piece 1 of 40.00 GiB to fit on a GPU beside the others (a margin of 10% stays free), "
        "got none with room; make pieces smaller or use more GPUs"
    )
    assert [line.split() for line in lines[1:]] == [
        ["cuda:0", "GPU", "80.00", "free", "10.00", "left", "of", "100.00", "GiB"],
        ["cuda:1", "GPU", "70.00", "free", "10.00", "left", "of", "100.00", "GiB"],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], "best"), r"policy: expected one of most_free, round_robin, got 'best'"),
        (([-1],), r"sizes: expected bytes of 0 or more, got -1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        place(*arguments, among=gpus(10))
    with pytest.raises(ValueError, match=r"margin: expected a share in \[0, 1\), got 1.0"):
        place([1], among=gpus(10), margin=1.0)
    with pytest.raises(ValueError, match=r"devices: expected a GPU at least, got none; see mpdp.devices"):
        place([1], among=[])


def test_devices_of_a_machine_without_cupy_or_driver(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert devices() == []
    fake_gpus.install(monkeypatch, "no driver")
    assert devices() == []
    fake_gpus.install(monkeypatch, 0)
    assert devices() == []


def test_devices_without_nvml_ask_cuda(monkeypatch):
    fake_gpus.install(monkeypatch, 2)
    monkeypatch.setattr("mpdp.device_memory.ctypes.CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    first, second = devices()
    assert first == DeviceInfo(Device("cuda:0"), "Fake", "", 11 * GIB, 16 * GIB)  # a GiB lies in the pool
    assert second == DeviceInfo(Device("cuda:1"), "Fake", "", 9 * GIB, 16 * GIB)
    assert identity(first.device) != identity(second.device) and len(identity(first.device)) == 64


def test_devices_ask_nvml_first(monkeypatch):
    fake_gpus.install(monkeypatch, 2)
    asked = []

    class Nvml:
        def nvmlInit_v2(self):
            return 0

        def nvmlShutdown(self):
            asked.append("shutdown")

        def nvmlDeviceGetHandleByPciBusId_v2(self, bus, handle):
            asked.append(bus)
            return 0 if bus == b"0000:00:00.0" else 6

        def nvmlDeviceGetUUID(self, handle, text, length):
            text.value = b"GPU-12"
            return 0

        def nvmlDeviceGetMemoryInfo(self, handle, memory):
            memory._obj.free, memory._obj.total = 3 * GIB, 16 * GIB
            return 0

    monkeypatch.setattr("mpdp.device_memory.ctypes.CDLL", lambda name: Nvml())
    first, second = devices()
    assert (first.uuid, first.free, first.total) == ("GPU-12", 4 * GIB, 16 * GIB)
    assert (second.uuid, second.free) == ("", 9 * GIB)
    assert asked == [b"0000:00:00.0", b"0000:01:00.0", "shutdown"]
