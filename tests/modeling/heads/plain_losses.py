"""The head loss by its definition, and the small heads and batches on which it is compared."""

import torch

from tokenahead import MTPHeadConfig
from tokenahead.modeling.heads.circuit_head import CircuitHead, FFHead
from tokenahead.modeling.heads.family import window_distribution
from tokenahead.modeling.heads.losses import IGNORE, discounted_mtp_loss, tokens_ahead


def head_and_batch(kind: str = "ff"):
    """A head with a window of 3 over 11 tokens, hidden states [2, 7, 6], and targets, some of them missing."""
    config = MTPHeadConfig(head_type=kind, window=3, rank=1 if kind == "ff" else 2)
    head = FFHead(6, 11, 4) if kind == "ff" else CircuitHead(config, 6, 11)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter)
    targets = torch.randint(0, 11, (2, 7, 3))
    targets[torch.rand(targets.shape) < 0.3] = IGNORE
    return head, config, torch.randn(2, 7, 6, requires_grad=True), targets


def plain_loss(head, config, hidden, targets, ids, counts=None):
    """The loss by its definition, with all logits at once and plain autograd."""
    valid, unknown = targets != IGNORE, None
    tokens = targets.clamp(min=0)
    if ids is not None:
        tokens = torch.where(valid, targets, tokens_ahead(ids, targets.shape[-1], 0))
    elif config.head_type != "ff":
        unknown = ~valid
    terms = -window_distribution(head, config, hidden).token_log_probs(tokens, unknown)
    means = terms.detach().where(valid, 0.0).sum((0, 1)) / valid.sum((0, 1))
    return discounted_mtp_loss(terms, valid, config.gamma, "tokens", counts), means
