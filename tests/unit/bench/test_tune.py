"""Tuning: how it decides, and its arguments. What it measures needs ranks: tests/parallel/test_tuned.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpdp import bench
from mpdp.bench.tune import MARGIN, best, crossover
from mpdp.comm.tuned import TUNABLE, write

TIMES = st.dictionaries(st.sampled_from([64, 128, 256, 512]), st.floats(1e-6, 1.0), min_size=1)


@given(TIMES, st.data())
def test_the_default_stays_unless_another_is_clearly_faster(times, data):
    default = data.draw(st.sampled_from(sorted(times)))
    chosen = best(times, default)
    if chosen == default:
        assert min(times.values()) >= MARGIN * times[default]
    else:
        assert times[chosen] == min(times.values()) < MARGIN * times[default]


def test_one_phase_is_taken_up_to_the_first_size_at_which_it_loses():
    one = {1024: 1.0, 2048: 2.0, 4096: 4.0, 8192: 8.0}
    assert crossover(one, dict.fromkeys(one, 3.0)) == 2048
    assert crossover(one, dict.fromkeys(one, 3.9)) == 4096  # a twentieth is noise
    assert crossover(one, dict.fromkeys(one, 100.0)) == 8192
    assert crossover(one, dict.fromkeys(one, 0.1)) == 64
    assert crossover(one, {1024: 0.5, 2048: 100.0, 4096: 100.0, 8192: 100.0}) == 64


def test_every_size_that_is_tried_may_be_kept(tmp_path, monkeypatch):
    from mpdp.bench import tune

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tried = {"small_bytes": (64, *tune.SMALL), "piece_bytes": tune.PIECES, "chunk_bytes": tune.CHUNKS}
    for name, sizes in tried.items():
        for size in sizes:
            write("shared_memory", {}, {name: size})
    for size in tune.MPI_PIECES:
        write("mpi", {}, {"piece_bytes": size})
    assert set(tried) == set(TUNABLE["shared_memory"])
    tried = {"small_bytes": (64, *tune.GPU_SMALL), "chunk_bytes": tune.CHUNKS}
    for name, sizes in tried.items():
        for size in sizes:
            write("cuda_ipc", {}, {name: size})
    assert set(tried) == set(TUNABLE["cuda_ipc"])


def test_one_rank_has_nothing_to_tune(capsys):
    assert bench.main(["all-reduce", "--tune"]) == 2
    assert "--tune: expected 2 ranks or more, got 1; start it with mpirun -n N" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--sizes", "8"], ["--plot", "x.png"], ["--transports", "mpi4py"]])
def test_choices_of_the_table_do_not_go_with_it(words, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(["all-reduce", "--tune", *words])
    assert caught.value.code == 2
    assert "--tune: expected no other choice than --transports shared_memory,mpi" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "known"), [("cuda", "cuda_ipc"), ("auto", "shared_memory,mpi,cuda_ipc")])
def test_each_device_has_transports_of_its_own(device, known, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(["all-reduce", "--tune", "--device", device, "--transports", "nccl"])
    assert caught.value.code == 2
    assert f"--tune: expected no other choice than --transports {known}" in capsys.readouterr().err
