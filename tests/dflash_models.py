"""Small Muse models, and DFlash assistants that learned what backbones write; several tests share them."""

from functools import cache
from tempfile import TemporaryDirectory

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from tests.backbones import CONFIGS, backbone, code, coder, learn
from tokenahead import BlockDrafter

BLOCK, LAYERS, WINDOW = 5, [-1, 0], 9
"""Tokens of a block, b among them; layers whose outputs are read (-1: embeddings); how far back windows reach."""


_MUSE = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    sliding_window=6, pad_token_id=0, bos_token_id=1, eos_token_id=None, initializer_range=0.15, output_multiplier=1.0,
    max_position_embeddings=256,
)  # fmt: skip
_EXPERTS = dict(moe_intermediate_size=32, num_local_experts=4, num_experts_per_tok=2, moe_hidden_size=16)
_EYE = dict(
    hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pos_emb_height=4, pos_emb_width=4
)
_EAR = dict(
    patch_sizes=[2], hidden_sizes=[16], depths=[1], num_hidden_layers=1, num_attention_heads=2, out_hidden_size=32
)


def muse(kind: str, vocabulary: int = 48) -> PreTrainedModel:
    """A random Muse Glimmer, or Muse Spark, with an eye (and an ear) that are not used."""
    library = pytest.importorskip(f"transformers.models.muse_{kind}")
    text = _MUSE | {"vocab_size": vocabulary} | (_EXPERTS if kind == "spark" else {})
    parts = dict(text_config=text, vision_config=_EYE, out_hidden_size=64, projector_hidden_size=16)
    parts |= dict(image_token_id=vocabulary - 2, video_token_id=vocabulary - 3)
    parts |= dict(audio_config=_EAR, audio_token_id=vocabulary - 4) if kind == "spark" else {}
    torch.manual_seed(1)
    name = f"Muse{kind.title()}"
    config = getattr(library, f"{name}Config")(**parts)
    model = getattr(library, f"{name}ForConditionalGeneration")(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def source_of(name: str, vocabulary: int) -> PreTrainedModel:
    """A random backbone."""
    return muse(name, vocabulary) if name in ("glimmer", "spark") else backbone(name, vocabulary)


def assistant(vocabulary: int = 48, **changes) -> PreTrainedModel:
    """A random assistant for backbones of width 32, with a layer of either kind."""
    kind = pytest.importorskip("transformers.models.muse_glimmer_assistant").MuseGlimmerAssistantConfig
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], block_size=BLOCK,
        mask_token_id=vocabulary - 1, target_layer_ids=LAYERS, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    return transformers.MuseGlimmerAssistantModel(kind(**sizes | changes)).eval()


def drafter_of(model: PreTrainedModel) -> BlockDrafter:
    """The block drafter of an assistant's directory."""
    with TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return BlockDrafter.from_pretrained(directory, dtype=torch.float32).eval()


def fill(model: PreTrainedModel, source: PreTrainedModel, text: torch.Tensor, place: int) -> torch.Tensor:
    """Logits [B, block - 1, V] of drafts after `text[:, : place + 1]`, by the assistant's own forward, all at once."""
    with torch.no_grad():
        states = source(text[:, :place], output_hidden_states=True).hidden_states
        embedding, size = source.get_input_embeddings(), model.config.block_size
        ids = torch.cat([text[:, place, None], text.new_full((len(text), size - 1), model.config.mask_token_id)], 1)
        block = torch.nn.functional.embedding(ids, embedding.weight)
    columns = torch.arange(place + size)
    near = (columns[place:, None] - columns).abs() <= model.config.sliding_window
    filled = model(
        noise_embeds=block, context_hidden_states=torch.cat([states[layer + 1] for layer in LAYERS], -1),
        position_ids=columns[None], attention_mask={"full_attention": None, "sliding_attention": near[None, None]},
    )  # fmt: skip
    return source.get_output_embeddings()(filled.last_hidden_state[:, 1:])


def learn_to_fill(
    model: PreTrainedModel, source: PreTrainedModel, text: torch.Tensor, rounds: int = 60
) -> PreTrainedModel:
    """Trains an assistant on texts [N, L]."""
    generator, optimizer = torch.Generator().manual_seed(4), torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(rounds):
        place = int(torch.randint(1, text.shape[1] - BLOCK, (), generator=generator))
        logits, goal = fill(model, source, text, place), text[:, place + 1 : place + BLOCK]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), goal.flatten()).backward()
        optimizer.step()
    return model.eval()


@cache
def trained_pair(name: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A backbone that writes code, and an assistant that is often right about it."""
    source = coder(name) if name in CONFIGS else learn(source_of(name, 48), code(), 60)
    return source, learn_to_fill(assistant(), source, code()[: 24 * 60].view(60, 24))


@cache
def random_pair(name: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A random backbone of ten ids, and an assistant that learned what it writes."""
    source = source_of(name, 10)
    starts = torch.randint(2, 6, (32, 3), generator=torch.Generator().manual_seed(4))
    text = source.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=24, do_sample=False)
    return source, learn_to_fill(assistant(10), source, text)
