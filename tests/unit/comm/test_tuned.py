"""Measured sizes: their file, what may be wrong with it, whose copy counts, and that no bit depends on them."""

import json
import re
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from thread_ranks import run

import mpdp
from mpdp.comm import tuned
from mpdp.comm.solo import SoloCommunicator

MACHINE = {"processor": "a processor", "cores": 8, "ranks": 4, "nodes": 1, "mpi": "MPICH 4.3.0"}
SIZES = {"small_bytes": 4096, "piece_bytes": 128 << 10, "chunk_bytes": 2 << 20}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mpdp"


def read(transport="shared_memory", machine=MACHINE):
    """Return what is read, and the warnings."""
    warnings = []
    return tuned.read(transport, machine, warnings.append), warnings


def test_what_is_written_is_read(cache):
    assert read() == ({}, [])
    path = tuned.write("shared_memory", MACHINE, SIZES)
    assert path.parent == cache
    assert read() == (SIZES, [])
    tuned.write("shared_memory", MACHINE, {"small_bytes": 64})
    assert read() == ({"small_bytes": 64}, [])
    assert [entry.name for entry in cache.iterdir()] == [path.name]


@pytest.mark.parametrize("field", [*MACHINE, "gpu"])
def test_other_hardware_has_sizes_of_its_own(field):
    tuned.write("shared_memory", MACHINE, SIZES)
    assert read(machine=MACHINE | {field: 3}) == ({}, [])
    assert read("mpi") == ({}, [])


def test_each_transport_has_its_own():
    tuned.write("shared_memory", MACHINE, SIZES)
    tuned.write("mpi", MACHINE, {"piece_bytes": 1 << 20})
    tuned.write("cuda_ipc", MACHINE | {"gpu": "a GPU"}, {"small_bytes": 64, "chunk_bytes": 8 << 20})
    assert read("mpi") == ({"piece_bytes": 1 << 20}, [])
    assert read() == (SIZES, [])


def sealed(**changes):
    """Return the text of a file that is right but for some fields; its checksum fits."""
    content = {"format": 1, "transport": "shared_memory", "hardware": MACHINE, "sizes": SIZES} | changes
    return json.dumps(content | {"digest": tuned._digest(content)}).encode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "expected JSON"),
        (sealed()[:-9], "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (b"[]", "expected an object, got list"),
        (b"{}", "does not fit its checksum"),
        (sealed().replace(b"4096", b"8192"), "does not fit its checksum"),
        (sealed(format=2), "expected format 1, got 2"),
        (sealed(transport="mpi"), "of another transport or hardware"),
        (sealed(hardware=MACHINE | {"ranks": 2}), "of another transport or hardware"),
        (sealed(sizes=[]), r"expected sizes by name, got \[\]"),
        (sealed(sizes={"small": 64}), "expected some of small_bytes, piece_bytes, chunk_bytes, got 'small'"),
        (
            sealed(sizes={"small_bytes": 65}),
            r"expected small_bytes to be a multiple of 64 in 64\.\.262144, got 65",
        ),
        (sealed(sizes={"small_bytes": 1 << 40}), "got 1099511627776"),
        (sealed(sizes={"small_bytes": -64}), "got -64"),
        (sealed(sizes={"small_bytes": 64.0}), r"got 64\.0"),
        (sealed(sizes={"small_bytes": "64"}), "got '64'"),
    ],
)
def test_a_broken_file_is_named_and_left_aside(text, why):
    path = tuned.write("shared_memory", MACHINE, SIZES)
    path.write_bytes(text)
    sizes, (warning,) = read()
    assert sizes == {}
    assert f"{path} is broken (" in warning and "delete it, or measure again" in warning
    assert re.search(why, warning), warning


def test_the_sealed_file_of_these_tests_is_right_without_changes():
    tuned.write("shared_memory", MACHINE, SIZES).write_bytes(sealed())
    assert read() == (SIZES, [])


def test_what_cannot_be_read_is_named(cache):
    path = tuned.path_of("shared_memory", MACHINE)
    path.mkdir(parents=True)
    sizes, (warning,) = read()
    assert sizes == {} and f"expected a readable {path}" in warning


