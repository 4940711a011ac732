"""Greedy speculative output equals plain greedy, byte for byte, alone and in ragged batches (fp32)."""

import torch

from tests.backbones import plain_continuations
from tests.models import left_padded

NEW_TOKENS = 32


def prompts(count):
    """Text the model knows and noise, 1 to 100 tokens in 40 lengths: up to three windows, more once continued."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 101, (40,), generator=generator).tolist()
    return [torch.randint(64, 320, (lengths[i % 40],), generator=generator) for i in range(count)]


def plain_outputs(model, batch):
    """Prompts with their plain continuations; prompts of one length are decoded together, without padding."""
    return list(map(torch.cat, zip(batch, plain_continuations(model, batch, NEW_TOKENS, use_mtp=False))))


def seasoned(model, batch):
    """Every second prompt continued by the model itself, so that drafts of a trained text occur."""
    longer = plain_outputs(model, batch[::2])
    return [long if i % 2 == 0 else p for i, p in enumerate(batch) for long in [longer[i // 2]]]


def crossings(accepted, drafts, length, window):
    """Blocks [b, draft] that reach over a window border."""
    count, at = 0, length  # b of the first verification is the token after the prompt
    for kept, draft in zip(accepted, drafts):
        count += at // window != (at + len(draft)) // window
        at += kept + 1
    return count


def test_greedy_equals_plain_greedy_alone_and_in_ragged_batches(trained):
    batch = seasoned(trained, prompts(40))
    plain = plain_outputs(trained, batch)
    window, counts, crossed = trained.config.window_size, set(), 0
    options = dict(max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
    for prompt, expected in zip(batch, plain):
        out = trained.generate(prompt[None], **options)
        assert torch.equal(out.sequences[0], expected)
        counts |= set(out.speculation.accepted)
        crossed += crossings(out.speculation.accepted, out.speculation.drafts, len(prompt), window)
    assert counts == set(range(trained.window)), counts
    assert crossed >= 10, crossed

    ragged_counts, ragged = set(), False
    for start in range(0, len(batch), 4):
        group = batch[start : start + 4]
        out = trained.generate(**left_padded(group), **options)
        for row, (prompt, expected) in enumerate(zip(group, plain[start : start + 4])):
            assert torch.equal(out.sequences[row, -NEW_TOKENS:], expected[len(prompt) :])
        ragged_counts |= set().union(*out.speculation.accepted)
        ragged |= len({len(row) for row in out.speculation.accepted}) > 1
    assert ragged_counts == set(range(trained.window)) and ragged
