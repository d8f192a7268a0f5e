"""Shared memory in trouble: ``shared_memory.py CASE [TRANSPORT]``; see test_shared_memory.py for what is expected."""

import os
import re
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
from launching import fault, record

import mpdp
from mpdp.comm import mapping
from mpdp.comm.blocks import Combiner

CASE, TRANSPORT = sys.argv[1], (sys.argv[2:] or ["auto"])[0]
RANK = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))


def forbid(name, above=0):
    """Make one way of sharing fail on the last rank, for more than so many bytes."""
    way = getattr(mapping, name)

    def refuse(*arguments):
        if arguments[-1] > above and world_rank() == world_size() - 1:
            raise PermissionError(f"{name} is forbidden")
        return way(*arguments)

    setattr(mapping, name, refuse)


def world_rank():
    return RANK


def world_size():
    return int(os.environ.get("PMI_SIZE", os.environ.get("OMPI_COMM_WORLD_SIZE", "1")))


def maps():
    """Return the inodes of the memory files that this process maps."""
    text = Path("/proc/self/maps").read_text()
    return sorted(set(re.findall(r"(\d+) +/memfd:mpdp", text)))


def files():
    """Return how many descriptors of memory files are open."""
    links = Path("/proc/self/fd").iterdir()
    return sum("memfd:mpdp" in os.readlink(link) for link in links if link.is_symlink())


def in_huge_pages():
    """Return how many KiB of memory files this process has mapped in huge pages."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = "/memfd:mpdp" in line
        elif ours and line.startswith("ShmemPmdMapped:"):
            total += int(line.split()[1])
    return total


def check(comm, nbytes=8 << 20):
    """All-reduce memory of ``allocate`` and private memory, each in one piece and in a slice off its start."""
    count = nbytes // 8
    for array in (comm.allocate(nbytes).array(np.float64, count), np.zeros(count)):
        for part in (array, array[3:1003], array[5:]):
            part[...] = comm.rank + 1
            comm.all_reduce(part)
            assert np.all(part == comm.size * (comm.size + 1) / 2)


if CASE == "window":
    forbid("_open")
elif CASE == "refused":
    forbid("_open")
    forbid("_free_bytes")
elif CASE == "private":
    forbid("_open", above=4 << 20)
    forbid("_free_bytes", above=4 << 20)

elif CASE == "ordinary pages":
    if TRANSPORT == "refused":
        mapping._COLLAPSE = -1  # no advice that a kernel knows
    elif TRANSPORT == "missing":
        mapping._THP = "/nowhere"
    else:
        folder = tempfile.TemporaryDirectory()
        setting = Path(folder.name, "enabled")
        setting.write_text("always madvise [never]\n")
        mapping._THP = str(setting)
    TRANSPORT = "auto"

world = mpdp.init(transport=TRANSPORT)
comm = world.axis("data")

if CASE == "killed":
    array = comm.allocate(8 << 20).array(np.float64, 1 << 20)
    record(maps())
    comm.barrier()  # all have, before one dies
    name = "combine" if TRANSPORT == "auto" else "combine_few"
    if world.rank == 1:
        setattr(Combiner, name, lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
        fault()
    world.activity.step = 3
    comm.all_reduce(array if name == "combine" else array[:10])
    comm.all_reduce(array[:10])  # a rank needs no answer to its part of the last one
elif CASE == "freed":
    before = maps()
    buffers = [comm.allocate(1 << 20) for _ in range(3)]
    assert len(maps()) == len(before) + 3 * world.size
    assert files() == 0
    view = buffers[1].array(np.float32, 10)
    del buffers
    assert len(maps()) == len(before) + world.size
    del view
    assert maps() == before
    check(comm)
    record([world.transport, comm.way, maps()])
elif CASE in ("huge pages", "ordinary pages"):
    small, large = comm.allocate(100_000), [comm.allocate(nbytes) for nbytes in (1 << 20, (4 << 20) + 1)]
    check(comm)
    for buffer in (small, *large):
        array = buffer.array(np.uint8, buffer.nbytes)
        assert not array.any()
        array[...] = 1
        comm.all_reduce(array)
        assert np.all(array == world.size)
    record(in_huge_pages())
elif CASE == "duplicates":
    for _ in range(20):
        other = comm.duplicate()
        check(other, 1 << 16)
        other.close()
    record(len(maps()))
else:
    check(comm, (24 if CASE == "small" else 8) << 20)
    record([world.transport, getattr(comm, "way", None), maps()])
