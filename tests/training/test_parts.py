"""Parts of rows, of states and of answers: damage is named and written again, and processes divide the work."""

import datetime
import json
import multiprocessing
import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from tests.kills import killed
from tests.training.conftest import ragged_rows
from tests.training.test_evaluation_loss import llama
from tokenahead import MTPHeads
from tokenahead.training import cache_features, regenerate
from tokenahead.training import parts as parts_module
from tokenahead.training import regeneration as regeneration_module
from tokenahead.training.features import FeatureDataset
from tokenahead.training.parts import Processes, complete, part_files, write_part
from tokenahead.training.regeneration import RegeneratedText

PROMPTS = [[70 + row, 71, 72][: 1 + row % 3] for row in range(12)]
ROWS = len(PROMPTS)


def states(folder, count=ROWS, **options):
    torch.manual_seed(0)
    heads = MTPHeads.from_backbone(llama(num_hidden_layers=2), window=3, head_type="cp", rank=2)
    return cache_features(
        heads, [dict(row) for row in ragged_rows(ROWS)][:count], folder, tokens_per_shard=40, **options
    )


def answers(folder, count=ROWS):
    options = dict(max_new_tokens=8, batch_size=2, do_sample=True, top_k=0)
    return regenerate(llama(), PROMPTS[:count], folder, **options)


def equal(found, want):
    """Whether rows have the same columns, bit for bit."""
    return len(found) == len(want) and all(
        one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        for one, other in zip(found, want)
    )


def kept(rows):
    return [{name: column.clone() for name, column in row.items()} for row in rows]


KINDS = {
    "states": SimpleNamespace(write=states, read=FeatureDataset, facts="index.json", remedy="cache_features"),
    "answers": SimpleNamespace(write=answers, read=RegeneratedText, facts="plan.json", remedy="regenerate"),
}


@pytest.fixture(scope="module", params=KINDS)
def store(request, tmp_path_factory):
    """A directory of several parts, and its rows."""
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regeneration_module, "_SECONDS", 0.0)
        rows = kept(kind.write(folder))
    assert len(part_files(folder)) > 3
    return SimpleNamespace(**vars(kind), folder=folder, rows=rows)


@pytest.fixture
def damaged(store, tmp_path, monkeypatch):
    """A copy to be damaged."""
    monkeypatch.setattr(regeneration_module, "_SECONDS", 0.0)
    shutil.copytree(store.folder, tmp_path / "copy")
    return SimpleNamespace(**vars(store) | {"folder": tmp_path / "copy"})


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x55
    path.write_bytes(content)


def changed(path, change, keeps_checksum=True):
    with safe_open(path, "pt") as file:
        said = file.metadata() if keeps_checksum else None
    save_file({name: change(name, tensor.clone()) for name, tensor in load_file(path).items()}, path, said)


def as_nan(name, tensor):
    return tensor * float("nan") if tensor.is_floating_point() else tensor.roll(1)


OF_SIZE = {8: torch.float64, 4: torch.int32}
DAMAGES = {
    **{f"byte {at}": (lambda path, at=at: flip(path, at)) for at in (0, 7, 60, 400, -1, -200)},
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-50]),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "a page": lambda path: path.write_text("<html>not found</html>"),
    "no checksums": lambda path: changed(path, as_nan, False),
    "other values": lambda path: changed(path, as_nan),
    "other types": lambda path: changed(path, lambda name, tensor: tensor.to(torch.int32)),
    "the same bytes": lambda path: changed(
        path, lambda name, tensor: tensor if name == "lengths" else tensor.view(OF_SIZE[tensor.element_size()])
    ),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.by_day("states-in the middle", "answers-at the end")
@pytest.mark.parametrize("which", [1, -1], ids=["in the middle", "at the end"])
def test_a_damaged_part_is_named_and_written_again(which, damaged):
    for damage, hurt in DAMAGES.items():
        path, names = part_files(damaged.folder)[which], [each.name for each in part_files(damaged.folder)]
        times = {each: each.stat().st_mtime_ns for each in part_files(damaged.folder)}
        hurt(path)
        with pytest.raises(ValueError, match=path.name):
            list(damaged.read(damaged.folder))
        assert equal(damaged.write(damaged.folder), damaged.rows), damage
        assert equal(damaged.read(damaged.folder), damaged.rows), damage
        assert [each.name for each in part_files(damaged.folder)] == names, damage
        assert all(each.stat().st_mtime_ns == time for each, time in times.items() if each != path), damage


def test_parts_under_names_of_others_are_refused_and_written_again(damaged):
    first, second, *_ = part_files(damaged.folder)
    copy = shutil.copy(first, damaged.folder / "rows-0 (1).safetensors")  # by a browser, say: it is none
    assert equal(damaged.write(damaged.folder), damaged.rows) and copy.exists()
    first.rename(damaged.folder / "other")
    second.rename(first)
    (damaged.folder / "other").rename(second)
    with pytest.raises(ValueError, match=f"{first.name}|{second.name}"):
        list(damaged.read(damaged.folder))
    assert equal(damaged.write(damaged.folder), damaged.rows) and equal(damaged.read(damaged.folder), damaged.rows)


