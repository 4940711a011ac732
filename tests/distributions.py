"""Helpers for tests about probability distributions: goldens, distributions of continuations, and chi-square tests."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from scipy import stats

CIRCUITS = Path(__file__).parent / "data" / "circuits"


def golden(name: str) -> dict[str, torch.Tensor]:
    """The tensors of one golden case of circuits, verification or losses."""
    return load_file(CIRCUITS / f"{name}.safetensors")


def chi_square(cells: torch.Tensor, distribution: torch.Tensor) -> float:
    """p-value of drawn cell numbers [N] under `distribution` [C]; cells expected less than 5 times are counted as one.

    A cell that the distribution excludes and that was drawn gives 0.
    """
    seen = torch.bincount(cells, minlength=len(distribution)).double()
    if seen[distribution == 0].any():
        return 0.0
    expected = distribution.double() * len(cells)
    rare = expected < 5
    merged = [torch.cat([counts[~rare], counts[rare].sum()[None]]) for counts in (seen, expected)]
    if merged[1][-1] < 5:  # too few even together: they join the last frequent cell
        merged = [torch.cat([counts[:-2], counts[-2:].sum()[None]]) for counts in merged]
    seen, expected = merged
    return float(stats.chisquare(seen.numpy(), (expected * seen.sum() / expected.sum()).numpy()).pvalue)


@torch.no_grad()
def continuation_distribution(model, prompt: torch.Tensor, length: int, **options) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of `length` tokens, one by one, with transformers' own processors.

    Args:
        model: A causal language model of few tokens.
        prompt: [1, L] int64.
        length: Tokens to continue by.
        **options: Of `generate`.
    """
    config, _ = model._prepare_generation_config(None, do_sample=True, **options)
    model._prepare_special_tokens(config, device=prompt.device)
    processors = model._get_logits_processor(config, prompt.shape[1], prompt, None, [], device="cpu")
    distribution = {(): 1.0}
    for _ in range(length):
        distribution = {text: p for text, p in distribution.items() if p > 0}
        ids = torch.cat(
            [prompt.expand(len(distribution), -1), torch.tensor(list(distribution)).long().view(len(distribution), -1)],
            dim=1,
        )
        next_probs = processors(ids, model(ids, use_cache=False).logits[:, -1].double()).softmax(-1).tolist()
        distribution = {
            (*text, x): p * q for (text, p), row in zip(distribution.items(), next_probs) for x, q in enumerate(row)
        }
    return distribution


def continuation_p_value(samples: torch.Tensor, distribution: dict[tuple[int, ...], float]) -> float:
    """Chi-square p-value of drawn continuations [N, length]; see `chi_square`."""
    number = {text: cell for cell, text in enumerate(distribution)}
    texts = [tuple(text) for text in samples.tolist()]
    if any(text not in number for text in texts):  # it continues what the distribution excludes
        return 0.0
    cells = torch.tensor([number[text] for text in texts])
    return chi_square(cells, torch.tensor(list(distribution.values()), dtype=torch.double))
