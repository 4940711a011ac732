"""A small Gemma 4 and an assistant that learned to read it; several tests share them."""

from functools import cache

import torch
from transformers import (
    DynamicCache,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

from tokenahead.generation.assistant.state_readers import buildable

KINDS = ["sliding_attention", "full_attention"]
WINDOW = 6
"""Of the layers with sliding windows: shorter than every text."""
_SIZES = dict(
    intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=16,
    max_position_embeddings=256, initializer_range=0.15, sliding_window=WINDOW, pad_token_id=0, bos_token_id=1,
    eos_token_id=None,
)  # fmt: skip


def gemma4(vocabulary: int = 48, seed: int = 1, is_sharing: bool = True, **changes) -> PreTrainedModel:
    """A random Gemma 4 that never ends a text; the small ones share keys and values among layers, the large do not."""
    torch.manual_seed(seed)
    sharing = dict(num_kv_shared_layers=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=vocabulary)
    alone = dict(num_kv_shared_layers=0, hidden_size_per_layer_input=0)
    options = dict(hidden_size=32, num_hidden_layers=4, layer_types=KINDS * 2, vocab_size=vocabulary, **_SIZES)
    config = Gemma4TextConfig(**options | (sharing if is_sharing else alone) | changes)
    model = Gemma4ForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


def assistant(vocabulary: int = 48, backbone_width: int = 32, has_clusters: bool = False, **changes) -> PreTrainedModel:
    """A random assistant, half as wide as its backbone."""
    torch.manual_seed(3)
    options = dict(
        hidden_size=16, num_hidden_layers=2, num_kv_shared_layers=2, layer_types=KINDS, vocab_size=vocabulary,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, **_SIZES,
    )  # fmt: skip
    clusters = dict(use_ordered_embeddings=has_clusters, num_centroids=8, centroid_intermediate_top_k=3)
    config = Gemma4AssistantConfig(
        text_config=Gemma4TextConfig(**options | changes), backbone_hidden_size=backbone_width, **clusters
    )
    model = Gemma4AssistantForCausalLM(buildable(config)).eval()
    if has_clusters:
        model.masked_embedding.token_ordering.copy_(torch.randperm(vocabulary))
    return model


def read(
    model: PreTrainedModel, backbone: PreTrainedModel, text: torch.Tensor, place: int, steps: int, guided: bool = False
) -> torch.Tensor:
    """Logits [B, steps, V] of drafts behind `text[:, : place + 1]`, by transformers' own forward of the assistant.

    Only what is before the last of these tokens is lent. A guided draft is the text's, another one the most likely.
    """
    with torch.no_grad():
        out = backbone(text[:, :place], past_key_values=DynamicCache(config=backbone.config), output_hidden_states=True)
    state, lent, token = out.hidden_states[-1][:, -1:], {}, text[:, place, None]
    config = backbone.config
    for layer in range(config.num_hidden_layers - config.num_kv_shared_layers):
        cached = out.past_key_values.layers[layer]
        lent[config.layer_types[layer]] = cached.keys, cached.values
    logits = []
    for step in range(1, steps + 1):
        drafted = model(
            inputs_embeds=torch.cat([backbone.get_input_embeddings()(token).detach(), state], -1),
            position_ids=torch.full((len(text), 1), place), shared_kv_states=lent, use_cache=False,
        )  # fmt: skip
        state = drafted.last_hidden_state
        logits.append(drafted.logits[:, -1])
        token = text[:, place + step, None] if guided else logits[-1].argmax(-1, keepdim=True)
    return torch.stack(logits, 1)


def learn_to_read(model: PreTrainedModel, backbone: PreTrainedModel, rounds: int) -> PreTrainedModel:
    """Trains an assistant on text that the backbone wrote greedily."""
    generator = torch.Generator().manual_seed(4)
    starts = torch.randint(2, model.vocab_size, (32, 3), generator=generator)
    text = backbone.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=20, do_sample=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(rounds):
        place = int(torch.randint(1, 20, (), generator=generator))
        logits = read(model, backbone, text, place, 3, guided=True)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, place + 1 : place + 4].flatten()).backward()
        optimizer.step()
    return model.eval()


@cache
def trained_pair(
    vocabulary: int = 48, is_sharing: bool = True, has_clusters: bool = False, rounds: int = 60
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A backbone, and an assistant that is often right about it; who attaches it detaches it again."""
    backbone = gemma4(vocabulary, is_sharing=is_sharing)
    return backbone, learn_to_read(assistant(vocabulary, has_clusters=has_clusters), backbone, rounds)
