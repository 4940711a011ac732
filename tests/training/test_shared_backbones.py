"""Two processes that share a backbone, by tensor parallelism or FSDP2: drafters learn and draft as in one process."""

import json

import pytest
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from tests.programs import Program
from tests.ptp_models import student
from tests.training import shared_client
from tests.training.test_evaluation_loss import llama, modules
from tokenahead import MTPHeads
from tokenahead.training import PTPTrainer, TrainingStrategy
from tokenahead.training.strategy import prepare


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes have written."""
    folder = tmp_path_factory.mktemp("shared")
    shared_client.save_backbone(folder)
    client = ["tests.training.shared_client", str(folder), *shared_client.NAMES]
    Program("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *client).ended(600)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """What one process writes, by family."""
    (folder / "one").mkdir()
    (folder / "one" / "backbone").symlink_to(folder / "backbone")
    found = {}

    def run(family):
        if family not in found:
            shared_client.run(f"tp {family}", folder / "one", {})
            found[family] = _written(folder / "one", f"tp {family}", 0)
        return found[family]

    return run


def _written(folder, name, rank):
    return *json.loads((folder / f"{name}-{rank}.json").read_text()), load_file(folder / f"{name}.safetensors")


@pytest.mark.nightly
@pytest.mark.parametrize("name", shared_client.NAMES)
def test_two_processes_do_what_one_does(name, folder, alone):
    history, texts, weights = alone(name.split()[1])
    limit = 5e-6 if "masks" in name else 1e-6  # a norm's gradient at a small embedding magnifies rounding
    for rank in range(2):
        other, drafted, learned = _written(folder, name, rank)
        assert len(other) == len(history) and drafted == texts
        for mine, theirs in zip(history, other):
            assert theirs == pytest.approx(mine, rel=1e-6, abs=1e-6)
        assert (folder / f"{name} saved" / "model.safetensors").exists()
        assert all((learned[key] - weights[key]).abs().max() <= limit for key in weights)


@pytest.mark.nightly
def test_no_process_loads_all_layers(folder):
    layers = LlamaForCausalLM.from_pretrained(folder / "backbone").model.layers
    whole = sum(each.numel() for each in layers.parameters())
    assert [json.loads((folder / f"shares-{rank}.json").read_text()) for rank in range(2)] == [whole / 2, whole / 2]


def test_a_backbone_that_is_the_drafters_own_is_not_sharded_apart():
    for drafter, strategy in (
        (modules(), TrainingStrategy(shard_backbone=True, train="all")),
        (MTPHeads.from_backbone(llama()), TrainingStrategy(shard_backbone=True, train="all")),
        (MTPHeads.from_backbone(llama(), draft_layers=1), TrainingStrategy(shard_backbone=True)),
    ):
        with pytest.raises(ValueError, match="shard_backbone=True.*FSDP2"):
            prepare(drafter, strategy)


def test_slots_are_trained_on_a_frozen_backbone_that_is_whole_at_first(tmp_path):
    model = student()
    model.train_only("all")
    with pytest.raises(ValueError, match="shard_backbone=True.*frozen"):
        PTPTrainer(model, shard_backbone=True)
