"""What a drafter's files and weights say of themselves, without a text: norms, biases, tokenizer, dtype, tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from ...configuration.fields import field
from ...generation.drafter import BaseDrafter
from ...generation.tensors.tensor_files import tensor_names
from ...generation.tensors.wrapped_models import fingerprint
from ...modeling.eagle.conversion import own_name
from .findings import FAULT, NOTE, OK, SKIPPED, Finding

_SHOWN_BY = {
    "norms": {
        "qk_norm": "layers.0.self_attn.q_norm.weight",
        "norm_before_fc": "input_norm.weight",
        "fc_norm": "fc_norm.0.weight",
    },
    "biases": {"attention_bias": "layers.0.self_attn.q_proj.bias", "fc_bias": "fc.bias"},
}
"""By check: fields of an EAGLE head's config, and the tensor that is there where the field is true."""
_SMALLEST = 16
"""Rows and columns of a matrix that is told from noise."""
_DEVIATION, _ERRORS = 0.02, 4.0
_ROWS, _ROUNDS = 2048, 40
Source = str | PathLike[str]


def contradictions(source: Source) -> Iterator[Finding]:
    """Yield whether the config of an EAGLE head denies or invents norms and biases that its tensors have."""
    raw, names = PreTrainedConfig.get_config_dict(source)[0], set(map(own_name, tensor_names(source)))
    raw = raw | (raw.get("eagle_config") or {}) | (raw.get("transformer_layer_config") or {})
    for check, fields in _SHOWN_BY.items():
        stated = [(name, tensor) for name, tensor in fields.items() if name in raw]
        odd = [(name, tensor) for name, tensor in stated if bool(raw[name]) != (tensor in names)]
        words = [
            f"the config says {name}={raw[name]}, and the tensors {'have' if tensor in names else 'lack'} {tensor}"
            for name, tensor in odd
        ]
        yield Finding(check, FAULT if odd else OK, "; ".join(words) or "the config says what the tensors have")


def of_backbone(drafter: Any, backbone: PreTrainedModel) -> Finding:
    """Return whether a drafter learned on this backbone, by the fingerprint of its config and the kind of the model."""
    config = getattr(drafter, "config", None)
    recorded, actual = field(config, "backbone_fingerprint"), fingerprint(backbone)
    if recorded is None or actual is None:
        why = "the drafter records none" if recorded is None else "these weights cannot be read"
        named = field(config, "base_model_name_or_path")
        return Finding("fingerprint", SKIPPED, why + (f"; it was made for {named}" if named else ""))
    if recorded == actual:
        return Finding("fingerprint", OK, "the drafter learned on this backbone")
    return Finding("fingerprint", FAULT, f"learned on {recorded!r}, and this backbone has {actual!r}")


def stored_tokenizer(source: Source | None) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in a drafter's directory or repository; None where there is none."""
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        if source is None or not cached_file(source, "tokenizer_config.json", **quiet):
            return None
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        return None


def of_tokenizers(
    own: PreTrainedTokenizerBase | None, tokenizer: PreTrainedTokenizerBase, backbone: PreTrainedModel
) -> Iterator[Finding]:
    """Yield whether the backbone and the drafter know the tokenizer's ids, and whether both have one chat template."""
    size = backbone.config.get_text_config().vocab_size
    if len(tokenizer) > size:
        yield Finding("tokenizer", FAULT, f"it has {len(tokenizer)} tokens, and the backbone {size}")
    elif own is None:
        yield Finding("tokenizer", SKIPPED, "the drafter brings none to compare with")
    else:
        theirs, ours = own.get_vocab(), tokenizer.get_vocab()
        odd = sorted(token for token, index in theirs.items() if ours.get(token, index) != index)
        words = f"{len(odd)} tokens have other ids in the drafter's ({odd[:3]})"
        yield Finding("tokenizer", FAULT, words) if odd else Finding("tokenizer", OK, "the drafter brings the same ids")
    if own is None or own.chat_template is None:
        yield Finding("chat template", SKIPPED, "the drafter brings none to compare with")
    elif own.chat_template != tokenizer.chat_template:
        yield Finding("chat template", FAULT, "the drafter brings another one than the tokenizer of the model has")
    else:
        yield Finding("chat template", OK, "the drafter brings the same one")


