"""`mpdp` itself: sub-commands, help, usage errors; none of them imports MPI or CuPy."""

import subprocess
import sys

import pytest

from mpdp.cli.main import main


def test_help(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: mpdp") and "run " in out and "bench " in out


def test_no_command_is_a_usage_error(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: mpdp")


def test_an_unknown_command_is_named(capsys):
    assert main(["train"]) == 2
    assert (
        "command: expected one of run, bench, doctor, plot, got 'train'; see mpdp --help"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "arguments, status",
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["run", "no_such_file.py"], 2),
        ([], 2),
        (["plot", "no_such_folder"], 2),
    ],
)
def test_help_and_usage_errors_import_neither_mpi_nor_cupy(arguments, status):
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.split('.')[0] not in ('mpi4py', 'cupy'), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from mpdp.cli.main import main\n"
        f"sys.exit(main({arguments!r}))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr


def test_a_package_that_is_missing_is_named_in_a_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "contention", "--quick", "--device", "cpu", "--plot", str(tmp_path / "p.png")]) == 1
    said = capsys.readouterr()
    assert said.err.startswith("mpdp bench: error: --plot: expected matplotlib, got ") and said.out == ""
