"""What a backbone implies of tokens further ahead, and which layer comes to know them (Mehra et al. 2025 in small).

    python benchmarks/byte_llama.py --minutes 5 --output large
    python benchmarks/marginal.py large
    python benchmarks/marginal.py smol --answers smollm2_answers.npz --depth 2 --rows 16 --every 24 --branches 32

At positions of texts, of held-out source or of a model's own answers: how often the text's token is the most
likely one, and among the five most likely, with the tokens between summed out (the best that heads without access to
them can do) and with them known; the entropy of the next token and how many tokens hold 90 and 99 % of it; and the
divergence of every layer's distribution from the last one's (logit lens). Behind `±` is the standard error, from the
spread between texts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from analysis import layer_divergences, marginal_log_probs, next_token_spread
from corpus import load_corpus
from measuring import markdown, resumed
from strategies import bits
from studies import held_out_rows
from transformers import AutoModelForCausalLM

MASSES = 0.9, 0.99


def of_texts(values: torch.Tensor) -> tuple[float, float]:
    """Return the mean of [N, S] over positions, and its standard error over texts."""
    texts = values.double().mean(1)
    return float(texts.mean()), float(texts.std()) / len(texts) ** 0.5


@torch.no_grad()
def figures_of(arguments: argparse.Namespace, path: str, ids: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Return one backbone's figures, each with its error."""
    backbone: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    depth, branches = arguments.depth, arguments.branches
    columns = torch.arange(arguments.first, ids.shape[1] - depth, arguments.every)
    options = {"mass": arguments.mass, "max_branches": branches, "batch_size": branches}
    found = marginal_log_probs(backbone, ids, depth, positions=columns.tolist(), **options)
    ahead = columns[:, None] + torch.arange(1, depth + 1)
    truth, known = ids[:, ahead], backbone(ids, use_cache=False).logits[:, ahead - 1]
    figures = {"bits of a token": (bits(backbone, ids), 0.0)}
    for name, scores in (("summed out", found.log_probs), ("known", known)):
        hits = scores.topk(5).indices == truth[..., None]  # [N, S, depth, 5]
        for most in (1, 5):
            right = hits[..., :most].any(-1)
            figures |= {f"{name}, top {most}, depth {j + 1}": of_texts(right[..., j]) for j in range(depth)}
    figures |= {f"mass left out, depth {j + 1}": of_texts(found.missing[..., j]) for j in range(1, depth)}
    entropy, sizes = next_token_spread(backbone, ids, masses=MASSES)
    figures["entropy"] = of_texts(entropy[:, columns])
    figures |= {f"tokens of {mass:.0%}": of_texts(size[:, columns]) for mass, size in sizes.items()}
    lens = enumerate(layer_divergences(backbone, ids), start=1)
    return figures | {f"divergence of layer {layer}": of_texts(row[:, columns]) for layer, row in lens}


def texts_of(arguments: argparse.Namespace) -> torch.Tensor:
    """Return texts [rows, length]: prompts with the beginnings of answers, or windows of held-out source."""
    if arguments.answers is None:
        return held_out_rows(load_corpus(seed=0), arguments.rows)[:, : arguments.length]
    with np.load(arguments.answers) as file:
        ids, lengths = torch.from_numpy(file["ids"].astype(np.int64)), file["lengths"].tolist()
        texts = zip(ids.split(lengths), file["prompts"].tolist())
    length, first = arguments.length, arguments.first  # positions are in answers
    rows = [text[:length] for text, prompt in texts if len(text) >= length and prompt <= first]
    return torch.stack(rows[:: len(rows) // arguments.rows][: arguments.rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbones", nargs="+")
    parser.add_argument("--answers", type=Path, help="ids of a model's own answers, joined; their `lengths`")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32, help="texts")
    parser.add_argument("--length", type=int, default=240, help="tokens of a text")
    parser.add_argument("--first", type=int, default=64, help="position that is looked at; prompts end before it")
    parser.add_argument("--every", type=int, default=4, help="distance of the positions that are looked at")
    parser.add_argument("--mass", type=float, default=0.9)
    parser.add_argument("--branches", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("marginal.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ids = texts_of(arguments)
    found = resumed(arguments.output, arguments.backbones, lambda path: figures_of(arguments, path, ids))
    names = dict.fromkeys(name for path in arguments.backbones for name in found[path])
    cells = [[name, *(shown(found[path].get(name)) for path in arguments.backbones)] for name in names]
    print(markdown(["figure", *arguments.backbones], cells), end="")


def shown(figure: list[float] | None) -> str:
    """Return a mean and its error as text."""
    return "-" if figure is None else f"{figure[0]:.3f} ± {figure[1]:.3f}"


if __name__ == "__main__":
    main()
