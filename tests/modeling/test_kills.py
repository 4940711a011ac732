"""Every saver of the library is killed before its operations: what it writes to loads as one version, old or new."""

import random
from pathlib import Path

import pytest
import torch

from tests.every_model import every_model, llama, moved_heads
from tests.kills import before_operation, killed, no_space
from tokenahead import AssistantDrafter, EagleHead, EvaByteTokenizer, MTPHeadConfig, MTPHeads, PTPStudent, SuffixDrafter
from tokenahead.generation.tensors import saving
from tokenahead.modeling.heads.joint import JointMTPModel

COMPLETE = ".tokenahead-complete.*"


def stamped(saved, version: int):
    """An object whose weights and config say which version it is."""
    model = saved.model if isinstance(saved, AssistantDrafter) else saved
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)
    model.config.initializer_range = version / 1000
    return saved


def version_of(loaded) -> int:
    model = loaded.model if isinstance(loaded, AssistantDrafter) else loaded
    found = {round(each.flatten()[0].item(), 4) for each in model.parameters()}
    assert found == {round(model.config.initializer_range * 1000)}, found
    return int(found.pop())


def detached(drafter):
    drafter.detach()
    return drafter


def suffixes(version: int) -> SuffixDrafter:
    drafter = SuffixDrafter()
    drafter.add([version] * 50)
    return drafter


def tokenizer(version: int) -> EvaByteTokenizer:
    return EvaByteTokenizer(model_max_length=version)


MADE = {
    "heads": lambda: detached(moved_heads(llama())),
    "eagle": lambda: detached(EagleHead.from_backbone(llama(), version=1)),
    "student": lambda: detached(PTPStudent.from_backbone(llama(), lora_rank=2)),
    "evabyte": lambda: every_model("evabyte_ff"),
    "modules": lambda: every_model("deepseek_llama"),
    "ptp": lambda: every_model("ptp_one_hot"),
    "assistant": lambda: AssistantDrafter(llama()),
}
OTHERS = {
    "suffixes": (suffixes, SuffixDrafter.from_pretrained, lambda loaded: loaded.table.texts()[0][0]),
    "tokenizer": (tokenizer, EvaByteTokenizer.from_pretrained, lambda loaded: loaded.model_max_length),
}
KINDS = (*MADE, *OTHERS)


def saver(kind: str, folder: Path):
    """How a kind is saved to a folder in a version, and which version is loaded from it."""
    if kind in OTHERS:
        make, load, version = OTHERS[kind]
        both = {1: make(1), 2: make(2)}
        return lambda which: both[which].save_pretrained(folder), lambda: version(load(folder))
    saved = MADE[kind]()
    options = {"max_shard_size": "10KB"} if kind in ("evabyte", "modules", "assistant") else {}
    return (
        lambda which: stamped(saved, which).save_pretrained(folder, **options),
        lambda: version_of(type(saved).from_pretrained(folder)),
    )


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def number_of_operations(save) -> int:
    with before_operation(10**6, no_space()) as count:
        save(1)
    return count[0]


def check_kills(kind: str, folder: Path, count: int, seed: int) -> None:
    save, load = saver(kind, folder)
    save(1)
    size = number_of_operations(save)
    for number in random.Random(seed).sample(range(size), min(count, size)):
        save(1)
        assert killed(lambda: save(2), number)
        assert load() in (1, 2), number
        save(2)
        assert load() == 2 and hidden(folder) == [], number


@pytest.mark.by_day("heads", "modules", "suffixes", "tokenizer")
@pytest.mark.core_cases("heads")
@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_leaves_one_version(kind, tmp_path):
    check_kills(kind, tmp_path / "saved", 2, 0)


def leave_complete(save, folder: Path) -> None:
    """End a save of the second version before the first file is brought in."""
    number = 0
    while not any(folder.glob(COMPLETE)):
        save(1)
        assert killed(lambda: save(2), number)
        number += 1


def test_a_tokenizer_outlives_an_unfinished_save_of_a_model(tmp_path):
    save, load = saver("evabyte", tmp_path)
    tokenizer(5).save_pretrained(tmp_path)
    leave_complete(save, tmp_path)
    assert EvaByteTokenizer.from_pretrained(tmp_path).model_max_length == 5 and load() == 2 and hidden(tmp_path) == []


def test_heads_and_their_backbone_are_one_version(tmp_path):
    model = JointMTPModel(moved_heads(llama()))

    def save(version):
        stamped(model, version).save_pretrained(tmp_path / "saved")

    save(1)
    size = number_of_operations(save)
    for number in range(0, size, 7):
        save(1)
        assert killed(lambda: save(2), number)
        stamped(model, 3).load_checkpoint(tmp_path / "saved")
        assert {each.flatten()[0].item() for each in model.parameters()} in ({1.0}, {2.0})


OWN = {"unembedding" if hasattr(MTPHeadConfig(head_type="hydra"), "unembedding") else "unembed": "own"}
LAYOUTS = (("medusa", "medusa"), ("medusa", "vllm"), ("hydra", "hydra"), ("layer", "gloeckle"))


@pytest.mark.parametrize(("head_type", "layout"), LAYOUTS)
def test_exports_of_heads_are_one_version_and_write_through_no_link(head_type, layout, tmp_path):
    heads = MTPHeads.from_backbone(llama(), window=3, head_type=head_type, **OWN if head_type == "hydra" else {})
    folder, outside = tmp_path / "out", tmp_path / "precious"
    heads.export(folder, layout)
    names = [path.name for path in folder.iterdir()]
    outside.write_text("precious")
    for name in names:
        (folder / name).unlink()
        (folder / name).symlink_to(outside)
    (folder / "notes.txt").write_text("mine")
    heads.export(folder, layout)
    assert outside.read_text() == "precious" and not any((folder / name).is_symlink() for name in names)
    before = {name: (folder / name).read_bytes() for name in names}
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(1)
    for number in range(0, 40, 3):
        heads.export(folder, layout)
        after = {name: (folder / name).read_bytes() for name in names}
        for name, data in before.items():
            (folder / name).write_bytes(data)
        if not killed(lambda: heads.export(folder, layout), number):
            break
        saving.finish(folder)
        assert {name: (folder / name).read_bytes() for name in names} in (before, after), number
    assert (folder / "notes.txt").exists() and hidden(folder) == []


def test_an_export_that_is_refused_leaves_nothing(tmp_path, monkeypatch):
    heads = detached(moved_heads(llama()))
    with pytest.raises((RuntimeError, ValueError)):
        heads.export(tmp_path / "out", "gloeckle")
    monkeypatch.setattr(torch, "save", lambda *args, **kwargs: (_ for _ in ()).throw(no_space()))
    with pytest.raises(OSError, match="No space"):
        MTPHeads.from_backbone(llama(), window=3, head_type="hydra", **OWN).export(tmp_path / "out", "hydra")
    assert not [*(tmp_path / "out").iterdir()]
