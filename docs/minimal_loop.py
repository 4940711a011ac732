"""Speculative decoding of one sequence, in full: draft, one call of the backbone, token verification, rollback.

No part of the package; `tests/test_minimal_loop.py` holds it to what `generate` does. A drafter is a function of the
tokens so far [L], the number of drafts and the temperature. It returns drafts [m], and the distributions [m, V] that
they were drawn from, or None where they were chosen and not drawn.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

Draft = tuple[Tensor, Tensor | None]
Drafter = Callable[[Tensor, int, float], Draft]


@torch.no_grad()
def generate(
    model: PreTrainedModel, prompt: Tensor, drafter: Drafter, new_tokens: int, length: int = 4, temperature: float = 0.0
) -> tuple[Tensor, list[int]]:
    """Return the prompt [L] with `new_tokens` more, and how many drafts each cycle accepted."""
    cache = DynamicCache(config=model.config)
    logits = model(prompt[None], past_key_values=cache).logits[0, -1:]  # [1, V]
    tokens = torch.cat([prompt, choose(logits, temperature)])  # the last one, b, is not in the cache
    counts = []
    while len(tokens) - len(prompt) < new_tokens:
        most = min(length, new_tokens - (len(tokens) - len(prompt)) - 1)  # verification adds one more
        draft, q = drafter(tokens, most, temperature)
        block = torch.cat([tokens[-1:], draft])  # b and the draft
        logits = model(block[None], past_key_values=cache).logits[0]  # [m + 1, V]: what follows each of them
        if temperature:
            count, added = verify_sampled(draft, q, (logits / temperature).softmax(-1))
        else:
            count, added = verify_greedy(draft, logits)
        tokens = torch.cat([tokens, draft[:count], added])
        cache.crop(count - len(draft))  # what was rejected; the new b is not in it yet
        counts.append(count)
    return tokens, counts


def choose(logits: Tensor, temperature: float) -> Tensor:
    """Return a token for each row of logits [n, V]: drawn, or the most likely one."""
    return torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0] if temperature else logits.argmax(-1)


def verify_greedy(draft: Tensor, logits: Tensor) -> tuple[int, Tensor]:
    """Return how many drafts are the backbone's own choices, and its choice after them [1]."""
    choices = logits.argmax(-1)  # [m + 1]
    count = int((draft == choices[:-1]).long().cumprod(0).sum())
    return count, choices[count : count + 1]


def verify_sampled(draft: Tensor, q: Tensor | None, p: Tensor) -> tuple[int, Tensor]:
    """Accept draft x with probability min(1, p(x) / q(x)); at the first rejection draw from max(p - q, 0).

    Args:
        draft: [m].
        q: [m, V], what each was drawn from; None: they were not drawn, so that q is one-hot.
        p: [m + 1, V], the backbone's distributions at the same positions, and after the last draft.
    """
    q = torch.nn.functional.one_hot(draft, p.shape[-1]).to(p) if q is None else q
    for index, token in enumerate(draft):
        if torch.rand(()) * q[index, token] >= p[index, token]:
            rest = (p[index] - q[index]).clamp(min=0)
            return index, torch.multinomial(rest, 1)
    return len(draft), torch.multinomial(p[-1], 1)


def repeated(tokens: Tensor, length: int, temperature: float) -> Draft:
    """Draft what followed the last token where it stood before (an n-gram look-up with n = 1)."""
    places = (tokens[:-1] == tokens[-1]).nonzero()[:, 0]
    start = int(places[-1]) + 1 if len(places) else len(tokens)
    return tokens[start : start + length], None


def bigrams(table: Tensor) -> Drafter:
    """Return a drafter whose row x of `table` [V, V] scores what follows token x."""

    def draft(tokens: Tensor, length: int, temperature: float) -> Draft:
        token, drafts, probs = tokens[-1:], [tokens[:0]], []
        for _ in range(length):
            logits = table[token]  # [1, V]
            token = choose(logits, temperature)
            drafts.append(token)
            probs.append((logits / (temperature or 1.0)).softmax(-1))
        return torch.cat(drafts), torch.cat(probs) if probs and temperature else None

    return draft