def test_a_row_in_two_parts_and_one_beyond_the_end_are_refused(damaged):
    first, second, *_ = part_files(damaged.folder)
    with safe_open(first, "pt") as file:
        of = file.metadata()["of"]
    for start in (1, ROWS):
        columns = load_file(second)
        write_part(damaged.folder, of, start, columns.pop("lengths").tolist(), columns)
        for call in (damaged.read, damaged.write):
            with pytest.raises(ValueError, match=r"rows-\d+.safetensors holds a row"):
                call(damaged.folder)
        (damaged.folder / f"rows-{start:08d}.safetensors").unlink()
    assert equal(damaged.write(damaged.folder), damaged.rows)


def test_a_part_of_another_directory_is_refused_and_stays(damaged, tmp_path):
    damaged.write(tmp_path / "less", 4)
    foreign = shutil.copy(part_files(tmp_path / "less")[0], part_files(damaged.folder)[0])
    for call in (damaged.read, damaged.write):
        with pytest.raises(ValueError, match=f"{foreign.name}.*another data set"):
            call(damaged.folder)
    assert foreign.exists()


FACTS = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:50]),
    "empty": lambda path: path.write_bytes(b""),
    "a byte": lambda path: flip(path, -9),
    "a list": lambda path: path.write_text("[]"),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "another file": lambda path: path.write_text('{"model_type": "llama"}'),
    "other numbers": lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": 3, "width": 3})),
}


def test_damaged_facts_are_named_and_written_again_when_they_are_removed(damaged):
    path, parts = damaged.folder / damaged.facts, part_files(damaged.folder)
    times = [each.stat().st_mtime_ns for each in parts]
    for hurt in FACTS.values():
        hurt(path)
        for call in (damaged.read, damaged.write):
            with pytest.raises(ValueError, match=f"{path.name} is damaged"):
                call(damaged.folder)
        path.unlink()
        assert equal(damaged.write(damaged.folder), damaged.rows)
        assert [each.stat().st_mtime_ns for each in part_files(damaged.folder)] == times


def test_without_verification_only_sizes_are_looked_at(tmp_path):
    rows = kept(states(tmp_path))
    first, second, third, *_ = part_files(tmp_path)
    flip(first, -1)
    DAMAGES["gone"](third)
    with pytest.raises(ValueError, match=rf"holds \d+ of {ROWS} rows.*{third.name}"):
        FeatureDataset(tmp_path)
    DAMAGES["cut"](second)
    with pytest.raises(ValueError, match=second.name):
        FeatureDataset(tmp_path, verify=False)
    time = first.stat().st_mtime_ns
    found = states(tmp_path, verify=False)
    assert len(list(found)) == ROWS and first.stat().st_mtime_ns == time and not equal(found, rows)
    assert not equal(FeatureDataset(tmp_path, verify=False), rows)
    with pytest.raises(ValueError, match=first.name):
        list(FeatureDataset(tmp_path))


def test_checksums_are_read_when_a_part_is_first_opened(tmp_path, monkeypatch):
    states(tmp_path)
    read, opened = [], parts_module.Part.opened
    monkeypatch.setattr(
        parts_module.Part, "opened", lambda part, verify: (read.append(verify), opened(part, verify))[1]
    )
    rows = FeatureDataset(tmp_path)
    assert not read and equal([rows[0], rows[0]], [rows[0]] * 2) and read == [True]
    list(rows)
    assert read == [True] * len(part_files(tmp_path))


def test_a_link_is_replaced_and_not_followed(damaged, tmp_path):
    path = part_files(damaged.folder)[0]
    outside = path.rename(tmp_path / "outside")
    path.symlink_to(outside)
    assert equal(damaged.read(damaged.folder), damaged.rows)
    outside.write_bytes(b"precious")
    assert equal(damaged.write(damaged.folder), damaged.rows)
    assert outside.read_bytes() == b"precious" and not path.is_symlink()


@pytest.mark.nightly
def test_a_killed_writer_goes_on_with_the_next_part(store, tmp_path, monkeypatch):
    monkeypatch.setattr(regeneration_module, "_SECONDS", 0.0)
    number, more = 1, True
    while more:
        folder, number = tmp_path / str(number), number + 7
        more = killed(lambda folder=folder: store.write(folder), number)
        times = {path: path.stat().st_mtime_ns for path in part_files(folder)}
        assert equal(store.write(folder), store.rows) and equal(store.read(folder), store.rows)
        assert all(path.stat().st_mtime_ns == time for path, time in times.items())
        assert [*folder.glob(".*")] == []
    assert number > 20


