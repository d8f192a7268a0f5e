"""Command lines made of flags, numbers and rubbish: an exit status and a sentence, never a traceback.

`pytest --hypothesis-profile=long` tries more of them. Commands themselves are replaced: what is tried is what is
between the shell and them.
"""

import contextlib
import io
import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpdp import bench
from mpdp.bench import tune
from mpdp.cli import doctor, main, mpi_library, run
from mpdp.cli.command import Command
from mpdp.cli.mpi_library import MpiLibrary
from mpdp.cli.supervise import Ended, Marks

# Arguments are bytes without a zero; Python hands over those that are no text as lone surrogates.
RUBBISH = st.one_of(
    st.binary(max_size=12).filter(lambda b: 0 not in b).map(os.fsdecode),
    st.text(max_size=12).filter(lambda text: "\0" not in text and text.isprintable()),
    st.integers(-3, 2**70).map(str),
    st.floats().map(str),
    st.sampled_from(
        [
            "",
            "-",
            "--",
            "-n",
            "=",
            "a,b:2",
            "a:0",
            "a:2,b:2",
            ",",
            ":",
            "x" * 5000,
            "9" * 5000,
            "²",
            "٣",
            "1e3",
            "0x2",
        ]
    ),
)
FLAGS = {
    "run": [
        "-n",
        "--hosts",
        "--threads",
        "--dry-run",
        "--exec",
        "--max-restarts",
        "--min-ranks",
        "-h",
        "--n",
    ],
    "doctor": ["--json", "-h", "--quick"],
    "plot": ["-o", "--output", "-h", "--output="],
    "bench": [
        *[
            "train",
            "all-reduce",
            "memory",
            "contention",
            "mlp",
            "gpt2",
            "--device",
            "--batch",
            "--precision",
            "--graph",
        ],
        *[
            "--plans",
            "--peers",
            "--clip",
            "--quick",
            "--blocks",
            "--seconds",
            "--json",
            "--plot",
            "--trace",
            "--losses",
        ],
        *[
            "--weights",
            "--bytes",
            "--folder",
            "--sizes",
            "--dtypes",
            "--transports",
            "--tune",
            "--gpus",
            "--full",
        ],
    ],
}
GOOD = [
    "1",
    "2",
    "4",
    "cpu",
    "cuda",
    "cuda:1",
    "float32",
    "bfloat16",
    "8,64K",
    "mpi",
    "shared_memory,mpi",
    "torch",
    "jax",
]


def lines(command):
    here = [__file__, os.path.dirname(__file__), "/dev/null", "/dev/full/x", "train.py"]
    return st.lists(st.one_of(st.sampled_from(FLAGS[command] + GOOD + here), RUBBISH), max_size=7)


@pytest.fixture(scope="module")
def no_command():
    """Replace all that a command would start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mpi_library, "probe", lambda: MpiLibrary("openmpi", "Open MPI", (5, 0, 11), "/v/libmpi.so")
        )
        patch.setattr(mpi_library, "find_launcher", lambda library: "/v/mpirun")
        patch.setattr("mpdp.cli.supervise.supervise", lambda command, n: 0)
        patch.setattr(
            "mpdp.cli.supervise.watch", lambda command, n: Ended(0, False, Marks({}, {}, set(), False))
        )
        patch.setattr(run, "hold_streams", lambda: None)
        patch.setattr(os, "execve", lambda path, words, environ: None)
        patch.setattr(doctor, "examine", lambda: (None, []))
        for name in dir(bench):
            if name in ("_train", "_all_reduce", "_memory", "_contention", "_faults"):
                patch.setattr(bench, name, lambda *arguments: 0)
        patch.setattr(tune, "run", lambda **arguments: 0)
        yield


def outcome(words):
    """Return status, stdout and stderr, with streams as a shell gives them."""
    streams = [io.TextIOWrapper(io.BytesIO(), "utf-8", errors) for errors in ("strict", "backslashreplace")]
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            status = main.main(words)
        except SystemExit as end:
            status = end.code
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())
    return status, *texts


@settings(deadline=None)
@pytest.mark.parametrize("command", FLAGS)
@given(data=st.data())
def test_a_line_ends_with_a_status_and_a_sentence(no_command, command, data):
    words = data.draw(lines(command))
    status, out, err = outcome([command, *words])
    if status == 2:
        assert err.count("error: ") >= 1 and err.startswith(("usage: ", "mpdp")), err
    else:
        assert status in ((0, 1) if command == "plot" else (0, None)), (status, out, err)


@given(words=st.lists(st.one_of(RUBBISH, st.sampled_from(["runn", "-h", "--version", "-V"])), max_size=3))
def test_a_line_without_a_command(words):
    status, out, err = outcome(words)
    assert (status == 0 and out) or (status == 2 and err), (status, out, err)


def test_a_path_that_is_no_text_is_printed(no_command, tmp_path):
    script = os.path.join(os.fsencode(tmp_path), b"tr\xff\xe9\n '\".py")
    open(script, "wb").close()
    status, out, _ = outcome(["run", "-n", "2", "--dry-run", os.fsdecode(script)])
    assert status == 0 and r"tr\udcff\udce9" in out


@pytest.mark.parametrize("line", [["doctor"], ["bench", "train", "mlp"], ["bench", "memory"]])
@pytest.mark.parametrize("path", ["", "{folder}", "{folder}/missing/x.json", "{folder}/file/x.json"])
def test_a_file_that_cannot_be_written_is_a_usage_error(no_command, tmp_path, line, path):
    (tmp_path / "file").write_text("")
    path = path.format(folder=tmp_path)
    status, _, err = outcome([*line, "--json", path])
    assert (
        status == 2
        and f"argument --json: expected the path of a file in a folder that exists, got {path!r}" in err
    )


def test_the_line_of_a_strange_script_starts_it(tmp_path):
    """Spaces, quotes, a line break, an emoji, bytes that are no text: what is printed is a line for a shell."""
    name = "a 'b' \"c\"\n$(d) ü😀.py"
    (tmp_path / name).write_text("import sys; print(repr(sys.argv[1]))")
    line = str(Command((sys.executable, str(tmp_path / name), "x y'"), {"A": "b c"}))
    import subprocess

    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == repr("x y'") + "\n"
