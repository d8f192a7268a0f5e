"""``mpdp bench checkpoint``: what it measures and writes down; how long it takes is nobody's business here."""

import json

from mpdp.bench import main


def test_a_save_is_measured_and_its_files_are_gone(tmp_path, capsys):
    path = tmp_path / "figures.json"
    assert (
        main(["checkpoint", "--quick", "--bytes", "3M", "--folder", str(tmp_path), "--json", str(path)]) == 0
    )
    found = json.loads(path.read_text())
    assert 3 << 20 <= found["checkpoint_bytes"] < (3 << 20) + 20_000
    assert found["ranks"] == 1 and found["rounds"] == 3
    assert all(found[f"{name}_seconds"] > 0 for name in ("copy", "pause", "background", "waiting"))
    assert found["pause_ratio"] == found["pause_seconds"] / found["copy_seconds"]
    assert found["pause_seconds"] < found["background_seconds"]
    assert "checkpoint of 3 MiB: one copy" in capsys.readouterr().out
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"]
