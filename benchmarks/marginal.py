"""What a backbone implies of tokens further ahead, and which layer comes to know them (Mehra et al. 2025 in small).

    python benchmarks/byte_llama.py --minutes 5 --output large
    python benchmarks/marginal.py large
    python benchmarks/marginal.py smol --answers smollm2_answers.npz --depth 2 --rows 16 --every 24 --branches 32
    python benchmarks/marginal.py large --depth 2 --steps 100 --seeds 0 1 2

At positions of texts, of held-out source or of a model's own answers: how often the text's token is the most
likely one, and among the five most likely, with the tokens between summed out (the best that heads without access to
them can do) and with them known; the entropy of the next token and how many tokens hold 90 and 99 % of it; and the
divergence of every layer's distribution from the last one's (logit lens). Behind `±` is the standard error, from the
spread between texts.

`--steps` asks what the paper's first table does, whether heads are worth their training: the backbone takes so many
steps on further texts, for the next token alone, and its tokens between are summed out (`fine-tuned`); or it takes them
jointly with layer heads on weighted states, balanced, at four times its rate (`heads`).
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from analysis import layer_divergences, marginal_log_probs, next_token_spread
from corpus import ByteWindows, load_corpus
from measuring import markdown, resumed
from strategies import bits
from studies import LENGTH, held_out_rows, train
from transformers import AutoModelForCausalLM, Trainer

from tokenahead import MTPHeads
from tokenahead.training import TrainingStrategy

MASSES = 0.9, 0.99
MEHRA = TrainingStrategy(train="all", drafter_lr_multiplier=4.0, loss={"balance": "rms"})

TRAINED = "fine-tuned", "heads"


def of_texts(values: torch.Tensor) -> tuple[float, float]:
    """Return the mean of [N, S] over positions, and its standard error over texts."""
    texts = values.double().mean(1)
    return float(texts.mean()), float(texts.std()) / len(texts) ** 0.5


def hits_of(name: str, scores: torch.Tensor, truth: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Return how often tokens [N, S, depth] are first, and among the first five, of scores [N, S, depth, V]."""
    hits, figures = scores.topk(5).indices == truth[..., None], {}
    for most, j in product((1, 5), range(truth.shape[-1])):
        figures[f"{name}, top {most}, depth {j + 1}"] = of_texts(hits[..., j, :most].any(-1))
    return figures


@torch.no_grad()
def figures_of(arguments: argparse.Namespace, backbone: Any, ids: torch.Tensor) -> dict[str, tuple[float, float]]:
    """Return one backbone's figures, each with its error."""
    depth, branches, columns = arguments.depth, arguments.branches, columns_of(arguments, ids)
    options = {"mass": arguments.mass, "max_branches": branches, "batch_size": branches}
    found = marginal_log_probs(backbone, ids, depth, positions=columns.tolist(), **options)
    ahead = columns[:, None] + torch.arange(1, depth + 1)
    truth, known = ids[:, ahead], backbone(ids, use_cache=False).logits[:, ahead - 1]
    figures = {"bits of a token": (bits(backbone, ids), 0.0)}
    figures |= hits_of("summed out", found.log_probs, truth) | hits_of("known", known, truth)
    figures |= {f"mass left out, depth {j + 1}": of_texts(found.missing[..., j]) for j in range(1, depth)}
    entropy, sizes = next_token_spread(backbone, ids, masses=MASSES)
    figures["entropy"] = of_texts(entropy[:, columns])
    figures |= {f"tokens of {mass:.0%}": of_texts(size[:, columns]) for mass, size in sizes.items()}
    lens = enumerate(layer_divergences(backbone, ids), start=1)
    return figures | {f"divergence of layer {layer}": of_texts(row[:, columns]) for layer, row in lens}


def columns_of(arguments: argparse.Namespace, ids: torch.Tensor) -> torch.Tensor:
    """Return the positions that are looked at."""
    return torch.arange(arguments.first, ids.shape[1] - arguments.depth, arguments.every)


def answer(arguments: argparse.Namespace, path: str, kind: str, seed: int) -> dict[str, tuple[float, float]]:
    """Return figures of a backbone as it is, fine-tuned, or of the heads that learned with it."""
    backbone: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().to(arguments.device)
    ids, others = (text.to(arguments.device) for text in texts_of(arguments))
    if kind == "as it is":
        return figures_of(arguments, backbone, ids)
    torch.manual_seed(seed)
    data, how = [{"input_ids": row, "labels": row} for row in others.cpu()], {"seed": seed, "steps": arguments.steps}
    if kind == "fine-tuned":
        train(backbone, Trainer, data, 0, arguments.rate, **how)
        return figures_of(arguments, backbone, ids)
    heads = MTPHeads.from_backbone(backbone, arguments.depth, head_type="layer", first="own", mix="weighted")
    train(heads, MEHRA, data, 0, arguments.rate, **how)
    columns = columns_of(arguments, ids)
    with torch.no_grad():
        found: Any = [heads.distribution(row[None]) for row in ids]
        scores = torch.cat([each.leaf_logits[:, columns, :, 0] for each in found])  # [N, S, depth, V]
        figures = hits_of("heads", scores, ids[:, columns[:, None] + torch.arange(1, arguments.depth + 1)])
        return figures | {"bits of a token": (bits(backbone, ids), 0.0)}


def texts_of(arguments: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return texts [rows, length] to measure, and others to learn from: answers behind their prompts, or source."""
    if arguments.answers is None:
        corpus = load_corpus(seed=0)
        windows = ByteWindows(corpus.train, LENGTH)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))[: arguments.others]
        others = torch.stack([windows[index]["input_ids"] for index in order.tolist()])
        return held_out_rows(corpus, arguments.rows)[:, : arguments.length], others
    with np.load(arguments.answers) as file:
        ids, lengths = torch.from_numpy(file["ids"].astype(np.int64)), file["lengths"].tolist()
        texts = zip(ids.split(lengths), file["prompts"].tolist())
    length, first = arguments.length, arguments.first  # positions are in answers
    rows = [text[:length] for text, prompt in texts if len(text) >= length and prompt <= first]
    every = len(rows) // arguments.rows
    others = [row for number, row in enumerate(rows) if number % every][: arguments.others]
    return torch.stack(rows[::every][: arguments.rows]), torch.stack(others)


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
    parser.add_argument("--steps", type=int, help="of training; none: backbones are measured as they are")
    parser.add_argument("--rate", type=float, default=3e-4, help="of the backbone's training, falling to 0")
    parser.add_argument("--others", type=int, default=1024, help="texts to learn from")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=Path("marginal.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asked = {path: (path, "as it is", 0) for path in arguments.backbones}
    for path, seed, kind in product(arguments.backbones, arguments.seeds if arguments.steps else (), TRAINED):
        asked[f"{path}, {kind}, {arguments.steps} steps, seed {seed}"] = path, kind, seed
    found = resumed(arguments.output, asked, lambda name: answer(arguments, *asked[name]))
    names = dict.fromkeys(name for path in asked for name in found[path])
    print(markdown(["figure", *asked], [[name, *(shown(found[path].get(name)) for path in asked)] for name in names]))


def shown(figure: list[float] | None) -> str:
    """Return a mean and its error as text."""
    return "-" if figure is None else f"{figure[0]:.3f} ± {figure[1]:.3f}"


if __name__ == "__main__":
    main()
