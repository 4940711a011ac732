"""Blocks of drafts on a cache in which each sequence has its own end, compared with tokens one by one."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tokenahead.generation.backbone.backbones import target_of
from tokenahead.generation.call.sequences import NewTokens
from tokenahead.generation.contract import DraftTree

ACCEPTED = [[1, 1, 1], [4, 1, 2], [0, 1, 1], [1, 4, 3], [4, 4, 4], [1, 2, 1], [3, 4, 1], [4, 0, 1], [2, 4, 4]]
"""New tokens of three sequences, cycle by cycle."""
SIZES = [1, 4, 1, 4, 4, 2, 4, 4, 4]
"""Tokens of the block of each cycle; of one alone, transformers hides no heavily compressed entries."""
WRONG = 95


def filled(model: PreTrainedModel, ids: Tensor) -> tuple[DynamicCache, Tensor]:
    """transformers' own cache with these tokens, one after the other, and the logits after each."""
    cache = DynamicCache(config=model.config)
    logits = [model(token[:, None], past_key_values=cache).logits for token in ids.unbind(1)]
    return cache, torch.cat(logits, 1)


def check_blocks(
    model: PreTrainedModel,
    texts: Tensor,
    prompt: int,
    kind: type,
    after_block: Callable[[], None] = lambda: None,
    more: tuple[list[int], int] | None = None,
) -> tuple[DynamicCache, DynamicCache, int]:
    """Compare the logits of every block with those of single tokens; return what is left in the cache.

    Args:
        model: The backbone.
        texts: [3, L], what is accepted.
        prompt: Tokens before the first block.
        kind: The class of the target that the model gets.
        after_block: Called after every cycle.
        more: New tokens and size of one more block.

    Returns:
        The cache as the target gives it back, transformers' own with the longest sequence, and that one's number.
    """
    cache, ends = DynamicCache(config=model.config), [prompt] * 3
    model(texts[:, :prompt], past_key_values=cache)
    target = target_of(model, cache, texts[:, 0], None, limit=prompt, span=0)
    assert isinstance(target, kind)
    _, want = filled(model, texts)
    for accepted, size in [*zip(ACCEPTED, SIZES), *([more] if more else [])]:
        drafts = torch.stack([text[end : end + size] for text, end in zip(texts, ends)])
        for sequence, count in enumerate(accepted):
            drafts[sequence, max(count, 1) :] = WRONG
        logits = target.forward(drafts, DraftTree.chain(drafts[:, 1:]), None).logits
        assert logits.shape[1] == size
        for sequence, (end, count) in enumerate(zip(ends, accepted)):
            torch.testing.assert_close(logits[sequence, :count], want[sequence, end : end + count], atol=2e-5, rtol=0)
        target.keep(NewTokens(accepted, texts.device))
        ends = [end + count for end, count in zip(ends, accepted)]
        after_block()
    last = max(range(3), key=ends.__getitem__)
    target.align(ends[last])
    return cache, filled(model, texts[last : last + 1, : ends[last]])[0], last
