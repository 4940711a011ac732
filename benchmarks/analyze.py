"""What a backbone already knows of tokens further ahead, and what its drafter has learned.

    python benchmarks/analyze.py --depth 4 -- --model_name_or_path MODEL --dataset_name DATA --drafter heads
    python benchmarks/analyze.py -- CONFIG.yaml --drafter heads:HEADS      # the file of a training

The words behind `--` are those of `tokenahead train`; `analysis.json` stands in its `output_dir`.

At positions in held-out text, for every depth j, in nats per token of the text:

- `marginal`: the distribution of token j that the backbone implies, with everything between summed out (Mehra et al.
  2025, Eq. 6): the best that can be done without knowing the tokens between;
- `head`: the drafter's distribution of token j, the same way (heads apart from sequential ones);
- `head_given`: the drafter's distribution given the true tokens between, as it drafts;
- `backbone_given`: the backbone's own distribution given the true tokens between, which no drafter beats.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from analysis import layer_divergences, marginal_log_probs, next_token_spread
from transformers import PreTrainedModel, PrinterCallback, set_seed

from tokenahead.modeling import EvaByteForMTPC, MTPHeads
from tokenahead.modeling.heads.losses import IGNORE, depth_targets
from tokenahead.training.commands.settings import Settings, read_settings
from tokenahead.training.commands.train import Trainee, build, make_trainer, with_moved_backbone
from tokenahead.training.evaluation import environment
from tokenahead.training.evaluation.drafts import drafted_probs, has_probs
from tokenahead.training.utils import replace_file

FIGURES = "analysis.json"
_OUT_OF_TRAINING = {"save_strategy": "no", "eval_strategy": "steps", "eval_steps": 1000, "max_steps": 1,
                    "disable_tqdm": True}  # fmt: skip


def analyze(settings: Settings, asked: argparse.Namespace) -> dict[str, Any]:
    """Compare marginals of the backbone with the distributions of its drafter, and write what was found.

    Returns:
        What is written to `analysis.json`.

    Raises:
        ValueError: A drafter without distributions, or data that cannot be used.
    """
    settings, trainee, trainer = drafter_and_data(settings)
    if not has_probs(trainee.model):
        raise ValueError(f"a {type(trainee.model).__name__} drafts without distributions that are known beforehand")
    trainee.model.eval()
    trainee.backbone.eval()
    found_in_rows = (_position(row, asked.depth, trainee.backbone.device) for row in trainer.eval_dataset)
    positions = list(islice(filter(None, found_in_rows), asked.positions))
    if not positions:
        raise ValueError(f"no held-out row reaches depth={asked.depth}: lower it, or give longer rows")
    found = {
        "model": settings.model.model_name_or_path,
        "adapters": settings.adapters,
        "places": len(positions),
        "depths": _depths(trainee, positions, asked),
        "layers": _layers(trainee, positions),
        "spread": _spread(trainee, positions),
        "environment": environment(),
    }
    replace_file(settings.output / FIGURES, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return found


def drafter_and_data(settings: Settings) -> tuple[Settings, Trainee, Any]:
    """Return the settings with the backbone that is meant, the model, and a trainer that has prepared the data."""
    for name, value in _OUT_OF_TRAINING.items():
        setattr(settings.training, name, value)
    data = settings.data
    is_file = data.dataset_name is not None and Path(data.dataset_name).is_file()
    if is_file and settings.mixture.test_split_size is None:  # a file has one split
        data.dataset_test_split = data.dataset_train_split
    settings = replace(settings, drafter=replace(settings.drafter, acceptance=False, strategy=None))
    settings = with_moved_backbone(settings)
    set_seed(settings.training.seed)
    trainee = build(settings)
    trainer = make_trainer(settings, trainee)
    trainer.remove_callback(PrinterCallback)
    return settings, trainee, trainer


@dataclass(frozen=True)
class _Position:
    """A prefix of a held-out row, [1, T] int64, and the tokens after it, [depth]."""

    prefix: torch.Tensor
    ahead: torch.Tensor


def _position(row: dict[str, Any], depth: int, device: torch.device) -> _Position | None:
    """Return the middle of a row, if all tokens after it are targets of one document."""
    ids = torch.as_tensor(row["input_ids"])
    if "seq_lengths" in row:  # packed: the first document
        ids = ids[: row["seq_lengths"][0]]
    labels = torch.as_tensor(row.get("labels", row["input_ids"]))[: len(ids)]
    whole = (depth_targets(labels[None], depth)[0] != IGNORE).all(-1).nonzero()[:, 0]
    if not len(whole):
        return None
    end = int(whole[len(whole) // 2]) + 1
    return _Position(ids[None, :end].to(device), ids[end : end + depth].to(device))


@torch.no_grad()
def _depths(trainee: Trainee, positions: list[_Position], asked: argparse.Namespace) -> list[dict[str, float]]:
    """Return the mean of every figure by depth; figures that a drafter lacks at a depth are left out."""
    found = [_at_position(trainee, position, asked) for position in positions]
    means = {name: torch.stack([each[name] for each in found]).double().mean(0).tolist() for name in found[0]}
    rows = []
    for depth in range(asked.depth):
        values = {name: mean[depth] for name, mean in means.items() if depth < len(mean)}
        rows.append({"depth": depth + 1, **{name: value for name, value in values.items() if value == value}})
    return rows


def _at_position(trainee: Trainee, position: _Position, asked: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Return losses by depth; NaN where there is none."""
    prefix, ahead = position.prefix, position.ahead
    whole = torch.cat([prefix, ahead[None]], dim=1)
    start = prefix.shape[1]
    logits = trainee.backbone(whole, use_cache=False).logits[0, start - 1 : start - 1 + asked.depth].float()
    found = {"backbone_given": -logits.log_softmax(-1).gather(-1, ahead[:, None])[:, 0]}
    if not (isinstance(trainee.backbone, EvaByteForMTPC) or trainee.backbone._is_stateful):
        options = {"mass": asked.mass, "max_branches": asked.max_branches}
        marginals = marginal_log_probs(trainee.backbone, prefix, asked.depth, **options)
        found["marginal"] = -marginals.log_probs[0, 0].gather(-1, ahead[:, None])[:, 0]
        found["missing_mass"] = marginals.missing[0, 0]
    labels = torch.full_like(whole, IGNORE)
    labels[:, start:] = whole[:, start:]
    probs = next(drafted_probs(trainee.model, {"input_ids": whole, "labels": labels}), None)
    if probs is not None:  # the first position that is scored throughout is the one analysed
        known = min(probs.draft.shape[1], len(ahead) - 1)
        given = -probs.draft[0, :known].gather(-1, ahead[1 : known + 1, None])[:, 0]
        found["head_given"] = torch.cat([given.new_full((1,), torch.nan), given])
    summed_out = _summed_out(trainee.model, prefix, ahead)
    return found if summed_out is None else found | {"head": summed_out}


