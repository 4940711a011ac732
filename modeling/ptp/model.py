"""PTPForCausalLM: parallel token prediction, whose auxiliary positions predict several tokens from uniforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel
from transformers.utils.generic import can_return_tuple

from ...configuration.cache_names import CACHE, cache_of, given_cache
from ...configuration.fields import check_options
from ...configuration.ptp import SAMPLING, PTPConfig
from ...generation.backbone.wrapped_models import (
    Kwargs,
    WrapperMixin,
    checkpointing_paused,
    checkpoints_activations,
    fingerprint,
    merged_copy,
    same_backbone,
)
from ...generation.contract import requested_states
from ...generation.drafter import DRAFTERS
from ...generation.tensors.masks import additive_mask, selected_positions
from ...generation.tensors.saving import reads_whole
from ...generation.tensors.tensor_files import check_index
from ..common.loading import StrictLoadingMixin
from ..common.online import OwnLossMixin
from ..common.outputs import PTPOutput
from ..heads.losses import check_targets, depth_targets
from ..heads.window_distribution import FactorisedDistribution, SequentialDistribution, WindowDistribution
from .conversion import OfficialRun, write_run
from .gated_lora import ADAPTER, Gate, opened, preserve_gates, zero_ups
from .generation import ParallelAssistant, ParallelGenerationMixin
from .inputs import SlotPartsMixin, check_backbone


class PTPForCausalLM(
    OwnLossMixin, StrictLoadingMixin, WrapperMixin, SlotPartsMixin, ParallelGenerationMixin, PreTrainedModel
):
    """A causal language model that also predicts blocks of tokens from uniforms (PTP), or from mask tokens.

    A forward may have auxiliary positions after its tokens, one per uniform (or mask). Gated adapters act on them
    alone: on ordinary tokens the model is the backbone, bit for bit. `variant="one_hot"` (O-PTP): slot k, after a
    context of s tokens, reads u_{s+k} and predicts the token that this uniform picks, at position s + k - 1.
    `"categorical"` (C-PTP): slot k reads u_{s+k} in place of token s + k and predicts the distribution of token s + k +
    1, at position s + k. `"mask"` (masked prediction, Samragh et al. 2025): as `"categorical"`, but slot k reads the
    learned mask k, and a sampler head makes the distribution of its token from its state and the token before.

    Example:
        >>> model = PTPForCausalLM.from_backbone(base, num_slots=8)
        >>> out = model.generate(**inputs, do_sample=True, seed=7)  # the same output for the same seed
    """

    own_trainer = "PTPSFTTrainer"
    config: PTPConfig
    config_class = PTPConfig
    remote_classes = {"AutoModelForCausalLM": "PTPForCausalLM"}
    takes_shares = True
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: PTPConfig, backbone: PreTrainedModel | None = None) -> None:
        if config.backbone_config is None:
            raise ValueError("PTPConfig needs a backbone_config")
        attention = None if backbone is None else backbone.config._attn_implementation
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self.backbone = backbone or AutoModelForCausalLM.from_config(config.backbone_config)
        if attention is not None:  # the new model resets it as well
            self.backbone.config._attn_implementation = attention
        check_backbone(self.backbone, reads_logits=True)
        self.add_slot_parts(config, config.backbone_config.hidden_size)
        self._keep_in_fp32_modules_strict = {"lora_A", "lora_B", *self.slot_parts()}  # bfloat16 rounds steps away
        from .gated_linear import gate_linears  # with peft

        gate_linears(self.backbone, config.lora_rank, config.lora_alpha, skip=self.backbone.get_output_embeddings())
        self.post_init()
        zero_ups(self)

    @classmethod
    def from_backbone(
        cls, model_or_path: PreTrainedModel | str | PathLike, variant: str = "one_hot", **options: Any
    ) -> PTPForCausalLM:
        """Add gated adapters and an embedding of uniforms (or masks) to a model; they alone are trained.

        The model is unchanged: `backbone` is a copy of it that shares its tensors, so that only training the backbone
        (`train_only("all")`) changes it. Adapters of peft are merged into the copy.

        Args:
            model_or_path: A causal language model of transformers, a PeftModel, or a path to load one from.
            variant: `"one_hot"`, `"categorical"` or `"mask"`.
            **options: Further fields of `PTPConfig`. Defaults learn fast: `features="arithmetic"`,
                `projection="mlp"`, `lora_rank=64`, `greedy=True`; `sampling` is by default what the model's generation
                config sets.
        """
        check_options(options, PTPConfig, "PTPForCausalLM.from_backbone", ("backbone_config",))
        loads = isinstance(model_or_path, (str, PathLike))
        if loads:
            check_index(model_or_path)
        base = AutoModelForCausalLM.from_pretrained(model_or_path) if loads else merged_copy(model_or_path)
        attention = base.config._attn_implementation
        set_there = {name: getattr(base.generation_config, name, None) for name in SAMPLING}
        sampling = {name: value for name, value in set_there.items() if value is not None}
        options = {"source_fingerprint": fingerprint(base), "sampling": sampling} | options
        divided = vars(base.config).pop("distributed_config", None)  # where `Trainer` reads it, and nothing is saved
        config = PTPConfig(backbone_config=base.config, **_recommended({"variant": variant} | options))
        config.distributed_config = divided
        base.config._attn_implementation = attention  # the config around it resets it
        model = cls(config, base)
        for part in model.slot_parts().values():
            part.to(device=base.device, dtype=torch.promote_types(base.dtype, torch.float32))
        model.generation_config = base.generation_config
        model.train_only("drafter")
        return model.eval()

    @classmethod
    @reads_whole
    def from_official(
        cls,
        folder: str | PathLike,
        backbone: PreTrainedModel | str | PathLike | None = None,
        checkpoint: str | None = None,
        ignore_fields: Sequence[str] = (),
    ) -> PTPForCausalLM:
        """Read a run of the public PTP code: `train.yaml`, and a checkpoint of Lightning, of which no code is run.

        Args:
            folder: Of the run.
            backbone: A model, which is unchanged, or a path or name to load one by, in the dtype of the run. None: the
                run's `model_id`.
            checkpoint: The name of a `.ckpt` of the run; None: the best one, as last.ckpt records it, or last.ckpt.
            ignore_fields: Names of fields of train.yaml that are not known here, and that are to be passed over.
        """
        run = OfficialRun(Path(folder), checkpoint, ignore_fields)
        model = cls.from_backbone(run.backbone(backbone), **run.options)
        run.fill(model)
        return model

    def export(self, folder: str | PathLike, layout: str = "official") -> None:
        """Write a run of the public PTP code: train.yaml, and a checkpoint of the adapters and the embedding."""
        recorded, actual = self.config.source_fingerprint, fingerprint(self.backbone)
        if self.trains_backbone or (recorded and actual and not same_backbone(recorded, actual)):
            raise ValueError(f"layout={layout!r} names a backbone, and holds none: this one was trained, or is trained")
        adapters = {name: each for name, each in self.backbone.state_dict().items() if ".lora_" in name}
        slots = {name: each for name, each in self.state_dict().items() if name.startswith(tuple(self.slot_parts()))}
        write_run(folder, layout, self.config, adapters | slots, self.backbone.config.name_or_path, self.backbone.dtype)

    def train_only(self, part: str) -> None:
        """Choose what is trained: `"all"`, or `"drafter"`: adapters and slot embeddings."""
        if part not in ("all", "drafter"):
            raise ValueError(f"train_only({part!r}): choose 'all' or 'drafter'")
        for name, parameter in self.backbone.named_parameters():
            parameter.requires_grad_(part == "all" or f".{ADAPTER}." in name)
        for module in self.slot_parts().values():
            module.requires_grad_(True)

    def parts(self) -> dict[str, nn.Module]:
        return {}  # adapters within layers of the backbone draft, and have float32 for every dtype of it

    def slot_distribution(self, states: Tensor, before: Tensor) -> WindowDistribution:
        """Return the distribution of the tokens that slots predict, from their states [..., L, D] after the final norm.

        `before` [...] is the token before them, which a sampler head reads.
        """
        head, embed, sampler = self.get_output_embeddings(), self.get_input_embeddings(), self.sampler
        if sampler is None:
            return FactorisedDistribution(head(states)[..., None, :])

        def next_logits(known: Tensor) -> Tensor:
            return head(sampler(states[..., known.shape[-2] - 1, :], known[..., -1, :]))

        return SequentialDistribution(next_logits, embed, states.shape[-2], embed(before)[..., None, :])

    @property
    def trains_backbone(self) -> bool:
        """Whether anything but the student's own parts is trained."""
        named = self.backbone.named_parameters()
        return any(parameter.requires_grad for name, parameter in named if f".{ADAPTER}." not in name)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        self.config.vocab_size = self.backbone.config.vocab_size
        return embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        uniforms: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        logits_to_keep: int | Tensor = 0,
        inputs_embeds: Tensor | None = None,
        read: Callable[[Tensor, nn.Module], object] | None = None,
        masks: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> PTPOutput:
        """Return logits of the tokens (the backbone's own) and of the auxiliary positions after them.

        Args:
            attention_mask: [B, past + T], 0 for padding; or visibility [B, 1, T + A, past + T + A] bool.
            position_ids: [B or 1, T + A]. By default the slots follow the last token, as one completion.
            cache: Cache to continue and to extend (with the slots, too: crop them); `past_key_values` in older code.
            uniforms: [B, A] float32 in [0, 1), one per slot; `GREEDY` (-1) requests the most likely token.
            labels: [B, T] for the backbone's own loss (shifted here, -100 ignored).
            output_hidden_states: True for all layers, or indices of those to return (-1: after the final norm).
            read: Applied to the last hidden states [B, T + A, D] and the head in place of logits, within the wrappers
                of distributed training. Losses over large vocabularies are computed in chunks there.
            masks: [B or 1, A] int64 in [0, num_slots), the mask that each slot reads, in place of `uniforms`.
            **kwargs: For the backbone without its head; `shift_labels` [B, T], the target of every token, in place of
                `labels`; `num_items_in_batch`, targets over all micro-batches (from the Trainer).
        """
        cache = given_cache(cache, past_key_values)
        shift_labels, num_items = (kwargs.pop(name, None) for name in ("shift_labels", "num_items_in_batch"))
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        tokens, has_slots = embeds.shape[1], uniforms is not None or masks is not None
        embeds = self.with_slots(embeds, uniforms, masks)
        if position_ids is None:
            position_ids = self._positions(embeds, tokens, attention_mask, cache)
        if self.backbone.training and checkpoints_activations(self.backbone):
            preserve_gates(self.backbone)
        with checkpointing_paused(self), opened(Gate(tokens, embeds.shape[1]) if has_slots else None):
            outputs = self.backbone.get_decoder()(
                inputs_embeds=embeds,
                attention_mask=dense_mask(attention_mask, embeds),
                position_ids=position_ids,
                **{CACHE: cache},
                use_cache=use_cache,
                output_hidden_states=requested_states(output_hidden_states, self.config, self.backbone.config),
                **kwargs,
            )
        hidden, head = outputs.last_hidden_state, self.get_output_embeddings()
        logits, loss = None if read else head(selected_positions(hidden, logits_to_keep)), None
        if logits is not None and (labels is not None or shift_labels is not None):
            targets = depth_targets(labels, 1, shift_labels=shift_labels)[..., 0].contiguous()
            targets = check_targets(targets, self.config.vocab_size)
            loss = self.loss_function(logits[:, :tokens], None, self.config.vocab_size, num_items, shift_labels=targets)
        return PTPOutput(
            loss=loss,
            logits=logits,
            **{CACHE: cache_of(outputs)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            read=read and read(hidden, head),
        )

    def with_slots(self, embeds: Tensor, uniforms: Tensor | None, masks: Tensor | None) -> Tensor:
        """Return embeddings of tokens and of the slots after them, [B, T + A, D]; refuse slots of another variant."""
        name, slots, other = ("uniforms", uniforms, masks) if self.config.reads_uniforms else ("masks", masks, uniforms)
        if other is not None:
            raise ValueError(f"variant={self.config.variant!r}: slots are passed as {name}=, and nothing else")
        if slots is None:
            return embeds
        if slots.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(f"uniforms have dtype {slots.dtype}, whose bits are too few: pass float32")
        embedding = cast(nn.Module, self.uniform_embedding or self.mask_embedding)
        return torch.cat([embeds, embedding(slots).to(embeds.dtype).expand(len(embeds), -1, -1)], dim=1)

    def attach(
        self, backbone: PreTrainedModel, default: bool = False, vocab_size: int | None = None
    ) -> ParallelAssistant:
        """Let this model draft for a larger one with the same vocabulary, which takes it as `assistant_model`.

        `default`: also where a call names none. `vocab_size`: how many ids mean the same token in both.
        """
        return ParallelAssistant(self, vocab_size).attach(backbone, default)

    def prepare_inputs_for_generation(self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Kwargs:
        backbone = cast(Any, self.backbone)  # transformers looks for `inputs_embeds` in this signature
        return backbone.prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)

    def _positions(self, embeds: Tensor, tokens: int, attention_mask: Tensor | None, cache: Cache | None) -> Tensor:
        past = 0 if cache is None else cache.get_seq_length()
        if attention_mask is None or attention_mask.dim() != 2:
            attention_mask = embeds.new_ones(1, past + tokens)
        numbers = attention_mask[:, : past + tokens].long().cumsum(1)  # [B, past + T]
        order = torch.arange(embeds.shape[1] - tokens, device=embeds.device)  # [A]
        # a one-hot slot 0 shares the position of the last token
        slots = numbers[:, -1:] - int(self.config.is_one_hot) + order
        return torch.cat([numbers[:, past:] - 1, slots], dim=1).clamp(min=0)  # [B, T + A]


def _recommended(options: Kwargs) -> Kwargs:
    """Return the options of a new student with their defaults; alpha defaults to the rank."""
    rank = options.get("lora_rank", 64)
    defaults: Kwargs = {"lora_rank": rank, "lora_alpha": rank}
    if options["variant"] != "mask":
        features = options.get("features", "arithmetic")
        projection = "mlp" if features == "arithmetic" else "linear"
        defaults |= {"features": features, "projection": projection, "greedy": True}
    return defaults | options


def dense_mask(mask: Tensor | None, embeds: Tensor) -> Tensor | None:
    """Return a 4d mask in the additive form; others unchanged."""
    if mask is None or mask.dim() != 4:
        return mask
    return mask.to(embeds.dtype) if mask.is_floating_point() else additive_mask(mask.bool(), embeds.dtype)


DRAFTERS["parallel"] = PTPForCausalLM
