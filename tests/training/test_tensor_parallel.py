"""Backbones whose layers several processes share: what drafts on them, and what is refused by name.

A group of one process that pretends to be two (torch's "fake" backend) divides tensors as a real one does.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaForCausalLM, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import AllReduceParallel

from tests.training.test_evaluation_loss import llama
from tokenahead import AssistantDrafter, EagleHead, MTPHeads, PTPStudent
from tokenahead.experimental import MuToRTrainer
from tokenahead.generation.backbone.wrapped_models import LayerDivision
from tokenahead.training import MTPTrainer, TrainingStrategy, cache_features, regenerate
from tokenahead.training.parts import Processes

pytestmark = pytest.mark.filterwarnings("error::FutureWarning")  # of ways to load that transformers takes away
IDS = torch.arange(70, 80)[None]
ROWS = [{"input_ids": IDS[0], "labels": IDS[0]}]
PART = {"draft_ids": list(range(70, 90))}
FAMILIES = {
    "hmm": lambda backbone: MTPHeads.from_backbone(backbone, head_type="hmm", rank=2),
    "ff": MTPHeads.from_backbone,
    "own": lambda backbone: MTPHeads.from_backbone(backbone, unembedding="own"),
    "medusa": lambda backbone: MTPHeads.from_backbone(backbone, head_type="medusa"),
    "part": lambda backbone: MTPHeads.from_backbone(backbone, **PART),
    "eagle1": lambda backbone: EagleHead.from_backbone(backbone, version=1),
    "eagle3": lambda backbone: EagleHead.from_backbone(backbone, aux_layers=[1, 2, 3]),
    "eagle3_part": lambda backbone: EagleHead.from_backbone(backbone, aux_layers=[1, 2, 3], **PART),
    "student": lambda backbone: PTPStudent.from_backbone(backbone, num_slots=2, lora_rank=2),
}
REFUSED = {
    "draft_layers": lambda backbone: MTPHeads.from_backbone(backbone, draft_layers=1),
    "layers=2": AssistantDrafter.from_backbone,
}


def plain():
    return llama(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    """One of the two halves of a backbone."""
    folder = tmp_path_factory.mktemp("backbone")
    plain().save_pretrained(folder)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.MonkeyPatch.context() as patch:  # which accelerate must not see
            for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
                patch.setenv(name, value)
            model = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_plan="auto"))
        yield model
    finally:
        torch.distributed.destroy_process_group()


def settings(folder):
    return TrainingArguments(folder, report_to="none", use_cpu=True, max_steps=1)


@pytest.mark.by_day("hmm", "eagle3_part", "student")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_drafter_is_made_and_drafts(name, divided):
    drafter = FAMILIES[name](divided)
    assert divided.generate(IDS, max_new_tokens=4, do_sample=False, assistant_model=drafter).shape[1] <= 14
    if name == "eagle3":
        assert type(drafter.lm_head.weight.data) is torch.Tensor


@pytest.mark.parametrize("name", REFUSED)
def test_a_drafter_that_reads_layers_is_refused(name, divided):
    with pytest.raises(ValueError, match=f"{name}.*tensor parallel.*tp_size=2"):
        REFUSED[name](divided)


def test_layers_whose_gradients_are_partial_take_no_adapters(divided):
    layer = torch.nn.Linear(4, 4)
    AllReduceParallel().install_forward(layer, init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match="AllReduceParallel.*adapters"):
        LayerDivision.of(layer)


@pytest.mark.core
def test_further_processes_are_refused(divided, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 4)
    with pytest.raises(ValueError, match="tensor parallel.*tp_size=2 of 4.*shard_backbone"):
        MTPTrainer(FAMILIES["hmm"](divided), settings(tmp_path), train_dataset=ROWS)


def test_training_of_models_around_it_is_refused(divided, tmp_path):
    whole, joint = settings(tmp_path), TrainingStrategy(train="all")
    with pytest.raises(ValueError, match="tensor parallel"):
        MTPTrainer(MTPHeads.from_backbone(divided), whole, train_dataset=ROWS, strategy=joint)
    with pytest.raises(ValueError, match="tensor parallel"):
        MTPTrainer(FAMILIES["hmm"](divided), whole, train_dataset=ROWS, strategy=TrainingStrategy(shard_backbone=True))
    with pytest.raises(ValueError, match="tensor parallel"):
        MuToRTrainer(divided, whole, train_dataset=ROWS)


def test_rows_are_not_divided_among_its_processes(divided, tmp_path):
    with pytest.raises(ValueError, match="tensor parallel"):
        cache_features(MTPHeads.from_backbone(divided), ROWS, tmp_path / "states")
    with pytest.raises(ValueError, match="tensor parallel"):
        regenerate(divided, [[70, 71]], tmp_path / "text", max_new_tokens=2)


def test_other_ways_of_dividing_are_found(divided):
    mesh, model = init_device_mesh("cpu", (2,)), plain()
    parallelize_module(model, mesh, {"model.layers.*.mlp.up_proj": ColwiseParallel()})
    with pytest.raises(ValueError, match="tp_size=2"):
        Processes.of(model)
    sharded = fully_shard(plain(), mesh=mesh)
    with pytest.raises(ValueError, match="FSDP2 shards"):
        Processes.of(sharded)
