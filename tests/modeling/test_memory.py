"""What a drafter saves is what was loaded or what it learned, whatever its backbone learns meanwhile."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from tests.eagle_models import tiny_backbone
from tokenahead import AssistantDrafter, BlockDrafter, EagleHead, MTPHeads, PTPStudent
from tokenahead.modeling.common.draft_vocabulary import DraftVocabulary


def deepspec(base, folder):
    made = BlockDrafter.from_backbone(base, layers=1, block_size=4)
    made.export(folder, "deepspec")
    made.detach()
    return BlockDrafter.from_pretrained(folder)


def stored(make):
    def stored_and_loaded(base, folder):
        made = make(base)
        made.save_pretrained(folder)
        made.detach()
        return type(made).from_pretrained(folder)

    return stored_and_loaded


DRAFTERS = {
    "deepspec": deepspec,
    "own tables": stored(lambda m: BlockDrafter.from_backbone(m, layers=1, own_embeddings=True, own_unembedding=True)),
    "block draft ids": stored(lambda m: BlockDrafter.from_backbone(m, layers=1, draft_ids=[3, 5, 9])),
    "eagle": stored(lambda m: EagleHead.from_backbone(m, version=3, own_embeddings=True)),
    "eagle draft ids": stored(lambda m: EagleHead.from_backbone(m, version=3, draft_ids=[3, 5, 9])),
    "shared": stored(lambda m: MTPHeads.from_backbone(m, window=3, head_type="medusa", unembedding="shared")),
    "own": stored(lambda m: MTPHeads.from_backbone(m, window=3, head_type="ff", unembedding="own")),
    "student": stored(lambda m: PTPStudent.from_backbone(m, num_slots=3)),
}


@torch.no_grad()
def in_place(model):
    for parameter in model.parameters():
        parameter.add_(1)


@torch.no_grad()
def through_data(model):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def assigned(model):
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}, assign=True)


def by_a_step(model):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


@pytest.mark.by_day(most=5)
@pytest.mark.parametrize("learn", [in_place, through_data, assigned, by_a_step], ids=lambda learn: learn.__name__)
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_backbone_that_learns_moves_no_drafter(name, learn, tmp_path):
    base = tiny_backbone()
    drafter = DRAFTERS[name](base, tmp_path / "made")
    drafter.save_pretrained(tmp_path / "loaded")
    loaded = load_file(tmp_path / "loaded/model.safetensors")
    held = {key: tensor.clone() for key, tensor in drafter.state_dict().items()}
    drafter.attach(base)
    averaged = copy.deepcopy(drafter)  # a copy is a pair, too
    learn(base)
    learned = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    for place, each in (("attached", drafter), ("average", averaged)):
        each.save_pretrained(tmp_path / place)
        saved = load_file(tmp_path / place / "model.safetensors")
        assert saved.keys() == loaded.keys()
        assert [key for key in saved if not torch.equal(saved[key], loaded[key])] == []
    drafter.detach()
    assert [key for key, tensor in drafter.state_dict().items() if not torch.equal(tensor, held[key])] == []
    in_place(drafter)  # nor does a drafter that learns move its backbone
    assert [key for key, tensor in base.state_dict().items() if not torch.equal(tensor, learned[key])] == []


def test_an_assistant_of_the_first_layers_has_its_own_memory(tmp_path):
    base = tiny_backbone()
    drafter = AssistantDrafter.from_backbone(base, layers=1)
    held = {key: tensor.clone() for key, tensor in drafter.model.state_dict().items()}
    in_place(base)
    drafter.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert [key for key, tensor in saved.items() if not torch.equal(tensor, held[key])] == []
    assert not drafter.model.get_input_embeddings().weight.requires_grad
    drafter.detach()


def test_rows_of_an_unembedding_are_those_of_the_one_that_is_there():
    """Another weight at the address of the last one, as unchanged as that was: a state dict was assigned twice."""
    part, memory = DraftVocabulary([1, 3], 4), torch.zeros(4, 2)
    first = torch.nn.Parameter(memory)
    assert torch.equal(part.rows(first), memory[[1, 3]])
    address, version = first.data_ptr(), first._version
    del first
    memory.data.copy_(torch.arange(8).view(4, 2))
    second = torch.nn.Parameter(memory)
    assert (second.data_ptr(), second._version) == (address, version)
    assert torch.equal(part.rows(second), memory[[1, 3]])
