"""A checkpoint is whole or absent, whenever its writer dies."""

import shutil

import pytest

from titan_rl.checkpoint import CheckpointFolder, ControllerState


@pytest.fixture
def folder(tmp_path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path, keep_latest_k=2)


def state_of(step: int) -> ControllerState:
    return ControllerState(step, 10 * step, {"correct": 3, "count": 8}, 1.5)


def save(folder: CheckpointFolder, step: int, content: str = "") -> None:
    writing = folder.begin(step)
    (writing / "weights").write_text(content or f"weights {step}")
    folder.commit(writing, state_of(step))


def test_nothing_saved(folder):
    assert folder.steps() == [] and folder.latest() is None


def test_latest_holds_what_was_written(folder):
    save(folder, 3)
    save(folder, 20)
    path, state = folder.latest()
    assert state == state_of(20) and path == folder.path(20)
    assert (path / "weights").read_text() == "weights 20"


def test_keeps_the_latest_k(folder, tmp_path):
    for step in (1, 2, 10, 9):
        save(folder, step)
    assert folder.steps() == [9, 10]
    assert len(list(tmp_path.iterdir())) == 2


def test_interrupted_save_is_ignored_and_then_removed(folder, tmp_path):
    save(folder, 1)
    (folder.begin(2) / "weights").write_text("half")
    assert folder.steps() == [1] and folder.latest()[1] == state_of(1)
    begun = folder.begin(3)
    assert list(begun.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", begun.name]


def test_writing_stays_apart_until_it_is_committed(folder):
    save(folder, 1, "old")
    (folder.begin(1) / "weights").write_text("new")
    assert (folder.path(1) / "weights").read_text() == "old"


def test_saving_a_step_again_replaces_it(folder):
    save(folder, 1, "old")
    save(folder, 1, "new")
    assert folder.steps() == [1] and (folder.path(1) / "weights").read_text() == "new"


@pytest.mark.parametrize("deletions", [0, 1])
@pytest.mark.parametrize("step", [2, 3])
def test_death_while_an_old_checkpoint_is_removed_leaves_only_whole_ones(folder, monkeypatch, step, deletions):
    """Saving step 2 again replaces it; saving step 3 drops step 1. Either may die in the middle of a removal."""
    save(folder, 1)
    save(folder, 2)
    writing = folder.begin(step)
    (writing / "weights").write_text(f"weights {step}")

    def die(path, *_, **__):
        for file in sorted(path.iterdir(), reverse=True)[:deletions]:
            file.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", die)
        folder.commit(writing, state_of(step))
    path, state = folder.latest()
    assert state.step >= 2 and (path / "weights").read_text() == f"weights {state.step}"
    for kept in folder.steps():
        assert {file.name for file in folder.path(kept).iterdir()} == {"weights", "state.json"}
