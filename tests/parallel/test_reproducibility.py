"""The table of docs/reproducibility.md: which pairs of settings give equal bits, and which agree to rounding."""

from pathlib import Path

import numpy as np
import pytest
import reference

PROGRAM = Path(__file__).parent / "programs" / "reproducibility.py"
TOLERANCE = 1e-5  # float32, 12 updates


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """Return what a job wrote: way -> (weights, losses). Equal arguments share one job."""
    done = {}

    def get(job, n, form="mpirun", **environ):
        key = n, form, tuple(sorted(environ.items()))
        if key not in done:
            path = tmp_path_factory.mktemp("job") / "outcome.npz"
            job(PROGRAM, path, n=n, form=form, environ=environ).check()
            with np.load(path) as arrays:
                ways = [name.removesuffix(" weights") for name in arrays.files if name.endswith(" weights")]
                done[key] = {way: (arrays[f"{way} weights"], arrays[f"{way} losses"]) for way in ways}
        return done[key]

    return get


def assert_equal_bits(one, other):
    assert one[0].tobytes() == other[0].tobytes()
    assert one[1].tobytes() == other[1].tobytes()


def assert_equal_to_rounding(one, other):
    assert len(one[1]) == len(other[1]) == 12
    assert reference.relative(one[0], other[0]) <= TOLERANCE
    assert reference.relative(one[1], other[1]) <= TOLERANCE


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("way", ["again", "validation", "run_dir", "pairs", "calls"])
def test_what_changes_no_bit_of_a_run(job, outcome, n, way):
    ways = outcome(job, n)
    assert_equal_bits(ways["plain"], ways[way])


def test_two_launches_repeat_each_others_bits(job, outcome):
    """Started in another form and with other hashes of strings; without PYTHONHASHSEED each rank has its own."""
    one, other = outcome(job, 3), outcome(job, 3, "mpdp run", PYTHONHASHSEED="1")
    for way in one:
        assert_equal_bits(one[way], other[way])


def test_one_process_needs_no_launcher_for_the_same_bits(job, outcome):
    one, other = outcome(job, 1), outcome(job, 1, "python")
    for way in one:
        assert_equal_bits(one[way], other[way])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_chunks(job, outcome, n):
    ways = outcome(job, n)
    assert_equal_bits(ways["plain"], ways["chunk_bytes"])


def test_chunks_over_mpi(job, outcome):
    """Of three numbers and more an MPI may add those of another cut in another order."""
    ways = outcome(job, 3, MPDP_TRANSPORT="mpi")
    assert_equal_to_rounding(ways["plain"], ways["chunk_bytes"])


def test_chunks_between_nodes(job, outcome):
    ways = outcome(job, 4, MPDP_NODES="2")
    assert_equal_bits(ways["plain"], ways["chunk_bytes"])
    assert_equal_bits(ways["plain"], ways["again"])


def test_two_launches_on_two_nodes_repeat_each_others_bits(job, outcome):
    one, other = outcome(job, 4, MPDP_NODES="2"), outcome(job, 4, MPDP_NODES="2", PYTHONHASHSEED="1")
    for way in one:
        assert_equal_bits(one[way], other[way])


def test_one_node_or_two(job, outcome):
    one, two = outcome(job, 3), outcome(job, 3, MPDP_NODES="2")
    for way in one:
        assert_equal_to_rounding(one[way], two[way])


def test_transports(job, outcome):
    """Two numbers have one sum, whoever adds them."""
    one, other = outcome(job, 2), outcome(job, 2, MPDP_TRANSPORT="mpi")
    three, others = outcome(job, 3), outcome(job, 3, MPDP_TRANSPORT="mpi")
    for way in one:
        assert_equal_bits(one[way], other[way])
        assert_equal_to_rounding(three[way], others[way])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_accumulation(job, outcome, n):
    ways = outcome(job, n)
    assert_equal_to_rounding(ways["plain"], ways["accumulate"])


@pytest.mark.parametrize("n", [2, 3])
def test_numbers_of_ranks(job, outcome, n):
    one, several = outcome(job, 1), outcome(job, n)
    for way in one:
        assert_equal_to_rounding(one[way], several[way])


def test_blas_threads(job, outcome):
    one, two = outcome(job, 1), outcome(job, 1, OMP_NUM_THREADS="2")
    for way in one:
        assert_equal_to_rounding(one[way], two[way])
