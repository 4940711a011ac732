"""A step of speculators' EAGLE-3 on the states that a head of this library learns from."""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from measuring import now
from torch import nn

from tokenahead import EagleHead


def speculators_step(head: EagleHead, data: Any, rows: int, steps: int) -> Callable[[], float] | None:
    """Return a step with AdamW, which returns its seconds, on the first rows of stored states.

    The model has the head's shape and starts with its weights. None where speculators is not installed.
    """
    if importlib.util.find_spec("speculators") is None:
        return None
    model, device = _model(head, steps), head.backbone.device
    losses = importlib.import_module("speculators.losses").resolve_loss_config("kl_div", "eager")
    batch = data.collate([data[row] for row in range(rows)])  # rows of one length
    length = batch["input_ids"].shape[1]
    states = batch["cached_states"].to(device)  # [B, L, 4, d]
    documents = torch.arange(rows)[:, None].expand(-1, length - 1).reshape(1, -1).to(device)
    ids = batch["input_ids"].to(device)
    inputs = {  # rows in a line; a token comes with the states of the one before it
        "hidden_states": states[:, :-1, :-1].flatten(2).reshape(1, -1, 3 * states.shape[-1]),
        "verifier_last_hidden_states": states[:, 1:, -1].reshape(1, -1, states.shape[-1]),
        "input_ids": ids[:, 1:].reshape(1, -1),
        "position_ids": torch.arange(1, length, device=device).repeat(rows)[None],
        "loss_mask": torch.ones_like(documents, dtype=torch.bool),
        "document_ids": documents,
    }
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-5)

    def step() -> float:
        started = now()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            _, loss, _ = model(**inputs, ttt_steps=steps, ttt_step_loss_decay=1.0, loss_config=losses)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return now() - started

    return step


def _model(head: EagleHead, steps: int) -> nn.Module:
    importlib.import_module("loguru").logger.remove()
    kind: Any = importlib.import_module("speculators.models.eagle3").Eagle3DraftModel
    config = type(head.backbone.config).from_dict(head.backbone.config.to_dict())
    config.num_hidden_layers, config.tie_word_embeddings = 1, False
    ids, vocab = head.draft_ids.cpu(), head.config.vocab_size
    is_drafted = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    with tempfile.TemporaryDirectory() as folder:
        head.backbone.save_pretrained(folder)
        model = kind.from_training_args(
            config, t2d=is_drafted, d2t=ids - torch.arange(len(ids)), draft_vocab_size=len(ids), ttt_steps=steps,
            norm_before_residual=bool(head.config.norm_before_residual), draft_attn_impl="sdpa",
            target_layer_ids=list(head.hidden_layers), verifier_name_or_path=folder,
        )  # fmt: skip
    own, theirs = head.state_dict(), model.state_dict()
    shared = {name: own[name] for name in own if name in theirs and own[name].shape == theirs[name].shape}
    model.load_state_dict(shared, strict=False)
    model.lm_head.weight.requires_grad_(True)
    return model.to(head.backbone.device).train()