def _summed_out(model: PreTrainedModel, prefix: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor | None:
    """Return the drafter's losses of tokens 1, 2, .. with those between unknown; None where it cannot marginalise."""
    if not isinstance(model, EvaByteForMTPC | MTPHeads):
        return None
    head = model.config.mtp_head if isinstance(model, EvaByteForMTPC) else model.config
    if head.family.sequential:
        return None
    distribution = model.distribution(prefix)
    count = min(model.window, len(ahead))
    tokens = torch.nn.functional.pad(ahead[:count], (0, model.window - count))
    shape = (1, prefix.shape[1], model.window)
    losses = []
    for depth in range(count):
        unknown = torch.arange(model.window, device=tokens.device) != depth
        losses.append(-distribution.prefix_log_prob(tokens.expand(shape), unknown.expand(shape))[0, -1, depth])
    return torch.stack(losses)


@torch.no_grad()
def _layers(trainee: Trainee, positions: list[_Position]) -> list[float]:
    """Return the logit lens: every layer's mean divergence from the last one; empty for a cache of EVA's own."""
    if isinstance(trainee.backbone, EvaByteForMTPC):
        return []
    rows = [layer_divergences(trainee.backbone, each.prefix)[:, 0, -1] for each in positions]
    return torch.stack(rows).double().mean(0).tolist()


@torch.no_grad()
def _spread(trainee: Trainee, positions: list[_Position]) -> dict[str, float]:
    """Return the mean entropy of the next token, and how many tokens hold 90 and 99 % of its distribution."""
    entropies, counts = [], []
    for each in positions:
        entropy, sizes = next_token_spread(trainee.backbone, each.prefix)
        entropies.append(entropy[0, -1])
        counts.append(torch.stack([size[0, -1] for size in sizes.values()]))
    few, many = torch.stack(counts).double().mean(0).tolist()
    return {"entropy": float(torch.stack(entropies).mean()), "tokens_90": few, "tokens_99": many}


def summary(found: dict[str, Any]) -> str:
    """Return a few lines for a person."""
    lines = [f"{found['places']} positions; next-token entropy {found['spread']['entropy']:.3f} nats"]
    for row in found["depths"]:
        parts = [f"{name} {value:.3f}" for name, value in row.items() if name != "depth"]
        lines.append(f"depth {row['depth']}: " + ", ".join(parts))
    return "\n".join(lines)


def main() -> None:
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    usage = "%(prog)s [options] -- [CONFIG.yaml] [--FIELD VALUE ...]"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=usage)
    parser.add_argument("--positions", type=int, default=32, help="in held-out rows")
    parser.add_argument("--depth", type=int, default=4, help="tokens ahead")
    parser.add_argument(
        "--mass", type=float, default=0.9, help="share of the continuations that is followed at each step"
    )
    parser.add_argument("--max-branches", type=int, default=64, help="continuations that are followed at most")
    arguments = parser.parse_args(own)
    print(summary(analyze(read_settings(sys.argv[len(own) + 2 :]), arguments)))


if __name__ == "__main__":
    main()
