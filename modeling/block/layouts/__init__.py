"""Layouts of block drafters: z-lab's, speculators', DeepSpec's, and that of assistants of transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.utils import logging

from ....configuration.block import BlockDrafterConfig
from ....configuration.fields import refuse
from ....configuration.foreign_fields import refuse_unread, settled
from ....configuration.mtp_families import refuse_dspark
from ....generation.tensors.tensor_files import Fields
from ...common.draft_vocabulary import check_offsets
from ...common.drafter_configs import architectures, check_columns
from .known import ASSISTANT, DEEPSPEC, KINDS, SPECULATORS, ZLAB
from .record import BlockLayout, refuse_lost

logger = logging.get_logger(__name__)
LAYOUTS: tuple[BlockLayout, ...] = (SPECULATORS, ZLAB, ASSISTANT, DEEPSPEC)
"""In the order in which they are tried."""
OVERRIDES = {
    "feature_layers": "name the states that the drafter reads (target_layer_ids)",
    "sample_from_anchor": "say whether the first row drafts (shift_label alone does not)",
    "block_size": "say how many rows a block has",
}
"""Fields that `from_pretrained` takes in place of those of a checkpoint, and what one without them does not say."""
_LIKE_OURS = re.compile(r".*(DFlash|DSpark|Domino|XPress|LiLiCorr).*")
"""Names of architectures that are those of block drafters."""
_PREFIXES = ("model.", "logit_head.")
_TURNED = re.compile(r".*self_attn\.[qk]_(proj|norm)\.(weight|bias)")


def layout_of(raw: Fields) -> BlockLayout | None:
    """Return the layout of a config.json; None where it is no block drafter of another library.

    One whose architecture has no code here is refused.
    """
    for name in [*architectures(raw), "XPressSpeculator" if raw.get("speculators_model_type") == "xpress" else ""]:
        if _LIKE_OURS.fullmatch(name) and name not in KINDS:
            raise ValueError(f"architectures={raw.get('architectures')}: there is no code for {name} here")
    return next((layout for layout in LAYOUTS if layout.recognises(raw)), None)


def checked_layout(name: object, raw: Fields, ignored: Sequence[str] = ()) -> BlockLayout:
    """Return the layout of a config.json whose fields are all read, known to change nothing, or ignored."""
    layout = layout_of(raw)
    refuse_dspark(name, raw)
    if layout is None:
        raise ValueError(
            f"{name}: config.json is none of a block drafter (model_type={raw.get('model_type')!r}, "
            f"architectures={raw.get('architectures')})"
        )
    refuse_unread(name, raw, layout.table(name, raw), ignored)
    return layout


def foreign_drafter(
    name: object,
    raw: Fields,
    layout: BlockLayout,
    state: dict[str, Tensor],
    mask: Fields | None = None,
    **overrides: object,
) -> tuple[BlockDrafterConfig, dict[str, Tensor]]:
    """Return configuration and tensors of a checkpoint from another library.

    Args:
        name: Of the checkpoint, for messages.
        raw: Its config.json.
        layout: Of this, see `checked_layout`.
        state: Its tensors.
        mask: The embedding of the mask token that lies beside it (`mask_embedding.pt`), and its id.
        **overrides: Of `OVERRIDES`, in place of what the checkpoint says; None: not.
    """
    state = own_names(state, layout)
    given = {key: value for key, value in overrides.items() if value is not None}
    values = layout.read(name, raw, {key: tuple(tensor.shape) for key, tensor in state.items()})
    check_overrides(name, values, given)
    values |= given
    refuse(
        (values[key] is None, f"{name}: config.json does not {what}; pass {key}=") for key, what in OVERRIDES.items()
    )
    if "fc.weight" not in state:
        raise ValueError(f"{name}: the checkpoint has no fc.weight")
    width = values.get("target_hidden_size") or values["hidden_size"]
    check_columns(name, state["fc.weight"].shape[-1], values["feature_layers"], width, "feature_layers")
    if values.pop("is_interleaved", False):
        state = {key: _of_halves(key, tensor, values["head_dim"]) for key, tensor in state.items()}
    if mask is not None:
        number, row = mask.get("mask_token_id"), mask["embedding"].reshape(-1)
        settled(name, "mask_token_id", values["mask_token_id"], None if number is None else int(number))
        settled(name, "hidden_size", values["hidden_size"], len(row))
        state["mask_embedding"], values["mask_embedding"] = row, True
    config = BlockDrafterConfig(layout=layout.name, **values)
    check_offsets(name, state, config.draft_vocab_size or config.vocab_size, config.vocab_size)
    return config, {key: tensor for key, tensor in state.items() if key != "t2d"}


def _of_halves(key: str, tensor: Tensor, head_dim: int) -> Tensor:
    """Return a map to queries or keys whose rope turns pairs of neighbours as one that turns pairs of halves."""
    if not _TURNED.fullmatch(key):
        return tensor
    return tensor.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)  # [H, D / 2, 2] -> [H, 2, D / 2]


def check_overrides(name: object, values: Fields, given: Fields) -> None:
    """Refuse a longer block than the drafter learned, and warn of a shorter one."""
    size, wanted = values["block_size"], given.get("block_size")
    if None in (size, wanted):
        return
    if wanted > size:
        raise ValueError(f"{name}: block_size={wanted} is more than the {size} rows that the drafter learned")
    if wanted < size:
        logger.warning_once(f"{name}: block_size={wanted} changes every draft: the drafter learned {size} rows")


def own_names(state: dict[str, Tensor], layout: BlockLayout) -> dict[str, Tensor]:
    """Rename the tensors of a layout to the names of `BlockDrafter`."""
    return {_own_name(name, layout): tensor for name, tensor in state.items()}


def _own_name(name: str, layout: BlockLayout) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for theirs, ours in layout.renames:
        name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
    return name.removesuffix(".weight") if name.endswith("codebook.weight") else name


def layout_named(layout: str) -> BlockLayout:
    """Return the layout of another library that a drafter can be written in."""
    records = {each.name: each for each in LAYOUTS if each is not ASSISTANT}
    if layout not in records:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(sorted(records))}")
    return records[layout]


def written(
    config: BlockDrafterConfig,
    layout: str,
    state: dict[str, Tensor],
    embeddings: Tensor | None,
    unembedding: Tensor | None,
) -> tuple[Fields, dict[str, Tensor]]:
    """Return config.json and tensors of a drafter in another library's layout.

    Args:
        config: The drafter's.
        layout: `"z-lab"`, `"speculators"` or `"deepspec"`.
        state: The drafter's tensors.
        embeddings: [V, d] of the backbone, which some layouts repeat; None: it is not attached.
        unembedding: The same of its unembedding.
    """
    record = layout_named(layout)
    fields, state = record.write(config), dict(state)
    refuse_lost(config, record, fields, {key: tuple(tensor.shape) for key, tensor in state.items()})
    parts = {"embed_tokens.weight": embeddings} | ({} if "d2t" in state else {"lm_head.weight": unembedding})
    for key, tensor in parts.items():
        if record.copies == (key in state):
            continue
        if tensor is None:
            does = "repeats" if record.copies else "reads"
            raise ValueError(f"layout={layout!r} {does} the backbone's {key}: call attach(backbone) first")
        if not record.copies and not torch.equal(state.pop(key).to(tensor), tensor):
            raise ValueError(f"layout={layout!r} reads the backbone's {key}, and the drafter's differs")
        if record.copies:
            state[key] = tensor
    if "d2t" in state:
        ids = state["d2t"].cpu() + torch.arange(config.draft_vocab_size or 0)  # [Vd]
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return fields, state
