"""Kinds of work: names of kernels, calls of the kernels' interface, and CUPTI's records."""

import ctypes
import struct

import pytest

from mpdp.bench import cupti
from mpdp.bench.breakdown import CallClock, by_class, class_of_call, class_of_kernel
from mpdp.errors import DeviceError, MissingDependencyError


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x3_1x2_h_bz_coopB_bias_TNN", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "products"),
        ("small_product", "products"),
        ("sm90_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32", "convolution"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("triton_red_fused__to_copy_native_layer_norm_5", "fused by torch"),
        ("layer_norm_backward", "normalisation"),
        ("moments_finish", "normalisation"),
        ("few_channels_last", "layouts"),
        ("void cudnn::ops::nchwToNhwcKernel<...>", "layouts"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("sgd", "optimizer"),
        ("begin", "step record"),
        ("check_and_loss", "loss"),
        ("max_pool_backward", "pooling"),
        ("first_axis_sums", "embedding"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("collective", "communication"),
        ("memset", "copies"),
        ("gelu_backward", "elementwise"),
    ],
)
def test_class_of_a_kernel(name, kind):
    assert class_of_kernel(name) == kind


def test_sums_over_classes_are_in_order_of_size_and_lose_nothing():
    seconds = {"relu": 1.0, "small_product": 2.0, "nvjet_a": 3.0, "gelu": 0.5}
    sums = by_class(seconds)
    assert list(sums.items()) == [("products", 5.0), ("elementwise", 1.5)]
    assert by_class({"gemm": 1.0, "conv2d_backward": 4.0}, class_of_call) == {
        "convolution": 4.0,
        "products": 1.0,
    }


class Nested:
    def outer(self):
        self.inner()
        self.inner()

    def inner(self):
        pass

    def is_current(self):
        return True


def test_a_call_inside_another_belongs_to_that_one():
    ticks = iter(range(100))
    target = Nested()
    with CallClock(target, clock=lambda: float(next(ticks))) as calls:
        target.outer()
        target.inner()
        target.inner()
        target.is_current()
    assert calls.seconds == {"outer": 1.0, "inner": 2.0}
    assert not vars(target)


class FakeCupti:
    """Hands over one buffer of records when it is flushed, as CUPTI does."""

    def __init__(self, records, status=0):
        self.records, self.status = records, status
        self.enabled = set()

    def cuptiActivityRegisterCallbacks(self, requested, completed):
        self.requested, self.completed = requested, completed
        return 0

    def cuptiActivityEnable(self, kind):
        self.enabled.add(kind)
        return self.status

    def cuptiActivityDisable(self, kind):
        self.enabled.remove(kind)
        return 0

    def cuptiActivityFlushAll(self, flag):
        buffer, size, count = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self.requested(ctypes.pointer(buffer), ctypes.pointer(size), ctypes.pointer(count))
        assert buffer.value % 8 == 0 and size.value >= sum(map(len, self.records))
        self.addresses = []
        address = buffer.value
        for record in self.records:
            ctypes.memmove(address, record, len(record))
            self.addresses.append(address)
            address += len(record)
        self.completed(None, 0, buffer, size, address - buffer.value)
        return 0

    def cuptiActivityGetNextRecord(self, buffer, valid, record):
        if not self.addresses:
            return 12
        record._obj.value = self.addresses.pop(0)
        return 0


def record(kind, start, end, name=None):
    """Return a record as ``cupti_activity.h`` lays it out."""
    text = 0 if name is None else ctypes.cast(name, ctypes.c_void_p).value
    return struct.pack("<I12xQQ72xQ16x", kind, start, end, text)


def test_kernel_times_adds_up_records(monkeypatch):
    gemm = ctypes.create_string_buffer(b"nvjet_gemm")
    records = [
        record(10, 1000, 3000, gemm),
        record(1, 5000, 5500),
        record(10, 6000, 7000, gemm),
        record(2, 8000, 8100),
        record(99, 0, 10**9),
    ]
    lib = FakeCupti(records)
    monkeypatch.setattr(cupti, "load", lambda: lib)
    with cupti.KernelTimes() as times:
        assert lib.enabled == {1, 2, 10}
    assert times.seconds == pytest.approx({"nvjet_gemm": 3e-6, "memcpy": 5e-7, "memset": 1e-7})
    assert not lib.enabled and not times._buffers


def test_cupti_that_does_not_work_is_an_error(monkeypatch):
    monkeypatch.setattr(cupti, "load", lambda: FakeCupti([], status=15))
    with (
        pytest.raises(DeviceError, match="expected cuptiActivityEnable to work, got status 15"),
        cupti.KernelTimes(),
    ):
        pass


def test_cupti_that_is_missing_is_an_error(monkeypatch):
    monkeypatch.setattr(cupti, "candidates", lambda: iter(["/nowhere/libcupti.so"]))
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-cupti"):
        cupti.load()