def test_states_that_are_not_finite_are_refused(tmp_path):
    heads = MTPHeads.from_backbone(llama(), window=3)
    with torch.no_grad():
        heads.backbone.model.norm.weight[0] = 1e6
    with pytest.raises(ValueError, match="row 0 .*float16"):
        cache_features(heads, [dict(row) for row in ragged_rows(3)], tmp_path, dtype="float16")
    assert not part_files(tmp_path)


def work(rank, world, folder, kind, slow):
    """Be one of the processes, which is a copy of this one."""
    for stream in (1, 2):
        os.dup2(os.open(f"{folder}.{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND), stream)
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=6)  # of collectives
    init = f"file://{folder}.store"
    torch.distributed.init_process_group("gloo", init, rank=rank, world_size=world, timeout=limit)
    regeneration_module._SECONDS, code, write = 0.0, 1, write_part
    parts_module.logger = SimpleNamespace(warning=lambda words: os.write(1, f"{words}\n".encode()))

    def slowly(*arguments):
        if slow == "fails" and rank == 0:
            raise OSError("No space left on device")
        time.sleep(2.2 if slow == "waits" and rank == 0 else 0)
        write(*arguments)
        with Path(f"{folder}.{rank}.rows").open("a") as noted:
            noted.write(f"{len(arguments[3])}\n")

    parts_module.write_part = slowly
    try:
        KINDS[kind].write(Path(folder))
        code = 0
    except Exception as error:
        os.write(1, f"\n{type(error).__name__}: {error}\n".encode())
    finally:
        os._exit(code)


def run(world, folder, kind, slow="no"):
    """Write a directory in several processes; return their exit codes, and what each has said."""
    for path in folder.parent.glob(f"{folder.name}.*"):
        path.unlink()
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=work, args=(rank, world, folder, kind, slow)) for rank in range(world)]
    for process in started:
        process.start()
    for process in started:
        process.join(300)
    return [each.exitcode for each in started], [Path(f"{folder}.{rank}").read_text() for rank in range(world)]


def written(folder, world):
    """How many rows each process has written."""
    paths = [Path(f"{folder}.{rank}.rows") for rank in range(world)]
    return [sum(map(int, path.read_text().split())) if path.exists() else 0 for path in paths]


@pytest.mark.by_day("answers")
@pytest.mark.parametrize("kind", KINDS)
def test_processes_write_the_rows_of_one_each_its_share_and_wait_for_the_slowest(kind, tmp_path):
    want = kept(KINDS[kind].write(tmp_path / "one"))
    codes, said = run(2, tmp_path / "two", kind, "waits")
    assert codes == [0, 0], said
    found = KINDS[kind].read(tmp_path / "two")
    if kind == "answers":
        assert equal(found, want)
    for one, other in zip(found, want, strict=True):
        for name in other:
            torch.testing.assert_close(one[name], other[name], atol=1e-5, rtol=1e-5)
    assert written(tmp_path / "two", 2) == [6, 6]
    first, second, *_, last = part_files(tmp_path / "two")
    times = {path: path.stat().st_mtime_ns for path in part_files(tmp_path / "two")}
    size = ROWS - sum(len(load_file(path)["lengths"]) for path in (second, last))
    for path in times.keys() - {second, last}:  # another number of processes goes on from what is there
        flip(path, -3)
    codes, said = run(3, tmp_path / "two", kind)
    assert codes == [0] * 3, said
    assert sum(f"{first.name} is damaged" in text for text in said) == 1
    found = KINDS[kind].read(tmp_path / "two")
    assert equal(found, want) if kind == "answers" else len(list(found)) == ROWS
    assert all(path.stat().st_mtime_ns == times[path] for path in (second, last))
    assert sum(counts := written(tmp_path / "two", 3)) == size and min(counts) > 0


def test_a_full_disk_leaves_no_part(tmp_path, monkeypatch):
    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(parts_module, "save_file", half)
    with pytest.raises(OSError, match="rows-00000000.safetensors cannot be written: No space left"):
        write_part(tmp_path, "facts", 0, [1], {"ids": torch.ones(1)})
    assert not list(tmp_path.iterdir())


def test_parts_of_a_process_that_sees_another_disk_are_missed_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(parts_module, "_VISIBLE", 0)
    monkeypatch.setattr(Processes, "stage", nullcontext)  # the other process has done its share

    def write(rows, save):
        save(rows[0], [1] * len(rows), {"ids": torch.ones(len(rows))})

    with pytest.raises(FileNotFoundError, match="process 0 of 2 sees another disk"):
        complete(tmp_path / "plan.json", {"rows": 4}, write, Processes(0, 2))


def test_an_error_of_one_process_ends_all(tmp_path):
    codes, said = run(2, tmp_path / "two", "answers", "fails")
    assert codes == [1, 1] and "No space left" in said[0]
    assert "process 0 of 2 ended with: No space left" in said[1]
