"""Directories are one version at every moment: after kills, errors, and while several processes finish a save.

A version is text here: a config, shards, a part in a directory, each with the version's name.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.kills import before_operation, killed, no_space, stop
from tokenahead.generation.tensors import saving

ONE = ("model.safetensors",)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
CASES = {
    "one file": (ONE, ONE),
    "shards": (SHARDS, SHARDS),
    "one file to shards": (ONE, SHARDS),
    "shards to one file": (SHARDS, ONE),
    "a part": (ONE, (*ONE, "backbone/model.safetensors")),
}


def save(folder, version, shards=ONE):
    with saving.whole_directory(folder, replaced=["old.json"]) as directory:
        files = dict.fromkeys(shards, version) | {"config.json": json.dumps([version, shards])}
        for name, text in files.items():
            for place in {Path(name), Path(name).parent / "config.json"}:
                if not (directory / place).parent.is_dir():
                    (directory / place).parent.mkdir()
                (directory / place).write_text(text if place == Path(name) else files["config.json"])
        if version == "old":
            (directory / "old.json").write_text(version)


def foreign(folder):
    """What a loader reads that knows nothing of unfinished saves; None where it fails."""
    try:
        version, shards = json.loads((folder / "config.json").read_text())
        read = {version, *((folder / name).read_text() for name in shards)}
        if (folder / "old.json").exists() and "old" not in read:
            read.add("old")
    except FileNotFoundError:
        return None
    return "mixed" if len(read) > 1 else read.pop()


@saving.reads_whole
def load(folder):
    found = foreign(Path(folder))
    if found is None:
        raise FileNotFoundError(folder)
    return found


def hidden(folder, prefix="."):
    return [path.name for path in folder.iterdir() if path.name.startswith(prefix)]


def fresh(folder, shards=ONE):
    shutil.rmtree(folder, ignore_errors=True)
    save(folder, "old", shards)
    (folder / "notes.txt").write_text("mine")
    return folder


@pytest.mark.by_day("shards to one file", "a part")
@pytest.mark.parametrize("case", CASES)
def test_a_kill_before_any_operation_leaves_one_version(case, tmp_path):
    old, new = CASES[case]
    seen, number, was_killed = [], 0, True
    while was_killed:
        folder = fresh(tmp_path / "saved", old)
        was_killed = killed(lambda folder=folder: save(folder, "new", new), number)
        assert foreign(folder) in ("old", "new", None), number
        copy = shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=False)
        seen += [load(folder), load(copy)]  # whoever asks, wherever it is
        assert seen[-1] == seen[-2] and (folder / "notes.txt").read_text() == "mine"
        save(folder, "new", new)
        assert load(folder) == foreign(folder) == "new" and hidden(folder) == [], number
        shutil.rmtree(copy)
        number += 1
    assert seen == sorted(seen, key=["old", "new"].index) and {*seen} == {"old", "new"} and 10 < number < 200


@pytest.mark.parametrize("act", [no_space, stop])
def test_an_error_before_any_operation_leaves_one_version(act, tmp_path):
    number, count = 0, [1]
    while count[0] > number:
        folder = fresh(tmp_path / "saved", SHARDS)
        with before_operation(number, act()) as count, contextlib.suppress(OSError, KeyboardInterrupt):
            save(folder, "new", ONE)
        assert foreign(folder) in ("old", "new", None), number
        assert load(folder) in ("old", "new") and foreign(folder) == load(folder), number
        save(folder, "new", ONE)
        assert foreign(folder) == "new" and hidden(folder) == [], number
        number += 1


@pytest.mark.core
def test_who_writes_nothing_changes_nothing(tmp_path):
    folder = fresh(tmp_path / "saved")
    with saving.whole_directory(folder):
        pass  # as other processes of a run than the first
    assert load(folder) == "old" and hidden(folder) == []


def test_a_save_within_a_save_belongs_to_its_version(tmp_path):
    folder = fresh(tmp_path / "saved")
    with saving.whole_directory(folder) as outer:
        save(outer, "new")
        with saving.whole_file(outer / "note") as file:
            file.write_text("new")
        save(outer / "part", "new")
        assert load(folder) == "old" and {path.name for path in folder.iterdir()} >= {outer.name}
    assert not (folder / "old.json").exists()
    assert load(folder) == load(folder / "part") == "new" and hidden(folder) == hidden(folder / "part") == []


def unfinished(folder):
    """A directory whose new version is complete, and not brought in."""
    fresh(folder)
    number = 0
    while not hidden(folder, ".tokenahead-complete.") or (folder / "config.json").exists():
        fresh(folder)
        assert killed(lambda: save(folder, "new"), number)
        number += 1
    return folder


@pytest.mark.by_day("shards to one file")
@pytest.mark.parametrize("case", CASES)
def test_two_processes_may_finish_a_save(case, tmp_path, monkeypatch):
    """One finishes all of it before any operation of the other: nothing that has arrived moves again."""
    (old, new), number, count = CASES[case], 0, [1]
    complete, step = tmp_path / "complete", 0
    while not complete.is_dir() or not hidden(complete, ".tokenahead-complete."):
        fresh(complete, old)
        assert killed(lambda: save(complete, "new", new), step)
        step += 1
    while count[0] > number:
        folder = shutil.copytree(complete, tmp_path / str(number))
        count = [0]

        def interrupted(method, folder=folder, number=number, count=count):
            def moved(*args, **kwargs):
                count[0] += 1
                if count[0] == number + 1:
                    saving.finish(folder)
                return method(*args, **kwargs)

            return moved

        with monkeypatch.context() as patched:
            for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "scandir", "open"):
                patched.setattr(os, name, interrupted(getattr(os, name)))
            assert load(folder) == "new"
        assert hidden(folder) == [] and (folder / "notes.txt").read_text() == "mine", number
        number += 1
    assert number > 10


def test_a_single_file_and_a_save_in_place_come_after_an_unfinished_save(tmp_path):
    folder = unfinished(tmp_path / "saved")
    with saving.whole_file(folder / "config.json") as file:
        file.write_text('["newer", []]')
    assert foreign(folder) == load(folder) == "newer" and hidden(folder) == []
    folder = unfinished(tmp_path / "saved")
    with saving.whole_directory(folder, in_place=True) as directory:
        assert directory == folder and foreign(folder) == "new"


def test_what_is_no_saved_version_is_removed(tmp_path):
    folder = fresh(tmp_path / "saved")
    (folder / ".tokenahead-complete.x").mkdir()
    (folder / ".tokenahead-complete.x" / "config.json").write_text('["foreign", []]')
    assert load(folder) == "old"
    save(folder, "new")
    assert load(folder) == "new" and hidden(folder) == []


def test_no_version_comes_through_a_link(tmp_path):
    folder, outside = fresh(tmp_path / "saved"), tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("precious")
    (outside / ".tokenahead-list.json").write_text('["config.json"]')
    for name in (".tokenahead-complete.x", ".tokenahead-arriving.y"):
        (folder / name).symlink_to(outside)
    assert load(folder) == "old" and (outside / "precious").read_text() == "precious"


def test_nothing_is_written_or_removed_through_a_link(tmp_path):
    outside, folder = tmp_path / "outside", fresh(tmp_path / "saved")
    outside.mkdir()
    for name in ("model.safetensors", "config.json", "model-00001-of-00002.safetensors"):
        (outside / name).write_text("precious")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(outside / "model.safetensors")
    (folder / "old.json").unlink()
    (folder / "old.json").symlink_to(outside / "config.json")
    (folder / "backbone").symlink_to(outside)
    (tmp_path / "linked").symlink_to(folder)
    save(tmp_path / "linked", "new", CASES["a part"][1])
    assert {path.read_text() for path in outside.iterdir()} == {"precious"} and len([*outside.iterdir()]) == 3
    assert foreign(folder) == "new" and not (folder / "backbone").is_symlink() and (tmp_path / "linked").is_symlink()
    with saving.whole_file(tmp_path / "note") as file:
        file.write_text("new")
    (tmp_path / "note").unlink()
    (tmp_path / "note").symlink_to(outside / "config.json")
    with saving.whole_file(tmp_path / "note") as file:
        file.write_text("new")
    assert (outside / "config.json").read_text() == "precious" and not (tmp_path / "note").is_symlink()


def test_a_list_removes_nothing_elsewhere(tmp_path):
    folder = unfinished(tmp_path / "saved")
    (tmp_path / "precious").write_text("precious")
    (folder / "linked").symlink_to(tmp_path)
    names = ["old.json", "../precious", str(tmp_path / "precious"), "linked/precious"]
    (complete,) = hidden(folder, ".tokenahead-complete.")
    (folder / complete / ".tokenahead-list.json").write_text(json.dumps(names))
    assert load(folder) == "new" and (tmp_path / "precious").exists()


def test_a_directory_with_the_name_of_a_file_is_refused_in_time(tmp_path):
    for name in ("model.safetensors", "backbone"):
        folder = fresh(tmp_path / name / "saved", SHARDS)
        (folder / name).write_text("mine") if name == "backbone" else (folder / name).mkdir()
        with pytest.raises(FileExistsError, match=name):
            save(folder, "new", CASES["a part"][1])
        assert load(folder) == "old" and hidden(folder) == []


def test_a_file_that_is_updated_is_seen_and_kept(tmp_path):
    folder = fresh(tmp_path / "saved")
    (folder / "README.md").write_text("by hand")
    before = (folder / "README.md").stat().st_ino
    for text in (None, "by hand, and more"):
        with saving.whole_directory(folder, updated=["README.md", "backbone/README.md"]) as directory:
            (directory / "config.json").write_text('["new", []]')
            assert (directory / "README.md").read_text() == "by hand"
            if text:
                (directory / "README.md").write_text(text)
        assert (folder / "README.md").read_text() == (text or "by hand")
        assert ((folder / "README.md").stat().st_ino == before) == (text is None)


@pytest.mark.parametrize("act", ["kill", no_space, stop])
def test_a_single_file_is_old_or_new(act, tmp_path):
    path, number, more = tmp_path / "note", 0, True

    def write():
        with saving.whole_file(path) as file:
            file.write_text("new")

    while more:
        path.write_text("old")
        if act == "kill":
            more = killed(write, number)
        else:
            with before_operation(number, act()) as count, contextlib.suppress(OSError, KeyboardInterrupt):
                write()
            more = count[0] > number
        assert path.read_text() in ("old", "new")
        write()
        assert [each.name for each in tmp_path.iterdir()] == ["note"] and path.read_text() == "new"
        number += 1
    assert number > 4