@pytest.mark.parametrize("sizes", [{}, {"small_bytes": 1}, {"pieces": 64}, {"chunk_bytes": True}])
def test_sizes_that_would_be_refused_are_not_written(sizes, cache):
    with pytest.raises(ValueError, match="expected"):
        tuned.write("shared_memory", MACHINE, sizes)
    assert not cache.exists()


def test_the_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert tuned.folder({"XDG_CACHE_HOME": "/there"}) == Path("/there/mpdp")
    for unset in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):  # as the specification wants
        assert tuned.folder(unset) == tmp_path / ".cache" / "mpdp"


def test_without_a_home_there_are_no_sizes(monkeypatch):
    def nowhere():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert read() == ({}, [])


@pytest.mark.parametrize("size", [2, 3])
def test_rank_0_alone_reads_and_all_use_its_copy(monkeypatch, size):
    readers, original = set(), tuned.read

    def reading(*arguments):
        readers.add(threading.get_ident())
        return original(*arguments)

    monkeypatch.setattr(tuned, "read", reading)
    for rank in range(size):
        machine = MACHINE | {"cores": rank}
        tuned.write("shared_memory", machine, {"small_bytes": 64 * (rank + 1)})
        tuned.write("mpi", machine, {"piece_bytes": (1 << 20) + 64 * rank})
    tuned.path_of("shared_memory", MACHINE | {"cores": 1}).write_text("broken")
    said, threads = [], {}

    def body(comm):
        threads[comm.rank] = threading.get_ident()
        return tuned.agreed(
            comm, MACHINE | {"cores": comm.rank}, lambda *line: said.append((comm.rank, *line))
        )

    expected = {"shared_memory": {"small_bytes": 64}, "mpi": {"piece_bytes": 1 << 20}}
    assert run(size, body) == [expected] * size
    assert readers == {threads[0]}
    assert said == []


def test_a_broken_file_of_rank_0_is_a_warning():
    tuned.write("shared_memory", MACHINE, SIZES).write_text("broken")
    said = []
    assert tuned.agreed(SoloCommunicator(), MACHINE, lambda *line: said.append(line)) == {}
    assert [level for level, _ in said] == ["warning"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_bit_depends_on_the_sizes(size, dtype):
    """Sums are in the order of ranks in one phase and two, in slices and pieces, mapped and copied."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    lengths = (3, 1000, 5000, 33_333)

    def reduce(comm):
        found = []
        for length in lengths:
            random = np.random.default_rng([comm.rank, length])
            values = (random.standard_normal(length) * 10.0 ** random.integers(-3, 3, length)).astype(kind)
            mapped = comm.allocate(length * kind.itemsize).array(kind, length)
            for array in (mapped, np.empty_like(values)):
                array[...] = values
                comm.all_reduce(array)
                found.append(array.tobytes())
                array[...] = values
                comm.start_all_reduce(array).wait()
                found.append(array.tobytes())
        return found

    ways = [
        run(size, reduce, small_bytes=small, piece_bytes=piece)
        for small, piece in ((64, 4096), (8192, 4160), (256 << 10, 4 << 20))
    ]
    assert ways[0] == ways[1] == ways[2]
    assert all(rank == ways[0][0] for rank in ways[0])


def test_no_bit_depends_on_the_chunks():
    def reduce(comm):
        found = []
        for chunk_bytes, edge in ((16 << 10, 1), (100_000, 3), (1 << 20, 4)):
            comm.chunk_bytes, comm.chunk_edge = chunk_bytes, edge
            arena = mpdp.GradientArena({"w": (50_000,), "b": (1000,)}, "float32", "cpu", comm=comm)
            reducer = mpdp.Reducer(arena)
            random = np.random.default_rng(comm.rank)
            arena["w"][...], arena["b"][...] = random.standard_normal(50_000), random.standard_normal(1000)
            reducer.finish()
            found.append((len(reducer.chunks), arena.array.tobytes()))
        assert len({count for count, _ in found}) == 3
        return [content for _, content in found]

    results = run(3, reduce)
    assert len({content for found in results for content in found}) == 1


def test_nothing_half_written_is_left(monkeypatch, cache):
    def full(path, target):
        raise OSError("no space left")

    tuned.check_folder()
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space left"):
        tuned.write("shared_memory", MACHINE, SIZES)
    assert list(cache.iterdir()) == []
