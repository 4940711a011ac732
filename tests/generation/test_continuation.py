"""Positions and token types that a call gives, or that an image makes, go on in drafts as in plain decoding."""

import itertools

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from tests.backbones import prompts
from tests.models import left_padded
from tokenahead import NgramDrafter, PTPStudent
from tokenahead.generation.backbone.target import Continuation

GREEDY = dict(do_sample=False, max_new_tokens=24)
IMAGE = 60
VISION = dict(
    depth=1, embed_dim=16, hidden_size=32, num_heads=2, mlp_ratio=2, patch_size=4, spatial_merge_size=2,
    temporal_patch_size=2, in_channels=3, initializer_range=0.3,
)  # fmt: skip
TEXT = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=512, bos_token_id=1, eos_token_id=None,
    pad_token_id=0, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 2]),
)  # fmt: skip


def gpt2(kind=GPT2LMHeadModel, seed=0):
    """Weights so large that texts differ by their positions and types."""
    torch.manual_seed(seed)
    model = kind(GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=256, initializer_range=0.3))
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval()


def given(batch, name):
    """Inputs of every token that continue otherwise than by default, other ones in every row."""
    rows, width = batch["input_ids"].shape
    if name == "token_type_ids":
        return {name: torch.arange(3, 3 + rows)[:, None] + torch.arange(width) % 2}
    if name == "position_ids":
        return {name: (batch["attention_mask"].cumsum(1) - 1).clamp(min=0) + 5 * torch.arange(1, rows + 1)[:, None]}
    return {}


def test_inputs_of_single_tokens_go_on():
    for branches, name in itertools.product([1, 3], ["none", "token_type_ids", "position_ids"]):
        model, batch = gpt2(), left_padded(prompts(4))
        drafter = NgramDrafter(longest=1, num_tokens=4, branches=branches).attach(model)
        options = batch | given(batch, name) | GREEDY
        plain = model.generate(**options)
        out = model.generate(**options, assistant_model=drafter, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain) and any(map(any, out.speculation.rows_accepted))
        if name != "none":
            assert not torch.equal(plain, model.generate(**batch, **GREEDY)), "or the case shows nothing"


def test_positions_behind_an_image():
    for branches, rows in itertools.product([1, 3], ["image", "image and text"]):
        torch.manual_seed(1)
        config = Qwen2VLConfig(
            text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, video_token_id=61, vision_start_token_id=62,
            vision_end_token_id=63,
        )  # fmt: skip
        model = Qwen2VLForConditionalGeneration(config).eval()
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
        texts = [torch.tensor([5, 6, 62, *[IMAGE] * 64, 63, 7, 8, 9, 10])]
        texts += [torch.tensor([9, 8, 7, 6])] if rows == "image and text" else []
        batch = left_padded(texts)
        batch |= dict(
            pixel_values=torch.randn(256, 3 * 2 * 4 * 4), image_grid_thw=torch.tensor([[1, 16, 16]]),
            mm_token_type_ids=(batch["input_ids"] == IMAGE).int(),
        )  # fmt: skip
        drafter = NgramDrafter(longest=1, num_tokens=4, branches=branches).attach(model)
        plain = model.generate(**batch, **GREEDY)
        out = model.generate(**batch, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain) and any(map(any, out.speculation.rows_accepted))


def test_a_prompt_that_ends_in_an_image_goes_on_as_text():
    types = torch.tensor([[0, 1], [0, 1]])
    made = Continuation({"mm_token_type_ids": types, "token_type_ids": types}, torch.tensor([2, 2]))
    inputs = made.inputs(torch.tensor([[2, 3, 4]]).expand(2, -1))
    assert not inputs["mm_token_type_ids"].any() and inputs["token_type_ids"].tolist() == [[1] * 3] * 2


@pytest.mark.core
def test_slots_that_ride_along():
    for name in ["token_type_ids", "position_ids"]:
        model, batch = gpt2(), left_padded(prompts(4))
        apart = PTPStudent.from_backbone(model, num_slots=3)
        options = batch | given(batch, name) | GREEDY
        plain = model.generate(**options)
        assert torch.equal(model.generate(**options, assistant_model=apart), plain)


class Coloured(GPT2LMHeadModel):
    """Reads something of every token that this library has never heard of."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, colours=None, **kwargs):
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


def test_what_nobody_knows_how_to_go_on_decodes_plainly():
    model, batch = gpt2(Coloured), left_padded(prompts(4))
    drafter = NgramDrafter(longest=1, num_tokens=4).attach(model)
    options = batch | GREEDY | {"colours": torch.ones_like(batch["input_ids"])}
    out = model.generate(**options, assistant_model=drafter, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(**options)) and not hasattr(out, "speculation")
    with pytest.raises(ValueError, match="use_mtp=.*colours="):
        model.generate(**options, assistant_model=drafter, use_mtp=True)
