"""CUDA IPC between ranks of one node; several ranks may share one GPU. See programs/cuda_ipc.py.

Without CUDA's MPS ranks that share a GPU take turns on it, and each barrier takes milliseconds: right, but slow.
"""

import json
import re
import time

import pytest
import traces
from launching import PROGRAMS

from mpdp.comm.tuned import TUNABLE

CUDA_IPC = {"MPDP_TRANSPORT": "cuda_ipc"}


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective(gpu, job, size):
    result = job(PROGRAMS / "cuda_ipc.py", n=size, timeout=300, environ=CUDA_IPC).check()
    assert result.output.count("all passed on rank") == size
    assert result.output.count("transport cuda_ipc (as asked for)") == 1


def test_a_world_of_one(gpu, job):
    result = job(PROGRAMS / "cuda_ipc_one.py", n=1, form="python", timeout=120).check()
    assert "cuda_ipc passed" in result.output
    assert "nccl passed" in result.output or "nccl missing: nccl: expected" in result.output


@pytest.mark.parametrize(
    ("transport", "size"), [("cuda_ipc", 1), ("cuda_ipc", 2), ("cuda_ipc", 3), ("nccl", 1)]
)
def test_a_step_in_a_graph(gpu, job, transport, size):
    form = "python" if size == 1 else "mpirun"
    result = job(PROGRAMS / "captured.py", transport, n=size, form=form, timeout=120).check()
    assert result.output.count(f"over {transport}") == size


@pytest.mark.parametrize("size", [2, 3])
def test_the_timeline_has_a_row_of_each_lanes_kernels(gpu, job, size, tmp_path):
    words = [
        "bench",
        "train",
        "mlp",
        "--device",
        "cuda",
        "--quick",
        "--batch",
        "8",
        "--trace",
        tmp_path / "trace.json",
    ]
    job(PROGRAMS / "command.py", *words, n=size, timeout=120, environ=CUDA_IPC).check()
    events = traces.load(tmp_path / "trace.json", size)["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    kernels = {(e["pid"], rows[e["pid"], e["tid"]], e["name"]) for e in events if e["ph"] == "X"}
    assert {(rank, "stream bulk", "chunk 0") for rank in range(size)} <= kernels


@pytest.mark.parametrize(("transport", "size"), [("cuda_ipc", 2), ("cuda_ipc", 4), ("staged", 3)])
def test_training_equals_that_on_the_cpu(gpu, job, size, transport):
    result = job(
        PROGRAMS / "gpu_twins.py", n=size, timeout=300, environ={"MPDP_TRANSPORT": transport}
    ).check()
    assert result.output.count("all passed on rank") == size
    assert len(re.findall(rf"transport {transport}\S* \(as asked for\)", result.output)) == 1


def test_auto_says_once_what_it_took_and_why(gpu, job):
    result = job(PROGRAMS / "gpu_where.py", n=2, timeout=60).check()
    reason = r"transport cuda_ipc \(all ranks are on one node and have each other's GPU memory mapped\)"
    assert len(re.findall(reason, result.output)) == 1


def test_tuning_is_kept_for_the_next_start(gpu, job, tmp_path):
    environ = {**CUDA_IPC, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = [
        "bench",
        "all-reduce",
        "--tune",
        "--device",
        "cuda",
        "--quick",
        "--json",
        tmp_path / "tuned.json",
    ]
    job(PROGRAMS / "command.py", *words, n=2, timeout=120, environ=environ).check()
    row = json.loads((tmp_path / "tuned.json").read_text())["tuned"]["cuda_ipc"]
    assert set(row["sizes"]) == set(TUNABLE["cuda_ipc"])
    assert all(seconds > 0 for seconds in row["measured"]["small_bytes"]["two_phases_us"].values())
    result = job(PROGRAMS / "gpu_where.py", n=2, timeout=60, environ=environ).check()
    sizes = ", ".join(f"{name} {size}" for name, size in row["sizes"].items())
    assert f"transport cuda_ipc (as asked for; tuned: {sizes})" in result.output, f"{result}"


def test_nccl_refuses_ranks_that_share_a_gpu(gpu, job):
    result = job(PROGRAMS / "gpu_where.py", n=3, timeout=60, environ={"MPDP_TRANSPORT": "nccl"})
    if "transport nccl" in result.output:
        pytest.skip("each rank has a GPU of its own")
    assert result.rc != 0 and not result.timed_out and not result.orphans, f"{result}"
    message = r"CommunicationError: transport: expected nccl to work, got: expected a GPU of its own for each rank, "
    assert (
        len(re.findall(rf"error .*{message}got ranks [\d, ]+ on GPU \S+ of \S+; start one", result.output))
        == 1
    )


def test_a_gpu_transport_for_cpu_ranks_is_an_error(job, tmp_path):
    program = tmp_path / "cpu.py"
    program.write_text('import mpdp\nmpdp.init(device="cpu", transport="cuda_ipc")\n')
    result = job(program, n=2)
    assert result.rc != 0 and not result.timed_out and not result.orphans, f"{result}"
    assert (
        result.output.count(
            "transport: expected auto, shared_memory, two_level or mpi on CPU ranks, got cuda_ipc"
        )
        >= 1
    )


@pytest.mark.parametrize(("how", "size"), [("eager", 2), ("graph", 3), ("host", 2), ("skip", 3)])
def test_a_rank_that_does_not_come(gpu, job, how, size):
    """The job ends in seconds, and gives back all memory of the GPU."""
    from mpdp.device import Device

    runtime = Device("cuda").xp.cuda.runtime
    before = runtime.memGetInfo()[0]
    result = job(PROGRAMS / "cuda_ipc_killed.py", how, n=size, timeout=60, form="mpdp run")
    ended = time.time()
    assert result.rc != 0 and not result.timed_out and not result.orphans, f"{result}"
    begun = float(re.search(r"begins at ([\d.]+)", result.output)[1])
    assert ended - begun < 8, f"{result}"
    if how == "skip":
        assert "expected the same collective on all ranks, got another" in result.output, f"{result}"
    else:
        assert re.search(r"rank 1\b.*(died|killed)", result.output), f"{result}"
    deadline = time.monotonic() + 5
    while runtime.memGetInfo()[0] < before - (64 << 20):
        assert time.monotonic() < deadline, (before, runtime.memGetInfo())
        time.sleep(0.1)
