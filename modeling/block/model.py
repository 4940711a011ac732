"""BlockDrafter: a small transformer that fills in a whole block of tokens in one forward.

DFlash: 2602.06036, DSpark: 2607.05147.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ...configuration.block import BlockDrafterConfig, BlockLossOptions, BlockRecipe
from ...configuration.fields import field
from ...generation.backbone.wrapped_models import input_embeddings, unwrap
from ...generation.call.options import CallOptions, DraftOptions
from ...generation.drafter import DRAFTERS, DrafterFacts
from ...generation.tensors.masks import check_attention
from ...generation.tensors.saving import reads_whole
from ...generation.tensors.tensor_files import Fields, naming, optional_file, read_tensors, weight_files
from ..common.backbone_parts import BackboneParts, output_embeddings, weight_of
from ..common.draft_vocabulary import DraftVocabulary, drafted_tokens
from ..common.foreign import ForeignLayoutsMixin, Stored, new_config
from ..common.learning import States, run_backbone
from ..common.outputs import BlockOutput, DraftDistributions
from ..heads.losses import IGNORE, check_targets, unshifted
from .layouts import OVERRIDES, check_overrides, checked_layout, default_ids, foreign_drafter, layout_of, written
from .losses import BlockBatch, block_loss, block_rows, method_of, place_weights
from .network import Block, BlockNetwork, BlockSession


class BlockDrafter(ForeignLayoutsMixin, BlockNetwork):
    """A block drafter, apart from its backbone, which is unchanged.

    `hidden_states` below are those of transformers: a tuple over layers of [B, L, D], the last after the final norm.

    Args:
        config: See `BlockDrafterConfig`.

    Example:
        >>> drafter = BlockDrafter.from_pretrained(directory).attach(backbone)
        >>> out = backbone.generate(**inputs, assistant_model=drafter)
    """

    remote_classes = {"AutoModel": "BlockDrafter"}
    loss_unit = "place"
    recomputes = False  # training computes rows of blocks again in backward (activation checkpointing)

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__(config)
        config.loss_options = BlockLossOptions.of(config.loss_options)  # a dict where `from_pretrained` sets it

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
        """Whether its authors trained it on answers without thinking, as those of other layouts did."""
        return self.config.layout != "tokenahead"

    @property
    def counts_sequences(self) -> bool:
        return True  # every sequence has its number of blocks, so that trainers do not join rows

    @property
    def law(self) -> str:
        """The name of the joint distribution of a block's tokens."""
        return self.config.law

    @property
    def confidence_threshold(self) -> float | None:
        """Chains end before the first token whose estimated acceptance is smaller, in [0, 1]; None: they never do."""
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
        draft_ids: Tensor | None = None,
        **options: Any,
    ) -> BlockDrafter:
        """Return a new drafter that is attached to `backbone`.

        Args:
            backbone: A causal language model of transformers; a PeftModel is unwrapped.
            law: Joint distribution of a block's tokens: `"independent"`, `"markov"`, `"domino"`, `"selector"`, `"cp"`,
                `"hmm"` or `"btree"`.
            layers: Layers of the drafter.
            block_size: S, rows of a block.
            draft_ids: [Vd] distinct token ids that are drafted, usually the most frequent tokens of outputs; None: all.
            **options: Further fields of `BlockDrafterConfig`; sizes and rope default to the backbone's.
        """
        backbone = unwrap(backbone)
        options |= {"law": law, "num_hidden_layers": layers, "block_size": block_size}
        if draft_ids is not None:
            draft_ids = DraftVocabulary(draft_ids, backbone.config.get_text_config().vocab_size, "draft_ids").ids
            options["draft_vocab_size"] = len(draft_ids)
        if options.get("draft_vocab_size") is not None:
            options["own_unembedding"] = True
        own = partial(_fields_of, backbone, layers)
        drafter = cls(new_config(BlockDrafterConfig, "BlockDrafter", backbone, options, own))
        return drafter._begun(backbone, draft_ids)

    def made_for(self) -> Mapping[str, object]:
        config = self.config
        sizes = {"vocab_size": config.vocab_size, "num_hidden_layers": config.num_target_layers}
        return {"hidden_size": config.target_hidden_size} | {name: size for name, size in sizes.items() if size}

    def check_backbone(self, backbone: PreTrainedModel) -> None:
        """Refuse a backbone with other sizes, too few layers, or a table without the mask token."""
        check_attention(self.config, "block drafters")
        text, kind = backbone.config.get_text_config(), type(backbone).__name__
        super().check_backbone(backbone)
        if max(self.feature_layers) >= text.num_hidden_layers:
            known = f"{kind} has hidden states 0..{text.num_hidden_layers - 1} before its final norm"
            raise ValueError(f"feature_layers={self.feature_layers}: {known}, and drafters read no other")
        rows, mask = text.vocab_size, self.config.mask_token_id
        rows = rows if self.config.own_embeddings else len(input_embeddings(backbone).weight)
        if mask >= rows and not self.config.mask_embedding:
            raise ValueError(f"mask_token_id={mask}, but the embeddings of {kind} have rows 0..{rows - 1}")

    def on_attach(self, backbone: PreTrainedModel) -> None:
        if not self.config.vocab_size:
            self.config.vocab_size = self.config.draft_vocab_size = backbone.config.get_text_config().vocab_size
            self.draft_size = self.config.vocab_size
        super().on_attach(backbone)

    def longest_draft(self) -> int:
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

    @property
    def tree_budgets(self) -> tuple[int, ...]:
        return (16, 32, 64, 128, 256, 512) if self.law == "independent" else ()

    def prepare_tree(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Complete `draft_tree`: where it is a budget, of the likeliest prefixes, however deep and wide (DDTree)."""
        tree = options.draft_tree
        if isinstance(tree, dict) and "total_tokens" in tree:
            most = {"depth": self.num_drafts - 1, "top_k": tree["total_tokens"]}
            options = replace(options, draft_tree=most | tree)
        return super().prepare_tree(options, config)

    def start(self, options: DraftOptions) -> BlockSession:
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
        """Load a directory or a Hub repository in any layout that this library reads; code in it is never run.

        Args:
            pretrained_model_name_or_path: Directory or repository of the drafter.
            feature_layers: Indices into `hidden_states`, where those of the checkpoint are wrong or missing.
            sample_from_anchor: Whether the first row drafts, where the checkpoint does not say it.
            block_size: Fewer rows than the drafter learned, or their number where the checkpoint does not say it.
            ignore_fields: Fields of a config.json of another library that are passed over; unknown ones are refused.
            **kwargs: As for transformers' `from_pretrained`: `dtype`, `device_map`, `attn_implementation`, ...
        """
        fields: Fields = dict(zip(OVERRIDES, (feature_layers, sample_from_anchor, block_size)))
        return cls.load_stored(pretrained_model_name_or_path, fields, kwargs | {"ignore_fields": ignore_fields})

    @classmethod
    def recognises(cls, name: str | PathLike, fields: Fields, hub: Fields) -> bool:
        return layout_of(fields) is not None

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
        super().export(folder, layout)

    def export_to(self, engine: str, folder: Path) -> Fields:
        if engine != "vllm":
            raise ValueError(f"engine={engine!r} has no code for a BlockDrafter; choose 'vllm'")
        self.export(folder, layout="speculators")
        return {"method": method_of(self.law), "num_speculative_tokens": self.num_drafts}

    def in_layout(self, layout: str, state: dict[str, Tensor]) -> tuple[Fields, dict[str, Tensor]]:
        tables = dict[str, Tensor]()
        if self.is_attached:
            tables["embed_tokens.weight"] = input_embeddings(self.backbone).weight.detach()
            tables["lm_head.weight"] = weight_of(output_embeddings(self.backbone), self.fc.weight)
        fields, tensors = written(self.config, layout, state, tables)
        return fields | {"dtype": str(self.dtype).removeprefix("torch.")}, tensors

    def _set_gradient_checkpointing(self, enable: bool = True, *args: object, **kwargs: object) -> None:
        """Compute rows again in backward, with the context in their cache, which layers alone would not have."""
        self.recomputes = enable

    @property
    def learning_layers(self) -> list[int]:
        """Hidden states of the backbone that training reads, as indices of `output_hidden_states`."""
        return [*dict.fromkeys(self.feature_layers), -1]

    @property
    def num_losses(self) -> int:
        return self.config.num_drafts

    @property
    def _recipe(self) -> BlockRecipe:
        return self.loss_options.recipe(method_of(self.config.law))

    def loss_counts(
        self,
        labels: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the number of places that count, [m] int64, as it is expected of random blocks; see `forward`."""
        labels = cast(Tensor, unshifted(labels, shift_labels))
        batch, options = BlockBatch.of(labels, labels != IGNORE, attention_mask, position_ids), self.loss_options
        may = batch.may_begin(self._recipe, self.block_size)  # [B, L]
        every = batch.at(batch.anchors, may).counted(self._recipe, self.config)  # [B, L, m]
        number = may.sum(1)
        share = number.clamp(max=options.anchors) / number.clamp(min=1)  # [B]
        return (every.sum(1) * share[:, None]).sum(0).round().long()

    def pooled_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        return (sums * place_weights(self.loss_options, self._recipe, counts.to(sums), 1)).sum()

    def learn(
        self,
        states: States,
        logits: Tensor | None,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        labels: Tensor | None,
        counts: Tensor | None,
        shift_labels: Tensor | None = None,
        summaries: Tensor | None = None,
        loss_mask: Tensor | None = None,
        anchors: Tensor | None = None,
        keep: Tensor | None = None,
        **kwargs: object,
    ) -> BlockOutput:
        """Return the loss on the backbone's states that `learning_layers` names, [B, L, D] each; see `forward`.

        Targets are `labels` or `shift_labels` that are not -100, or where `loss_mask` [B, L] is not 0. Blocks begin
        behind `anchors` [B, A] (or [A], of all sequences side by side) that `keep` does not leave out; None: behind
        random ones, in evaluation the same in every call. `counts` [m] are the places of all micro-batches.
        """
        labels = unshifted(labels, shift_labels)
        if labels is None and loss_mask is None:
            return BlockOutput(logits=logits)
        if labels is not None:
            check_targets(labels, self.config.vocab_size)
        scored = cast(Tensor, labels) != IGNORE if loss_mask is None else loss_mask.bool()
        if labels is not None and not torch.equal(scored, labels != IGNORE):  # the counts of an update are of labels
            raise ValueError("labels and loss_mask differ in what is scored: pass one of them")
        batch, options = BlockBatch.of(input_ids, scored, attention_mask, position_ids), self.loss_options
        context, last = self.fuse(states), cast(Tensor, states[-1])
        if anchors is not None and anchors.dim() == 1:
            batch, last, context = batch.side_by_side(), last.flatten(0, 1)[None], context.flatten(0, 1)[None]
            summaries = None if summaries is None else summaries.flatten(0, 1)[None]
            anchors = anchors[None]
        if anchors is None:
            batch = batch.drawn(self._recipe, self.block_size, options.anchors, not self.training)
        else:
            batch = batch.at(anchors, keep)
        recomputes = self.recomputes and self.training
        hidden = block_rows(self, context, batch, options.layout == "speculators", recomputes)
        output = block_loss(self, hidden, batch, last, options, counts, summaries)
        output.logits = logits
        return output

    def distributions(self, batch: Mapping[str, Tensor], length: int) -> DraftDistributions:
        ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch.get("position_ids")
        states = run_backbone(self.backbone, ids, mask, positions, self.learning_layers).hidden_states
        whole, context = BlockBatch.of(ids, torch.ones_like(ids, dtype=torch.bool), mask, positions), self.fuse(states)

        def draft(rows: Tensor, columns: Tensor, tokens: Tensor) -> Tensor:
            # blocks of a sequence next to each other, as many as the sequence with most has
            order = (rows == torch.arange(len(ids), device=rows.device)[:, None]).long().cumsum(1)  # [B, N]
            place = order.gather(0, rows[None])[0] - 1  # [N]
            anchors = rows.new_zeros(len(ids), int(order.max())).index_put((rows, place), columns + 1)
            hidden = block_rows(self, context, whole.at(anchors.clamp(max=ids.shape[1] - 1)))[rows, place]  # [N, S, d]
            drafts = nn.functional.pad(tokens[:, 1:], (0, self.num_drafts + 1 - tokens.shape[1]))  # [N, m]
            law = Block(self, hidden, tokens[:, 0]).distribution
            return law.conditional_log_probs(drafts)[:, :length].float()  # [N, length, V]

        return DraftDistributions(draft, BackboneParts(self.backbone).unembed, states[-1])


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
    file = optional_file(name, "mask_embedding.pt", hub)
    if file is None:
        return None
    with naming(file):
        found = torch.load(file, map_location="cpu", weights_only=True)
    found = {"embedding": found} if isinstance(found, Tensor) else found
    if not isinstance(found, dict) or not isinstance(found.get("embedding"), Tensor):
        raise ValueError(f"{file} must hold a tensor, or a dict with 'embedding' and 'mask_token_id'")
    return found


DRAFTERS["block"] = BlockDrafter
