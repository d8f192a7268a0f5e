"""Nodes that are declared, the transport that is chosen for them, and what goes wrong between and inside them."""

import re

import launching
import pytest
from launching import PROGRAMS

PROGRAM = PROGRAMS / "nodes.py"
ERROR = re.compile(r"^\[\d/\d\] error.*", re.MULTILINE)
ON = {"two_level": {"MPDP_NODES": "2"}}


def one_error(result, text):
    assert result.rc != 0 and not result.timed_out and not result.orphans, result
    assert len(ERROR.findall(result.output)) == 1, result
    assert re.search(text, result.output), result


@pytest.mark.parametrize(
    ("size", "nodes", "sizes", "transport", "reason"),
    [
        (4, None, [4], "shared_memory", "all ranks are on one node, by memfd"),
        (4, "1", [4], "shared_memory", "all ranks are on one node, by memfd"),
        (4, "2", [2, 2], "two_level", "the ranks are on 2 nodes, memory by memfd"),
        (3, "2", [2, 1], "two_level", "the ranks are on 2 nodes, memory by memfd"),
        (4, "3", [2, 1, 1], "two_level", "the ranks are on 3 nodes, memory by memfd"),
        (2, "2", [1, 1], "mpi", "the ranks are on 2 nodes, one on each"),
    ],
)
def test_declared_nodes_and_what_auto_takes(job, size, nodes, sizes, transport, reason):
    result = job(PROGRAM, "where", n=size, environ={"MPDP_NODES": nodes}).check()
    expected = [
        [local, count, node, len(sizes), transport]
        for node, count in enumerate(sizes)
        for local in range(count)
    ]
    assert result.results == expected
    count = f"{len(sizes)} node{'s' if len(sizes) > 1 else ''}"
    assert f"world of {size} ranks on {count}, transport {transport} ({reason})" in result.output


@pytest.mark.parametrize("nodes", [None, "2"])
def test_two_level_that_is_asked_for_also_works_where_auto_takes_another(job, nodes):
    result = job(PROGRAM, "where", "two_level", n=2, environ={"MPDP_NODES": nodes}).check()
    assert [value[-1] for value in result.results] == ["two_level"] * 2
    assert "transport two_level (as asked for, memory by memfd)" in result.output


@pytest.mark.parametrize("nodes", ["0", "5", "two", "-1", ""])
def test_a_number_of_nodes_that_is_none_is_one_error(job, nodes):
    result = job(PROGRAM, "where", n=4, environ={"MPDP_NODES": nodes})
    one_error(
        result, rf"ValueError: MPDP_NODES: expected a whole number in 1\.\.4, the number of .*, got '{nodes}'"
    )


def test_numbers_of_nodes_that_differ_are_one_error(job):
    result = job(PROGRAM, "different", n=3)
    one_error(
        result, r"DisagreementError: MPDP_NODES: expected the same value on all ranks, got '1' on rank 0"
    )


def test_shared_memory_between_nodes_is_one_error(job):
    result = job(PROGRAM, "where", "shared_memory", n=3, environ={"MPDP_NODES": "2"})
    one_error(result, r"transport: expected shared_memory to work, got: the ranks are on 2 nodes")


def test_auto_takes_mpi_where_one_node_cannot_share_memory(job):
    program = PROGRAMS / "shared_memory.py"  # its last rank refuses
    result = job(program, "refused", n=4, environ={"MPDP_NODES": "2"}).check()
    assert [value[0] for value in result.results] == ["mpi"] * 4
    assert re.search(
        r"transport mpi \(not two_level: .*_open is forbidden.*\(on rank 2, 3 of 4\)\)", result.output
    )
    result = job(program, "refused", "two_level", n=4, environ={"MPDP_NODES": "2"})
    one_error(
        result, r"transport: expected two_level to work, got: .*_open is forbidden.*\(on rank 2, 3 of 4\)"
    )


def test_a_node_that_cannot_map_a_buffer_says_so_and_copies_it(job):
    result = job(PROGRAM, "private", n=4, environ={"MPDP_NODES": "2"}).check()
    assert result.results == ["two_level"] * 4
    assert re.findall(r"^\[(\d)/4\] warning a buffer of 8388608 bytes is private", result.output, re.M) == [
        "2"
    ]


@pytest.mark.parametrize(("where", "ranks"), [("inside", "2"), ("compared", "0, 1, 2")])
def test_ranks_in_different_calls_are_named_as_ranks_of_the_world(job, where, ranks):
    result = job(PROGRAM, "mismatch", where, n=4, environ={"MPDP_NODES": "2"})
    found = rf"got all_reduce \(sum\) of 10 float64 on rank {ranks}; all_reduce \(sum\) of 11 .* on rank 3"
    one_error(result, found)


@pytest.mark.parametrize("transport", ["mpi", "shared_memory", "two_level"])
@pytest.mark.parametrize("size", [2, 3])
def test_lanes_never_wait_for_one_another(job, size, transport):
    result = job(PROGRAM, "lanes", transport, n=size, environ=ON.get(transport)).check()
    assert result.results == [transport] * size


@pytest.mark.parametrize(
    ("size", "transport"), [(3, "two_level"), (4, "two_level"), (3, "shared_memory"), (2, "mpi")]
)
def test_gpu_arrays_staged_over_each_host_transport(job, size, transport):
    result = job(PROGRAM, "staged", transport, n=size, environ=ON.get(transport)).check()
    assert result.results == [f"staged({transport})"] * size


@pytest.mark.parametrize("transport", ["mpi", "shared_memory", "two_level"])
def test_a_buffer_of_more_than_two_to_the_31_bytes(job, transport):
    """4.3 GiB for two ranks. Shared memory needs no second MPI: it moves nothing by it but one send."""
    if transport == "shared_memory" and launching.mpi()[0] == "openmpi":
        pytest.skip("tested with the other MPI")
    result = job(PROGRAM, "large", transport, n=2, timeout=300, environ=ON.get(transport)).check()
    assert result.results == [[transport, 2**31 + 4099]] * 2
