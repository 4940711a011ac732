"""`tokenahead analyze`: what a backbone already knows of tokens further ahead, beside what its drafter has learned.

At positions in held-out text, for every depth j, in nats per token of the text:

- `marginal`: the distribution of token j that the backbone implies, with everything between summed out (Mehra et al.
  2025, Eq. 6): the best that can be done without knowing the tokens between;
- `head`: the drafter's distribution of token j, the same way (heads apart from sequential ones);
- `head_given`: the drafter's distribution given the true tokens between, as it drafts;
- `backbone_given`: the backbone's own distribution given the true tokens between, which no drafter beats.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import logging

from ...modeling.heads.losses import IGNORE, depth_targets
from ..analysis import layer_divergences, marginal_log_probs, next_token_spread
from ..evaluation import environment
from ..evaluation.distributions import drafted_probs, has_probs
from ..files import replace_picture, replace_text
from .evaluate import drafter_and_data, named
from .figures import analysis_figure
from .models import Trainee
from .settings import AnalysisArguments, Settings, read_settings

FIGURES = "analysis.json"
PICTURE = "analysis.png"


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    settings = read_settings(named(argv), "analyze", AnalysisArguments)
    found = analyze(settings)
    print(summary(found))
    print(f"Wrote {FIGURES} and {PICTURE} in {settings.training.output_dir}", file=sys.stderr)
    return 0


def analyze(settings: Settings) -> dict[str, Any]:
    """Compare marginals of the backbone with the distributions of its drafter, and write what was found.

    Args:
        settings: Of the run, with `AnalysisArguments` as `extra`.

    Returns:
        What is written to `analysis.json`.

    Raises:
        ValueError: A drafter without distributions, or data that cannot be used.
    """
    asked: AnalysisArguments = settings.extra
    settings, trainee, trainer = drafter_and_data(settings)
    if not has_probs(trainee.model):
        raise ValueError(f"a {type(trainee.model).__name__} drafts without distributions that are known beforehand")
    trainee.model.eval()
    trainee.backbone.eval()
    positions = Positions(asked.depth)
    for row in trainer.eval_dataset:
        positions.add(row, asked.positions)
        if len(positions) >= asked.positions:
            break
    if not len(positions):
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
    folder = settings.output
    replace_text(folder / FIGURES, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    replace_picture(folder / PICTURE, analysis_figure(found))
    return found


class Positions:
    """Positions in rows: a prefix, and the tokens after it.

    Args:
        depth: Tokens after a position.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.rows: list[torch.Tensor] = []
        self.columns: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: dict[str, Any], wanted: int) -> None:
        """Add the middle of a row, if all tokens after it are targets of one document."""
        ids = torch.as_tensor(row["input_ids"])
        if "seq_lengths" in row:  # packed: the first document
            ids = ids[: row["seq_lengths"][0]]
        labels = torch.as_tensor(row.get("labels", row["input_ids"]))[: len(ids)]
        whole = (depth_targets(labels[None], self.depth)[0] != IGNORE).all(-1).nonzero()[:, 0]
        if len(whole) and len(self) < wanted:
            column = int(whole[len(whole) // 2])
            self.rows.append(ids[: column + 1 + self.depth])
            self.columns.append(column)

    def prefix(self, index: int) -> torch.Tensor:
        """Return the prefix, [1, T] int64."""
        return self.rows[index][None, : self.columns[index] + 1]

    def ahead(self, index: int) -> torch.Tensor:
        """Return the tokens after it, [depth] int64."""
        return self.rows[index][self.columns[index] + 1 :]


@torch.no_grad()
def _depths(trainee: Trainee, positions: Positions, asked: AnalysisArguments) -> list[dict[str, float]]:
    sums: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for index in range(len(positions)):
        for name, values in _at_position(trainee, positions, index, asked, names).items():
            known = sums.setdefault(name, torch.zeros(asked.depth, dtype=torch.float64) * torch.nan)
            sums[name] = torch.where(known.isnan(), 0.0, known) + _padded(values, asked.depth)
    means = {name: (values / len(positions)).tolist() for name, values in sums.items()}
    rows = []
    for depth in range(1, asked.depth + 1):
        row = {name: values[depth - 1] for name, values in means.items() if values[depth - 1] == values[depth - 1]}
        rows.append({"depth": depth, **row})
    return rows


def _padded(values: torch.Tensor, length: int) -> torch.Tensor:
    """Return a vector with NaN where a drafter says nothing."""
    missing = values.new_full((length - min(len(values), length),), torch.nan)
    return torch.cat([values[:length], missing]).double().cpu()


def _at_position(
    trainee: Trainee, positions: Positions, index: int, asked: AnalysisArguments, names: dict[str, str]
) -> dict[str, torch.Tensor]:
    device = trainee.backbone.device
    prefix, ahead = positions.prefix(index).to(device), positions.ahead(index).to(device)
    whole = torch.cat([prefix, ahead[None]], dim=1)
    column = prefix.shape[1] - 1
    logits = trainee.backbone(whole, use_cache=False).logits[0, column : column + asked.depth].float()
    found = {"backbone_given": -logits.log_softmax(-1).gather(-1, ahead[:, None])[:, 0]}
    if not hasattr(trainee.backbone, "_new_cache") and not getattr(trainee.backbone, "_is_stateful", False):
        options = {"mass": asked.mass, "max_branches": asked.max_branches}
        marginals = marginal_log_probs(trainee.backbone, prefix, asked.depth, **options)
        found["marginal"] = -marginals.log_probs[0, 0].gather(-1, ahead[:, None])[:, 0]
        found["missing_mass"] = marginals.missing[0, 0]
    return found | _of_drafter(trainee.model, whole, column, ahead)


def _of_drafter(model: Any, whole: torch.Tensor, column: int, ahead: torch.Tensor) -> dict[str, torch.Tensor]:
    labels = torch.full_like(whole, IGNORE)
    labels[:, column + 1 :] = whole[:, column + 1 :]
    probs = next(drafted_probs(model, {"input_ids": whole, "labels": labels}), None)
    found = {}
    if probs is not None:  # the first position that is scored throughout is the one analysed
        known = min(probs.draft.shape[1], len(ahead) - 1)
        given = -probs.draft[0, :known].gather(-1, ahead[1 : known + 1, None])[:, 0]
        found["head_given"] = torch.cat([given.new_full((1,), torch.nan), given])
    summed_out = _summed_out(model, whole[:, : column + 1], ahead)
    return found if summed_out is None else found | {"head": summed_out}


def _summed_out(model: Any, prefix: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor | None:
    """Return the drafter's losses of tokens 1, 2, .. with those between unknown; None where it cannot marginalise."""
    head = getattr(model.config, "mtp_head", model.config)
    if not hasattr(model, "distribution") or head.family.sequential:
        return None
    distribution = model.distribution(prefix)
    count = min(model.window, len(ahead))
    tokens = torch.nn.functional.pad(ahead[:count], (0, model.window - count))
    losses = []
    for depth in range(count):
        unknown = torch.arange(model.window, device=tokens.device) != depth
        shape = (1, prefix.shape[1], model.window)
        log_prob = distribution.prefix_log_prob(tokens.expand(shape), unknown.expand(shape))[0, -1, depth]
        losses.append(-log_prob)
    return torch.stack(losses)


@torch.no_grad()
def _layers(trainee: Trainee, positions: Positions) -> list[float]:
    """Return the logit lens: every layer's mean divergence from the last one; empty for a cache of EVA's own."""
    if hasattr(trainee.backbone, "_new_cache"):
        return []
    rows = [
        layer_divergences(trainee.backbone, positions.prefix(index).to(trainee.backbone.device))[:, 0, -1]
        for index in range(len(positions))
    ]
    return torch.stack(rows).double().mean(0).tolist()


@torch.no_grad()
def _spread(trainee: Trainee, positions: Positions) -> dict[str, float]:
    """Return the mean entropy of the next token, and how many tokens hold 90 and 99 % of its distribution."""
    entropies, counts = [], []
    for index in range(len(positions)):
        entropy, sizes = next_token_spread(trainee.backbone, positions.prefix(index).to(trainee.backbone.device))
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
