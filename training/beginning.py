"""What is checked before the first step: the data of the first update, and the checkpoint that a run goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from ..modeling.heads.losses import IGNORE

logger = logging.get_logger(__name__)

_BATCHES_TO_SEARCH = 1000  # for a target, where the first update has none
_OF_BACKBONES = ("hidden_size", "vocab_size", "num_hidden_layers", "num_nextn_predict_layers")
_OF_DRAFTERS = ("version", "draft_vocab_size", "variant", "sampler", "features", "num_slots", "lora_rank")


def check_data(given: Mapping[str, Any]) -> None:
    """Refuses data without rows.

    Args:
        given: Arguments of a trainer, by name.

    Raises:
        ValueError: `train_dataset` or `eval_dataset`, or one of several, is empty.
    """
    for name in ("train_dataset", "eval_dataset"):
        data = given.get(name)
        for part in data.values() if isinstance(data, Mapping) else [data]:
            if hasattr(part, "__len__") and len(part) == 0:
                raise ValueError(f"{name} is empty: give at least one row that has something to learn, or None")


def check_depths(
    counts: torch.Tensor, count: Callable[[Any], torch.Tensor], batches: Callable[[], Iterable[Any]]
) -> None:
    """Looks for targets at every depth, in the first update and, where it lacks some, in further batches.

    Warns of depths that no row reaches.

    Args:
        counts: [n], targets per depth of the first update.
        count: Targets per depth of a batch.
        batches: Makes an iterator over the training data.

    Raises:
        ValueError: No targets at all.
    """
    found = counts.bool().cpu()
    others = islice(batches(), _BATCHES_TO_SEARCH) if not found.all() else ()
    for batch in others:
        found = found | count(batch).bool().cpu()
        if found.all():
            return
    if not found.any():
        raise ValueError(
            "train_dataset has no targets: its labels are -100 everywhere, or no row is longer than one token"
        )
    if not found.all():
        missing = ", ".join(str(depth + 1) for depth in (~found).nonzero()[:, 0].tolist())
        logger.warning(
            f"no row of train_dataset reaches depth {missing}: what predicts tokens so far ahead learns nothing; give "
            "longer rows, or a smaller window"
        )


def check_ids(batches: Sequence[dict[str, Any]], vocab_size: int) -> None:
    """Refuses ids that the model has no row for, which an accelerator would only meet as an assertion of a kernel.

    Args:
        batches: Micro-batches of an update.
        vocab_size: V.

    Raises:
        ValueError: An id outside 0..V - 1, or a label that is neither one nor -100.
    """
    for batch in batches:
        check_lengths(batch)
        for name in ("input_ids", "labels", "shift_labels"):
            ids = batch.get(name)
            if not isinstance(ids, torch.Tensor) or not ids.numel():
                continue
            wrong = (ids >= vocab_size) | (ids < 0)
            if name != "input_ids":
                wrong &= ids != IGNORE
            if wrong.any():
                also = "" if name == "input_ids" else f", or {IGNORE} where nothing is scored"
                raise ValueError(
                    f"{name} hold {int(ids[wrong][0])}, but the vocabulary has {vocab_size} tokens: ids go from 0 to "
                    f"{vocab_size - 1}{also}; was the text prepared with another tokenizer?"
                )


def check_lengths(batch: dict[str, Any]) -> None:
    """Refuses labels that do not stand below their ids, one each.

    Args:
        batch: A micro-batch.

    Raises:
        ValueError: Labels of another shape.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor) and ids.shape != labels.shape:
        raise ValueError(
            f"labels have the shape {list(labels.shape)}, and input_ids {list(ids.shape)}: every row needs as many "
            f"labels as ids, {IGNORE} where nothing is scored"
        )


def check_checkpoint(folder: str | Path, model: Any) -> None:
    """Refuses a checkpoint of another model or head, of which `Trainer` would load what happens to fit.

    Args:
        folder: The checkpoint. One without a config, of adapters or shards, is left to its loader.
        model: The model that is to go on, without what distribution wraps around it.

    Raises:
        ValueError: Another kind of model or head, or other sizes.
    """
    file = Path(folder) / "config.json"
    config = getattr(model, "config", None)
    if not file.is_file() or config is None or hasattr(model, "peft_config"):
        return
    model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    if model_type != config.model_type:
        raise ValueError(_differs(folder, "model_type", model_type, config.model_type))
    earlier = type(config).from_pretrained(folder)
    for name, theirs, ours in _shapes(earlier, config):
        if theirs != ours:
            raise ValueError(_differs(folder, name, theirs, ours))


def _shapes(earlier: Any, config: Any) -> Iterable[tuple[str, Any, Any]]:
    """What decides which parameters there are: names, and the values of both."""
    heads = [getattr(each, "mtp_head", each) for each in (earlier, config)]
    if all(hasattr(head, "family") for head in heads):
        yield "head_type", *(head.head_type for head in heads)
        for name in ("leaf", "window", *heads[1].family.shaping(), "draft_layers"):
            yield name, *(getattr(head, name, None) for head in heads)
    texts = [each.get_text_config() for each in (earlier, config)]
    for names, pair in ((_OF_BACKBONES, texts), (_OF_DRAFTERS, (earlier, config))):
        for name in names:
            if all(hasattr(each, name) for each in pair):
                yield name, *(getattr(each, name) for each in pair)


def _differs(folder: str | Path, name: str, theirs: Any, ours: Any) -> str:
    return f"the checkpoint {folder} is of another model: {name}={theirs!r} there, {name}={ours!r} here"
