"""Shared memory where it is forbidden, scarce or left behind, and a rank that dies inside a collective."""

import ctypes
import mmap
import os
import re
import shutil
import subprocess
from pathlib import Path

import launching
import pytest
from launching import PROGRAMS

PROGRAM = PROGRAMS / "shared_memory.py"
WITHIN = 10.0  # seconds from the fault to the end of the job


def mapped_anywhere(inodes):
    """Return which of the memory files any process of this machine still maps."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            found |= set(re.findall(r"(\d+) +/memfd:mpdp", path.read_text()))
        except OSError:
            continue
    return found & set(inodes)


def shm():
    return {name for name in os.listdir("/dev/shm") if "mpdp" in name}


@pytest.mark.parametrize("message", ["large", "small"])
@pytest.mark.parametrize("form", ["mpirun", "mpdp run"])
def test_a_rank_killed_inside_a_collective_ends_the_job_and_leaves_no_memory(job, message, form):
    words = ["killed"] if message == "large" else ["killed", "shared_memory"]
    before = shm()
    result = job(PROGRAM, *words, n=3, form=form)
    assert result.rc != 0 and result.seconds < WITHIN and not result.orphans, result
    if form == "mpdp run":
        # The launcher may see it first, and end the survivors before they have their say.
        told = r"rank 1 (died: .* while rank \d is in step 3 \(all_reduce\)|was the first to end)"
        assert re.search(told, result.output), result
    assert len(result.output.split("] error ")) <= 2, result
    inodes = {inode for maps in result.results for inode in maps}
    assert len(inodes) >= 9
    assert not mapped_anywhere(inodes)
    assert shm() == before


@pytest.mark.parametrize("message", ["large", "small"])
def test_a_rank_killed_inside_two_levels_ends_the_job_and_leaves_no_memory(job, message):
    """Rank 0 waits for it in the memory of their node; ranks 2 and 3 wait for their peers there inside MPI."""
    words = ["killed"] if message == "large" else ["killed", "two_level"]
    result = job(PROGRAM, *words, n=4, form="mpdp run", environ={"MPDP_NODES": "2"})
    assert result.rc != 0 and result.seconds < WITHIN and not result.orphans, result
    assert "transport two_level" in result.output
    # The launcher may see it first, and end the survivors before they have their say.
    assert re.search(r"rank 1 (died: .* while rank \d is in|was the first to end)", result.output), result
    assert len(result.output.split("] error ")) <= 2, result
    inodes = {inode for maps in result.results for inode in maps}
    assert len(inodes) >= 12
    assert not mapped_anywhere(inodes)


@pytest.mark.parametrize("size", [2, 4])
def test_memory_goes_with_its_last_view(job, size):
    result = job(PROGRAM, "freed", n=size).check()
    assert [value[:2] for value in result.results] == [["shared_memory", "memfd"]] * size
    assert not mapped_anywhere({inode for value in result.results for inode in value[2]})


def test_a_duplicate_that_is_closed_goes_with_its_memory(job):
    counts = job(PROGRAM, "duplicates", n=2).check().results
    assert max(counts) <= 10


def gives_huge_pages(nbytes=32 << 20):
    """Say whether this machine collapses a memory file into huge pages where it is asked to, at this moment."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[never]" in setting.read_text():
        return False
    library, size, length, huge = ctypes.CDLL(None), ctypes.c_size_t, nbytes + (2 << 20), 2 << 20
    library.mmap.restype = ctypes.c_void_p
    fd = os.memfd_create("probe")
    try:
        os.ftruncate(fd, nbytes)
        for start in range(0, nbytes, huge):
            os.pwrite(fd, b"x", start)
        shared, offset = mmap.MAP_SHARED, ctypes.c_long(0)
        start = library.mmap(None, size(length), 3, shared | mmap.MAP_ANONYMOUS, -1, offset)
        aligned = ctypes.c_void_p(-(-start // huge) * huge)
        library.mmap(aligned, size(nbytes), 3, shared | 0x10, fd, offset)  # MAP_FIXED
        refused = library.madvise(aligned, size(nbytes), 25)  # MADV_COLLAPSE
        library.munmap(ctypes.c_void_p(start), size(length))
    finally:
        os.close(fd)
    return not refused


def test_large_buffers_lie_in_huge_pages(job):
    if not gives_huge_pages():
        pytest.skip("this machine gives no huge pages to who asks")
    for huge in job(PROGRAM, "huge pages", n=2).check().results:
        # This rank: lanes and two buffers, 2 + 2 + 6 MiB; the other: what was touched of them, 2 + 2 + 2 at least.
        assert huge >= 16 << 10
        assert huge % 2048 == 0


@pytest.mark.parametrize("reason", ["refused", "missing", "never"])
def test_memory_lies_in_ordinary_pages_where_there_are_no_others(job, reason):
    assert job(PROGRAM, "ordinary pages", reason, n=2).check().results == [0, 0]


@pytest.mark.parametrize("transport", ["auto", "shared_memory"])
def test_a_window_of_mpi_where_files_of_other_processes_are_closed_to_us(job, transport):
    result = job(PROGRAM, "window", transport, n=3).check()
    assert result.results == [["shared_memory", "window", []]] * 3
    assert "by window" in result.output


def test_auto_takes_mpi_where_no_memory_can_be_shared_and_says_why(job):
    result = job(PROGRAM, "refused", n=3).check()
    assert [value[0] for value in result.results] == ["mpi"] * 3
    assert re.search(
        r"transport mpi \(not shared_memory: .*memfd: _open is forbidden \(on rank 2\); "
        r"shared window: _free_bytes is forbidden \(on rank 2\)\)",
        result.output,
    ), result


def test_shared_memory_that_was_asked_for_and_cannot_be_is_one_error(job):
    result = job(PROGRAM, "refused", "shared_memory", n=3)
    assert result.rc != 0 and not result.timed_out and not result.orphans, result
    assert len(re.findall(r"^\[\d/3\] error", result.output, re.MULTILINE)) == 1, result
    assert "transport: expected shared_memory to work, got: " in result.output
    assert 'use transport="auto" or "mpi"' in result.output


def test_a_buffer_that_cannot_be_mapped_is_private_and_copied(job):
    result = job(PROGRAM, "private", n=3).check()
    assert [value[:2] for value in result.results] == [["shared_memory", "memfd"]] * 3
    warnings = re.findall(
        r"warning a buffer of 8388608 bytes is private and will be copied: .*", result.output
    )
    assert len(warnings) == 1, result


def test_a_small_dev_shm_is_enough(job):
    """MPICH gives a window that is larger than /dev/shm, and dies at its first touch."""
    found = launching.mpi()
    inside = ["mount", "-t", "tmpfs", "-o", "size=32m", "none", "/dev/shm"]
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", *inside], capture_output=True).returncode:
        pytest.skip("this system does not let us mount a small /dev/shm")
    assert found is not None
    line, settings = launching.mpirun(2)
    words = " ".join(["'" + word + "'" for word in [*line, launching.sys.executable, str(PROGRAM), "small"]])
    result = launching.run(
        [unshare, "-m", "sh", "-c", f"{' '.join(inside)} && {words}"], environ=settings
    ).check()
    assert [value[:2] for value in result.results] == [["shared_memory", "memfd"]] * 2
