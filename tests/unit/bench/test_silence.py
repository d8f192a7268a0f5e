"""A communicator whose collectives are left out for a while."""

import numpy as np
import pytest
import thread_ranks

from mpdp.bench.silence import WithoutCollectives


@pytest.mark.parametrize("size", [1, 2, 3])
def test_nothing_travels_and_the_record_reads_as_if_all_ranks_were_alike(size):
    def body(comm):
        array = np.full(5, float(comm.rank), np.float32)
        with WithoutCollectives(comm):
            comm.all_reduce(array)
            comm.start_all_reduce(array).wait()
            if comm.rank == 0:  # alone: nobody is waited for
                comm.barrier()
            assert comm.reduce_numbers([comm.rank, ~comm.rank], [2.0]) == (
                [comm.rank, ~comm.rank],
                [2.0 * size],
            )
            assert comm.exclusive_sum(4) == 4 * comm.rank
        assert array.tolist() == [float(comm.rank)] * 5
        assert not set(vars(comm)) & set(WithoutCollectives._CALLS)
        comm.all_reduce(array)
        return array.tolist()

    assert thread_ranks.run(size, body) == [[float(sum(range(size)))] * 5] * size


def test_collectives_come_back_after_an_error():
    def body(comm):
        with pytest.raises(KeyError), WithoutCollectives(comm):
            raise KeyError("x")
        return comm.exclusive_sum(1)

    assert thread_ranks.run(2, body) == [0, 1]