def of_layers(config: Any) -> Finding | None:
    """Return whether the states that an EAGLE-3 head reads are named or guessed; None for other drafters."""
    if not getattr(config, "num_aux", 0):
        return None
    if config.aux_layers is None:
        return Finding("layer ids", NOTE, "the config does not name them: those of the official code are taken")
    return Finding("layer ids", OK, f"the config names {config.aux_layers}")


def untrained(drafter: BaseDrafter, backbone: PreTrainedModel) -> Finding:
    """Return whether matrices of a drafter are as they were made: constant, or noise without any direction.

    Copies of the backbone's tables are left out.
    """
    tables = [
        getattr(part, "weight", None) for part in (backbone.get_input_embeddings(), backbone.get_output_embeddings())
    ]
    named = [pair for part in drafter.parts().values() for pair in part.named_parameters()]
    learned = [(name, each) for name, each in named if each.requires_grad and not each.is_meta]
    matrices = [(name, each) for name, each in learned if each.dim() > 1 and each.is_floating_point()]
    matrices = [pair for pair in matrices if not any(_are_equal(pair[1], table) for table in tables)]
    if not matrices:
        return Finding("untrained tensors", SKIPPED, "it has no matrices")
    deviation = getattr(getattr(drafter, "config", None), "initializer_range", None)
    found = [name for name, each in matrices if is_new(each.detach(), deviation or _DEVIATION)]
    if not found:
        return Finding("untrained tensors", OK, f"none of {len(matrices)} matrices")
    names = ", ".join(found[:3]) + ", ..." * (len(found) > 3)
    return Finding("untrained tensors", FAULT, f"as newly made ({len(found)} of {len(matrices)}): {names}")


def _are_equal(matrix: Tensor, table: object) -> bool:
    if not isinstance(table, Tensor) or table.is_meta or table.shape != matrix.shape:
        return False
    return matrix.equal(table.to(matrix))


@torch.no_grad()
def is_new(weight: Tensor, deviation: float = _DEVIATION) -> bool:
    """Return whether a weight [.., m, n] is constant, or independent noise as it is made.

    The largest singular value of noise is s (sqrt m + sqrt n); a trained matrix may keep that, and so its numbers must
    also be normal of a usual deviation, or uniform as in `torch.nn.Linear`.

    Args:
        weight: Of a drafter.
        deviation: Standard deviation of the drafter's new weights (`initializer_range`).
    """
    matrix = weight.flatten(0, -2).float()  # [m, n]
    if bool((matrix == matrix.flatten()[0]).all()):
        return True
    if min(matrix.shape) < _SMALLEST or not bool(matrix.isfinite().all()):
        return False
    if not _is_as_made(matrix, deviation):
        return False
    matrix = matrix[:_ROWS, :_ROWS]  # a part of noise is noise
    rows, columns = matrix.shape
    direction = torch.randn(columns, generator=torch.Generator().manual_seed(0)).to(matrix.device)
    for _ in range(_ROUNDS):
        direction = torch.nn.functional.normalize(matrix.T @ (matrix @ direction), dim=0)
    largest, edge = float((matrix @ direction).norm()), float(matrix.std()) * (rows**0.5 + columns**0.5)
    return largest < edge * (1 + min(rows, columns) ** (-2 / 3))


def _is_as_made(matrix: Tensor, deviation: float) -> bool:
    """Return whether numbers deviate as new ones do, within four standard errors."""
    count, found = matrix.numel(), float(matrix.square().mean().sqrt())
    bound = matrix.shape[1] ** -0.5  # of the uniform numbers of `torch.nn.Linear`
    fills = 1 - 20 / count < float(matrix.abs().max()) / bound < 1 + 2**-8  # bfloat16 rounds up
    usual = [deviation, _DEVIATION, 1.0, *[bound / 3**0.5] * fills]
    return any(abs(found / each - 1) * (2 * count) ** 0.5 < _ERRORS for each in usual)


def too_large(tensors: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> list[str]:
    """Return the names of tensors with numbers that a dtype does not hold."""
    most = torch.finfo(dtype).max
    return [name for name, each in tensors if each.is_floating_point() and not bool((each.abs() <= most).all())]
