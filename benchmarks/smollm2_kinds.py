"""The kinds of drafters that benchmarks/smollm2.py trains: how each is made, what learns, and what it reads."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Trainer

from tokenahead import AssistantDrafter, BlockDrafter, DeepSeekMTP, EagleHead, MTPHeads, PTPStudent
from tokenahead.modeling.common.draft_vocabulary import FILE
from tokenahead.training import PTPOptions, PTPTrainer
from tokenahead.training.batches import Collator
from tokenahead.training.loading import load_config, load_drafter
from tokenahead.training.strategy import TrainingStrategy
from tokenahead.training.trainer import MTPTrainer

_MULTI_STEP = 4
"""Steps that EAGLE-3 and a module learn to go on from their own outputs; HASS learns one less, as in its paper."""
_mtp_trainer = partial(MTPTrainer, strategy=TrainingStrategy())


@dataclass(frozen=True)
class Learner:
    """A drafter and how it learns.

    Attributes:
        drafter: What is saved.
        module: What the trainer takes.
        trainer: Makes it of a model, arguments and data.
        features: Folder of the states that it reads, computed once; None: the model runs in every step.
    """

    drafter: Any
    module: torch.nn.Module
    trainer: Callable[..., Trainer]
    features: str | None = None

    def finish(self) -> Any:
        """Return the drafter in the dtype of the model."""
        if not isinstance(self.drafter, PTPStudent):  # adapters stay in float32
            self.module.to(torch.bfloat16)
        return self.drafter


def heads(model: PreTrainedModel, draft_ids: torch.Tensor, arguments: argparse.Namespace) -> Learner:
    """`MTPHeads` of a head type, which learn the model's distribution over the draft vocabulary."""
    if arguments.start:
        drafter = MTPHeads.from_pretrained(arguments.start).attach(model)
        drafter.loss_options.update(divergence=arguments.divergence)
    else:
        learns = {"loss_options": {"target": "teacher", "divergence": arguments.divergence}}
        options = {"head_type": arguments.kind, "window": 5} | learns | arguments.options
        drafter = MTPHeads.from_backbone(model, draft_ids=draft_ids, **options)
    drafter.to(torch.float32)
    layers = len(drafter.learning_layers)
    return Learner(drafter, drafter, _mtp_trainer, "features-last" if layers == 1 else f"features-last-{layers}")


def eagle(version: int, model: PreTrainedModel, draft_ids: torch.Tensor, arguments: argparse.Namespace) -> Learner:
    """An `EagleHead`; version 2 stands for HASS, which is version 1 with another loss."""
    if arguments.start:
        drafter = EagleHead.from_pretrained(arguments.start).attach(model)
    elif version == 3:
        count = model.config.num_hidden_layers
        drafter = EagleHead.from_backbone(model, version=3, draft_ids=draft_ids, aux_layers=[2, count // 2, count - 3])
    else:
        drafter = EagleHead.from_backbone(model, version=1, draft_ids=draft_ids)
    options = drafter.loss_options
    options.divergence = arguments.divergence
    if version == 3:
        options.steps = _MULTI_STEP
    elif version == 2:
        options.steps, options.objective = _MULTI_STEP - 1, "hass"
    drafter.to(torch.float32)
    return Learner(drafter, drafter, _mtp_trainer, "features-eagle3" if version == 3 else "features-last")


def block(model: PreTrainedModel, draft_ids: torch.Tensor, arguments: argparse.Namespace) -> Learner:
    """A `BlockDrafter` of a law (`--options`), whose body starts alike for all laws of a seed."""
    options = {"layers": 3, "block_size": 8, "sample_from_anchor": False} | arguments.options
    made = []
    for law in ({"law": "independent", "law_options": {}}, {}):
        torch.manual_seed(arguments.seed)
        made.append(BlockDrafter.from_backbone(model, draft_ids=draft_ids, **options | law))
    first, drafter = made
    drafter.load_state_dict(first.detach().state_dict(), strict=False)
    drafter.loss_options.update(anchors=64, divergence=arguments.divergence)
    drafter.to(torch.float32)
    return Learner(drafter, drafter, _mtp_trainer, "features-block")


def module(model: PreTrainedModel, draft_ids: torch.Tensor, arguments: argparse.Namespace) -> Learner:
    """A model with one sequential module, which learns to go on from its own output."""
    if arguments.start:
        drafter = DeepSeekMTP.from_pretrained(arguments.start)
    else:
        drafter = DeepSeekMTP.from_backbone(model, draft_vocabulary=draft_ids)
    options = drafter.loss_options
    options.unroll_steps, options.target, options.divergence = _MULTI_STEP, "teacher", arguments.divergence
    drafter.mtp.to(torch.float32)
    return Learner(drafter, drafter, partial(_mtp_trainer, data_collator=Collator()))


def student(variant: str, model: PreTrainedModel, draft_ids: torch.Tensor, arguments: argparse.Namespace) -> Learner:
    """A `PTPStudent` with four slots, over the whole vocabulary: its logits are the backbone's own."""
    if arguments.start:
        drafter = PTPStudent.from_pretrained(arguments.start).attach(model)
    else:
        drafter = PTPStudent.from_backbone(model, variant, **{"num_slots": 4, "lora_rank": 64} | arguments.options)
    loss = "ce" if variant == "mask" else "kl"
    return Learner(drafter, drafter.whole, partial(PTPTrainer, options=PTPOptions(loss=loss)))


def assistant(model: PreTrainedModel, draft_ids: torch.Tensor, arguments: argparse.Namespace) -> Learner:
    """The model's first two layers, tuned on its answers."""
    if arguments.start:
        drafter = AssistantDrafter.from_pretrained(arguments.start).attach(model)
    else:
        drafter = AssistantDrafter.from_backbone(model, layers=2)
    drafter.model.get_decoder().layers.to(torch.float32)
    drafter.model.get_decoder().norm.to(torch.float32)
    return Learner(drafter, drafter.model, partial(Trainer, data_collator=Collator()))


KINDS: dict[str, Callable[..., Learner]] = {
    "eagle1": partial(eagle, 1),
    "hass": partial(eagle, 2),
    "eagle3": partial(eagle, 3),
    "block": block,
    "module": module,
    "c-ptp": partial(student, "categorical"),
    "masked": partial(student, "mask"),
    "assistant": assistant,
}
"""Other names are head types of `MTPHeads`."""


def drafter_of(folder: Path, model: PreTrainedModel) -> Any:
    """Return a saved drafter, attached, if it has distributions along a text: heads, EAGLE, blocks, modules."""
    if (folder / FILE).exists():
        return DeepSeekMTP.from_pretrained(folder, dtype=model.dtype)
    known = MTPHeads.config_class, EagleHead.config_class, BlockDrafter.config_class
    has_distributions = isinstance(load_config(str(folder), "--folder"), known)
    return load_drafter(str(folder), model, "--folder") if has_distributions else None
