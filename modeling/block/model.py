"""BlockDrafter: a small transformer that fills in a whole block of tokens in one forward.

DFlash: 2602.06036, DSpark: 2607.05147.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ...configuration.block import BlockDrafterConfig
from ...configuration.fields import field
from ...generation.attach import adopt_fields
from ...generation.call.options import DraftOptions
from ...generation.drafter import DRAFTERS, DrafterFacts
from ...generation.tensors.masks import check_attention
from ...generation.tensors.saving import reads_whole, whole_directory
from ...generation.tensors.tensor_files import (
    Fields,
    naming,
    optional_file,
    read_tensors,
    weight_files,
    write_json,
)
from ...generation.tensors.wrapped_models import has_own_cache, input_embeddings, untyped, unwrap
from ..common.backbone_parts import output_embeddings, weight_of
from ..common.draft_vocabulary import DraftVocabulary, drafted_tokens
from ..common.drafter_configs import check_kind, new_config
from ..common.foreign import ForeignLayoutsMixin, Stored
from .layouts import OVERRIDES, check_overrides, checked_layout, default_ids, foreign_drafter, written
from .learning import BlockLearner
from .session import BlockSession

_MASK_FILE = "mask_embedding.pt"


class BlockDrafter(ForeignLayoutsMixin, BlockLearner):
    """A block drafter, apart from its backbone, which is unchanged.

    `hidden_states` below are those of transformers: a tuple over layers of [B, L, D], the last after the final norm.

    Args:
        config: See `BlockDrafterConfig`.

    Example:
        >>> drafter = BlockDrafter.from_pretrained(directory).attach(backbone)
        >>> out = backbone.generate(**inputs, assistant_model=drafter)
    """

    remote_classes = {"AutoModel": "BlockDrafter"}
    _supports_sdpa = True
    drafts_trees, attends, not_served = True, True, None

    @property
    def block_size(self) -> int:
        """S, rows of a block."""
        return self.config.block_size

    @property
    def num_drafts(self) -> int:
        """m, the tokens that a block drafts."""
        return self.config.num_drafts

    @property
    def learned_without_thinking(self) -> bool:
        """Whether its authors trained it on answers without thinking, as all of the other layouts' did."""
        return self.config.layout != "tokenahead"

    @property
    def law(self) -> str:
        """The name of the joint distribution of a block's tokens."""
        return self.config.law

    @property
    def confidence_threshold(self) -> float | None:
        """Chains end before the first token whose estimated acceptance is smaller; None: they never do.

        Raises:
            ValueError: Set to a number outside [0, 1], or without a confidence head.
        """
        return self.config.confidence_threshold

    @confidence_threshold.setter
    def confidence_threshold(self, value: float | None) -> None:
        if value is not None and not self.config.has_confidence:
            raise ValueError(f"confidence_threshold={value}: this drafter has no confidence head")
        self.config.confidence_threshold = value
        self.config.validate()

    @property
    def draft_sampling(self) -> str:
        """How drafts of sampled calls are chosen: `"drawn"`, or `"argmax"`."""
        return self.config.draft_sampling

    @draft_sampling.setter
    def draft_sampling(self, value: str) -> None:
        self.config.draft_sampling = value
        self.config.validate()

    @classmethod
    def from_backbone(
        cls,
        backbone: PreTrainedModel,
        law: str = "markov",
        layers: int = 5,
        block_size: int = 8,
        sample_from_anchor: bool = True,
        draft_ids: Tensor | None = None,
        **options: Any,
    ) -> BlockDrafter:
        """Return a new drafter that is attached to `backbone`.

        Args:
            backbone: A causal language model of transformers; a PeftModel is unwrapped.
            law: Joint distribution of a block's tokens: `"independent"`, `"markov"`, `"selector"`, `"cp"`, `"hmm"` or
                `"btree"`.
            layers: Layers of the drafter.
            block_size: S, rows of a block.
            sample_from_anchor: Whether the first row drafts, see `BlockDrafterConfig`.
            draft_ids: [Vd] distinct token ids that are drafted, usually the most frequent tokens of outputs; None: all.
            **options: Further fields of `BlockDrafterConfig`; sizes and rope default to the backbone's.

        Raises:
            ValueError: `draft_ids` out of range or not distinct, or an option that contradicts the backbone.
            StrictDataclassError: An unknown law, an option that it does not take, or a value out of range.
        """
        backbone = unwrap(backbone)
        options |= {"law": law, "num_hidden_layers": layers, "block_size": block_size}
        if draft_ids is not None:
            draft_ids = DraftVocabulary(draft_ids, backbone.config.get_text_config().vocab_size, "draft_ids").ids
            options["draft_vocab_size"] = len(draft_ids)
        if options.get("draft_vocab_size") is not None:
            options["own_unembedding"] = True
        options["sample_from_anchor"] = sample_from_anchor
        own = partial(_fields_of, backbone, layers)
        drafter = cls(new_config(BlockDrafterConfig, "BlockDrafter", backbone, options, own))
        if draft_ids is not None:
            drafter.set_draft_ids(draft_ids)
        drafter = drafter.attach(backbone)
        with torch.no_grad():
            if drafter.config.own_unembedding:
                unembedding = weight_of(output_embeddings(backbone), drafter.lm_head.weight)
                drafter.lm_head.weight.copy_(unembedding[drafter.draft_ids.to(unembedding.device)])
            if drafter.config.own_embeddings:
                drafter.embed_tokens.weight.copy_(input_embeddings(backbone).weight)
        return drafter

    def made_for(self) -> Mapping[str, object]:
        config = self.config
        sizes = {"vocab_size": config.vocab_size, "num_hidden_layers": config.num_target_layers}
        return {"hidden_size": config.target_hidden_size} | {name: size for name, size in sizes.items() if size}

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuse a backbone with other sizes, too few layers, or a table without the mask token."""
        check_kind(backbone)
        check_attention(self.config, "block drafters")
        text, kind = backbone.config.get_text_config(), type(backbone).__name__
        super().check_backbone(backbone)
        if max(self.feature_layers) >= text.num_hidden_layers:
            raise ValueError(
                f"feature_layers={self.feature_layers}: before its final norm {kind} has hidden states "
                f"0..{text.num_hidden_layers - 1}, and drafters read no other"
            )
        rows = text.vocab_size if self.config.own_embeddings else len(input_embeddings(backbone).weight)
        if self.config.mask_token_id >= rows and not self.config.mask_embedding:
            raise ValueError(
                f"mask_token_id={self.config.mask_token_id}, but the embeddings of {kind} have rows 0..{rows - 1}"
            )
        if has_own_cache(backbone):
            raise ValueError(f"backbone: {kind} has its own cache class, whose columns a drafter's cannot follow")

    def on_attach(self, backbone: PreTrainedModel) -> None:
        """Follow the backbone's dtype and device; tables of the checkpoint stay the drafter's own."""
        if backbone.device.type != "meta":  # not offloaded
            dtype = backbone.dtype if backbone.dtype.is_floating_point else None
            untyped(self).to(backbone.device, dtype)
        if not self.config.vocab_size:
            self.config.vocab_size = self.config.draft_vocab_size = backbone.config.get_text_config().vocab_size
            self.draft_size = self.config.vocab_size
        adopt_fields(self.config, backbone)

    def longest_draft(self) -> int:
        """Return m."""
        return self.num_drafts

    @property
    def window(self) -> int:
        """Tokens that a cycle may yield: the drafts of a block, and one."""
        return self.num_drafts + 1

    @classmethod
    def facts(cls, config: BlockDrafterConfig, drafter: object = None) -> DrafterFacts:
        states = f"{len(config.feature_layers or ())} states of the backbone"
        rows = [
            ("Drafter", f"block drafter: {config.num_hidden_layers} layer(s) on {states}"),
            ("Block", f"{config.block_size} rows, {config.num_drafts} drafted tokens"),
            ("Law", f"`{config.law}`"),
            *drafted_tokens(config),
        ]
        return DrafterFacts("block", config.num_drafts + 1, rows, ("chen2026dflash",))

    def start(self, options: DraftOptions) -> BlockSession:
        """Return the draft session of one call of `generate`."""
        return BlockSession(self, options)

    @classmethod
    @reads_whole
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike,
        *,
        feature_layers: list[int] | None = None,
        sample_from_anchor: bool | None = None,
        block_size: int | None = None,
        ignore_fields: Sequence[str] = (),
        **kwargs: Any,
    ) -> Any:
        """Load a directory or a Hub repository in our layout, z-lab's, SpecForge's, DeepSpec's, speculators' or that of
        transformers' DFlash assistants; code in it is never run.

        Args:
            pretrained_model_name_or_path: Directory or repository of the drafter.
            feature_layers: Indices into `hidden_states`, where those of the checkpoint are wrong or missing.
            sample_from_anchor: Whether the first row drafts, where the checkpoint does not say it.
            block_size: Fewer rows than the drafter learned, or their number where the checkpoint does not say it.
            ignore_fields: Fields of a config.json of another library that are passed over; unknown ones are refused.
            **kwargs: As for transformers' `from_pretrained`: `dtype`, `device_map`, `attn_implementation`, ...

        Raises:
            ValueError: No block drafter, missing or unknown tensors and fields, wrong shapes, ambiguous rows or states.
        """
        fields: Fields = dict(zip(OVERRIDES, (feature_layers, sample_from_anchor, block_size)))
        return cls.load_stored(pretrained_model_name_or_path, fields, kwargs | {"ignore_fields": ignore_fields})

    @classmethod
    def read_foreign(
        cls, name: str | PathLike, raw: Fields, hub: Fields, fields: Fields, ignored: Sequence[str] = ()
    ) -> Stored:
        layout = checked_layout(name, raw, ignored)
        state = read_tensors(weight_files(name, pickles=True, **hub))
        return foreign_drafter(name, raw, layout, state, _mask_embedding(name, hub), **fields)

    @classmethod
    def check_fields(cls, name: str | PathLike, raw: Fields, changed: Fields) -> None:
        check_overrides(name, raw, changed)

    def export(self, folder: str | PathLike, layout: str = "speculators") -> None:
        """Write a checkpoint for other libraries and engines.

        Args:
            folder: The directory.
            layout: `"z-lab"` (SpecForge's with a Markov law), `"speculators"` (vLLM's) or `"deepspec"`.

        Raises:
            ValueError: An option of this drafter that the layout cannot hold.
        """
        with whole_directory(folder) as directory:
            self.write_layout(directory, layout)

    def export_to(self, engine: str, folder: Path) -> Fields:
        if engine != "vllm":
            raise ValueError(f"engine={engine!r} has no code for a BlockDrafter; choose 'vllm'")
        self.export(folder, layout="speculators")
        method = {"independent": "dflash", "selector": "dflash2"}.get(self.law, "dspark")
        return {"method": method, "num_speculative_tokens": self.num_drafts}

    def write_layout(self, directory: Path, layout: str, state: dict[str, Tensor] | None = None) -> None:
        tables: list[Tensor | None] = [None, None]
        if self.is_attached:
            unembedding = weight_of(output_embeddings(self.backbone), self.fc.weight)
            tables = [input_embeddings(self.backbone).weight.detach(), unembedding]
        fields, tensors = written(self.config, layout, self.state_dict() if state is None else state, *tables)
        copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(copies, directory / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        write_json(directory / CONFIG_NAME, fields | {"dtype": str(self.dtype).removeprefix("torch.")})


def _fields_of(backbone: PreTrainedModel, layers: int, text: PreTrainedConfig) -> Fields:
    """Return what a new drafter takes from a backbone: z-lab's states, distinct ones before the final norm where there
    are few layers, and the last row of the embeddings, which no text has where the table is padded."""
    total, rows = text.num_hidden_layers, len(input_embeddings(backbone).weight)
    return {
        "target_hidden_size": text.hidden_size,
        "num_target_layers": total,
        "feature_layers": sorted({min(max(index + 1, 1), max(total - 1, 0)) for index in default_ids(total, layers)}),
        "mask_token_id": min(rows, field(text, "vocab_size", default=rows)) - 1,
    }


def _mask_embedding(name: str | PathLike, hub: Fields) -> Fields | None:
    """Return the embedding of the mask token that lies beside the weights, and its id where it is stated."""
    file = optional_file(name, _MASK_FILE, hub)
    if file is None:
        return None
    with naming(file):
        found = torch.load(file, map_location="cpu", weights_only=True)
    found = {"embedding": found} if isinstance(found, Tensor) else found
    if not isinstance(found, dict) or not isinstance(found.get("embedding"), Tensor):
        raise ValueError(f"{file} must hold a tensor, or a dict with 'embedding' and 'mask_token_id'")
    return found


DRAFTERS["block"] = BlockDrafter
