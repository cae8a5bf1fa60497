"""A reader meets the old file or the new one."""

import pytest

from titan_rl.data.storage.files import replace_text, replacing


def test_a_file_is_replaced_and_nothing_stays_beside_it(tmp_path):
    path = tmp_path / "pids.json"
    replace_text(path, "ä")
    replace_text(path, "b")
    assert path.read_text() == "b" and list(tmp_path.iterdir()) == [path]


def test_what_fails_half_way_is_not_seen(tmp_path):
    path = tmp_path / "summary.json"
    replace_text(path, "old")
    with pytest.raises(OSError), replacing(path) as beside:
        beside.write_text("ne")
        raise OSError("no space left")
    assert path.read_text() == "old"


def test_a_folder_appears_whole(tmp_path):
    with replacing(tmp_path / "model") as beside:
        beside.mkdir()
        (beside / "config.json").write_text("{}")
        assert not (tmp_path / "model").exists()
    assert (tmp_path / "model" / "config.json").is_file()
