"""DeepSeekMTP: a causal language model of transformers with its sequential modules."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, Cache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import can_return_tuple

from ...configuration.cache_names import CACHE, cache_of, given_cache
from ...configuration.fields import field
from ...configuration.loss_options import ModuleLossOptions
from ...configuration.mtp_families import (
    MiMoConfig,
    check_fields_of_modules,
    count_modules,
    family_of,
    num_layers,
    set_modules,
)
from ...generation.attach import MTPGenerationMixin
from ...generation.backbone.wrapped_models import (
    Kwargs,
    WrapperMixin,
    checkpointing_paused,
    input_embeddings,
    parameters_frozen,
    untyped,
    whole_state,
)
from ...generation.call.options import CallOptions, DraftOptions
from ...generation.contract import requested_states
from ...generation.drafter import DRAFTERS, DrafterFacts
from ...generation.tensors.masks import selected_positions
from ...generation.tensors.saving import reads_whole
from ...generation.tensors.tensor_files import Tensors, check_stored, hub_options, renamed
from ..common.backbone_parts import output_embeddings, text_positions
from ..common.draft_vocabulary import FILE, DraftVocabulary, TokenIds, stored_ids
from ..common.loading import StrictLoadingMixin
from ..common.online import STATES, OwnLossMixin
from ..common.outputs import DeepSeekMTPOutput, DraftDistributions, MTPOutput, stacked_steps
from ..heads.losses import counts_of_update, depth_targets
from .conversion import (
    build,
    check_checkpoint,
    device_map_of,
    is_official,
    is_to_be_dequantized,
    load,
    load_dequantized,
    modules_of,
    names_in_files,
    num_elements,
)
from .losses import chain_loss, depth_weights, router_loss, teacher_forced
from .modules import LMHeadView, MainOutput, MTPModules, has_towers, mapped_state, run_main
from .session import ModuleSession

_OWN_FIELD = "keys_to_ignore_at_inference"  # describes the outputs of this class, and is not saved
_IGNORED = ["cache", "past_key_values", "head_losses", "mtp_logits", "acceptances", "inputs_embeds", "position_ids"]


class DeepSeekMTP(OwnLossMixin, WrapperMixin, StrictLoadingMixin, MTPGenerationMixin, PreTrainedModel):
    """A causal language model and its D sequential modules (DeepSeek-V3), which draft tokens that the model verifies.

    Checkpoints have the layout that DeepSeek and GLM publish: plain transformers, vLLM and SGLang read them too.

    Args:
        config: Configuration of the main model with `num_nextn_predict_layers` = D.
        parts: Main model and modules, the attributes `main` and `mtp`; None: new ones.

    Attributes:
        loss_options: How the modules' losses are weighted (`ModuleLossOptions`).
        shared_copies: Whether checkpoints repeat embeddings and head in every module, as official ones do.
        draft_vocabulary: The tokens that modules may draft (`DraftVocabulary`); None: all. See `set_draft_vocabulary`.

    Example:
        >>> model = DeepSeekMTP.from_pretrained(directory)
        >>> model.train_only("drafter")
        >>> Trainer(model, TrainingArguments("out"), train_dataset=data).train()
        >>> out = model.generate(**tokenizer("def main(", return_tensors="pt"), max_new_tokens=64)
    """

    main: PreTrainedModel
    mtp: MTPModules
    loss_options: ModuleLossOptions
    draft_vocabulary: DraftVocabulary | None = None
    base_model_prefix = "main"
    _optional_files = (FILE,)
    _loaded_so_far: dict[str, Tensor] | None = None
    supports_gradient_checkpointing = True
    _no_split_modules = ["MTPModule"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    drafts_trees, not_served, takes_shares = True, None, True
    own_options = frozenset({"draft_vocabulary"})
    silent_part = "mtp"
    attends, learning_layers = True, [-1]

    def __init__(self, config: PreTrainedConfig, parts: tuple[PreTrainedModel, MTPModules] | None = None) -> None:
        main, modules = parts or build(config)
        super().__init__(main.config)
        self.loss_type = "ForCausalLM"
        self.main, self.mtp = main, modules
        self._is_stateful = main._is_stateful  # transformers' assisted loop must not crop a recurrent state
        vars(self.config)[_OWN_FIELD] = _IGNORED  # read by Trainer
        self.generation_config = main.generation_config
        self.loss_options = ModuleLossOptions.of(field(main.config, "mtp_loss"))
        self.shared_copies = bool(family_of(main.config).copies)
        self._is_initialized = parts is not None or self.device.type != "meta"  # by the main model's class
        self.post_init()

    @property
    def remote_classes(self) -> dict[str, str]:
        """Auto class and class that load this model from bundled code."""
        auto = "AutoModelForCausalLM" if self.config.get_text_config() is self.config else "AutoModelForImageTextToText"
        return {auto: "MiMoMTP" if isinstance(self.config, MiMoConfig) else "DeepSeekMTP"}

    def init_weights(self) -> None:
        if not self._is_initialized and self.device.type != "meta":  # once it has storage
            self.main.init_weights()
            self.mtp.apply(self.main._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        self.main._init_weights(module)

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return True  # checked by the main model's class

    _can_set_experts_implementation = _can_set_attn_implementation

    @classmethod
    @reads_whole
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike | None,
        *,
        inference_only: bool = False,
        modules: str | PathLike | None = None,
        draft_vocabulary: TokenIds | None = None,
        ignore_fields: Sequence[str] = (),
        **kwargs: Any,
    ) -> DeepSeekMTP:
        """Load a directory or a Hub repository.

        Args:
            pretrained_model_name_or_path: A checkpoint in the official layout; None, with `config` and `state_dict`.
            inference_only: Leave the modules out: the model is then exactly the plain one.
            modules: A directory or a name on the Hub whose modules this model gets, such as what it was tuned from;
                embeddings and head that they share with a main model are this one's. Float8 is then dequantised.
            draft_vocabulary: Token ids that modules may draft; None: those in the checkpoint, or else all.
            ignore_fields: Fields of modules in its config.json that are passed over; unknown ones are refused.
            **kwargs: As for transformers' `from_pretrained`: `dtype` (that of the checkpoint by default),
                `device_map`, `attn_implementation`, `revision`, ...
        """
        name, config = pretrained_model_name_or_path, kwargs.pop("config", None)
        hub = hub_options(kwargs)
        if name is None:
            if not kwargs.get("state_dict"):
                raise ValueError(f"state_dict lacks all tensors of {cls.__name__}")
            return super().from_pretrained(None, config=config, **kwargs)
        check_stored(name, config, kwargs.get("variant"), **hub)
        if not inference_only:
            check_fields_of_modules(name, PreTrainedConfig.get_config_dict(name, **hub)[0], ignore_fields)
        if not isinstance(config, PreTrainedConfig):
            config = AutoConfig.from_pretrained(config or name, **hub)
        wants_info = kwargs.pop("output_loading_info", False)
        lacks, theirs = inference_only or modules is not None, Tensors()
        config, shared = check_checkpoint(name, config, lacks, kwargs.get("variant"), **hub)
        if modules is not None and not inference_only:
            config, shared, theirs = modules_of(modules, name, config, ignore_fields, **hub)
        if isinstance(devices := kwargs.get("device_map"), dict):
            kwargs["device_map"] = device_map_of(devices, config, official=True)
        if theirs or is_to_be_dequantized(config, kwargs.get("quantization_config")):
            main, chain, report = load_dequantized(name, config, inference_only, hub, theirs, **kwargs)
        else:
            main, chain, report = load(name, config, inference_only, **kwargs)
        model = cls(main.config, (main, chain)).eval()
        model.shared_copies = shared
        vars(main.config).pop("auto_map", None)  # valid for the loaded directory only
        if devices := vars(main).get("hf_device_map"):
            vars(model)["hf_device_map"] = device_map_of(devices, main.config, official=False)
        model.set_draft_vocabulary(stored_ids(name, **hub) if draft_vocabulary is None else draft_vocabulary)
        return untyped((model, report)) if wants_info else model

    @classmethod
    def from_backbone(
        cls,
        model_or_path: PreTrainedModel | str | PathLike,
        num_modules: int = 1,
        eh_init: str = "embedding",
        draft_vocabulary: TokenIds | None = None,
        **kwargs: Any,
    ) -> DeepSeekMTP:
        """Return a model with new modules, which are copies of the backbone's last layer.

        The model is unchanged: `main` is a copy that shares its tensors, which only `train_only("all")` lets change.

        Args:
            model_or_path: A model of transformers, or a path to load one from.
            num_modules: D.
            eh_init: Initial output of `eh_proj`: `"embedding"` ([I | 0]), `"hidden"` ([0 | I]) or `"both"` (half of
                each).
            draft_vocabulary: Token ids that modules may draft, and learn where the head is frozen; None: all.
            **kwargs: As for transformers' `from_pretrained`, with a path.
        """
        from .retrofit import retrofit

        model = cls(*retrofit(model_or_path, num_modules, eh_init, **kwargs)).eval()
        model.set_draft_vocabulary(draft_vocabulary)
        return model

    def set_draft_vocabulary(self, ids: TokenIds | None) -> None:
        """Restrict drafts of the modules to some tokens; drafting then computes only their logits.

        Output does not change, because the main model uses its whole vocabulary. The ids are saved with the weights.

        Args:
            ids: [U] distinct token ids, see `frequent_tokens`; None: all tokens again.
        """
        self.draft_vocabulary = None if ids is None else DraftVocabulary(ids, self.config.get_text_config().vocab_size)

    def _write_directory(
        self, directory: Path, is_main_process: bool, state_dict: dict[str, Tensor] | None, **kwargs: Any
    ) -> None:
        """Write one ordinary checkpoint that transformers, vLLM and SGLang read, with the main model's type.

        Module k is `model.layers.{L + k}.*`, experts one by one, with copies of embeddings and head as it was loaded.
        """
        if vars(self.main).get("hf_quantizer") is not None:
            raise ValueError("save_pretrained: a quantised main model; load it in full precision, or save adapters")
        state = self._official_tensors(whole_state(self) if state_dict is None else state_dict)
        self._save_main(directory, state, is_main_process, **kwargs)
        if is_main_process and self.draft_vocabulary is not None:
            self.draft_vocabulary.save(directory)

    def _official_tensors(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        layers, family = num_layers(self.config), family_of(self.config)
        state = renamed(state, names_in_files(self.config, self.mtp.count), "this model", back=True)
        if self.shared_copies:
            table = state[f"{family.stem}.embed_tokens.weight"]
            sources = {"embed_tokens.weight": table, "shared_head.head.weight": state.get("lm_head.weight", table)}
            for index in range(layers, layers + self.mtp.count):
                state |= {f"{family.stem}.layers.{index}.{name}": sources[name].clone() for name in family.copies}
        return {family.file_name(name, layers, self.mtp.count): tensor for name, tensor in state.items()}

    def _save_main(self, directory: Path, state: dict[str, Tensor], is_main_process: bool, **kwargs: Any) -> None:
        """Let the main model save all tensors as its own; changes of the configuration are undone afterwards."""
        config, options = self.main.config, self.loss_options.changed()
        before = {name: field(config, name) for name in ("dtype", "architectures", _OWN_FIELD)}
        vars(config).pop(_OWN_FIELD, None)
        set_modules(config, self.mtp.count)
        vars(config).pop("mtp_loss", None)
        vars(config).update({"mtp_loss": options} if options else {})
        try:
            self.main.save_pretrained(directory, is_main_process=is_main_process, state_dict=state, **kwargs)
        finally:
            for name, value in before.items():
                setattr(config, name, value)

    def load_state_dict(self, state_dict: dict[str, Tensor], strict: bool = True, assign: bool = False) -> Any:
        """Load own names, or those of a saved checkpoint; with `strict=False` tensors wait until all are there."""
        if all(name.startswith(("main.", "mtp.")) and not is_official(name) for name in state_dict):
            return super().load_state_dict(state_dict, strict, assign)
        config = self.main.config
        state_dict, self._loaded_so_far = (self._loaded_so_far or {}) | dict(state_dict), None
        own = {str(tensor.data_ptr()): tensor for tensor in self.state_dict().values()}  # without copies
        if not strict and num_elements(state_dict, family_of(config).copies) < num_elements(own, ()):
            self._loaded_so_far = state_dict
            return super().load_state_dict({}, strict=False)
        main, modules, _ = load(None, config, False, state_dict=state_dict, dtype=self.main.dtype)
        loaded = nn.ModuleDict({"main": main, "mtp": modules}).state_dict()
        return super().load_state_dict(loaded, strict, assign)

    @property
    def base_model(self) -> nn.Module:
        """The main model without its head, which TRL calls for hidden states."""
        return self.get_decoder()

    @property
    def num_modules(self) -> int:
        """D; 0 where the modules were not loaded."""
        return self.mtp.count

    @property
    def num_depths(self) -> int:
        """Depths that the loss trains: D, or `unroll_steps`."""
        return (self.loss_options.unroll_steps or self.num_modules) if self.num_modules else 0

    @property
    def window(self) -> int:
        """Tokens that a call yields at most at the trained depth."""
        return self.num_depths + 1

    def parts(self) -> dict[str, nn.Module]:
        return {"modules": self.mtp}

    @classmethod
    def facts(cls, config: PreTrainedConfig, drafter: DeepSeekMTP | None = None) -> DrafterFacts:
        count = count_modules(config) if drafter is None else drafter.num_modules
        if not count:
            raise TypeError(f"this {cls.__name__} has no modules: cards are for models that draft")
        options = ModuleLossOptions.of(field(config, "mtp_loss")) if drafter is None else drafter.loss_options
        depths = options.unroll_steps or count
        rows = [("Modules", f"{count}, sequential; the last one is used again in longer drafts")]
        rows += [("Draft length", f"{depths} tokens, where a call does not say")] if depths != count else []
        return DrafterFacts("modules", depths + 1, rows, ("deepseekai2024v3",))

    def longest_draft(self) -> int | None:
        return None if self.num_modules else 0  # the last module is reused

    def default_draft(self) -> int:
        return self.num_depths

    def start(self, options: DraftOptions) -> ModuleSession:
        return ModuleSession(self, options)

    def prepare_call(self, options: CallOptions, config: GenerationConfig) -> CallOptions:
        """Read `draft_vocabulary` of a call."""
        options = super().prepare_call(options, config)
        ids = options.extra.get("draft_vocabulary")
        if ids is None or isinstance(ids, DraftVocabulary):
            return options
        vocabulary = DraftVocabulary(ids, self.config.get_text_config().vocab_size)
        return replace(options, extra=options.extra | {"draft_vocabulary": vocabulary})

    @property
    def mtp_loss_weight(self) -> float:
        """lambda, the weight of the modules' losses."""
        return self.loss_options.weight

    @mtp_loss_weight.setter
    def mtp_loss_weight(self, value: float) -> None:
        self.loss_options.weight = float(value)

    def train_only(self, part: str) -> None:
        """Choose what is trained: `"all"`, or `"drafter"`: the modules, with the backbone frozen."""
        if part not in ("all", "drafter"):
            raise ValueError(f"part={part!r} is unknown; choose 'all' or 'drafter'")
        self.main.requires_grad_(part == "all")
        self.mtp.requires_grad_(True)

    @property
    def readout(self) -> LMHeadView:
        """The map from normed states of the main model to its logits."""
        return LMHeadView(self.main)

    def readout_of(self, depth: int) -> LMHeadView:
        """Return the map from h^depth to logits: the main model's (0), or that of a module; see `MTPModules.step`."""
        return LMHeadView(self.main, self.mtp.at(depth) if depth else None)

    def module_embeddings(self) -> nn.Module:
        """Return the embeddings that modules read: their own, or the main model's."""
        return self.mtp.embed_tokens or input_embeddings(self.main)

    def module_inputs(self, output: MainOutput, input_ids: Tensor | None) -> Tensor:
        """Return the embeddings of tokens that modules read, [B, L, H]."""
        if self.mtp.embed_tokens is None:
            return output.inputs_embeds
        if input_ids is None:
            raise ValueError("inputs_embeds: these modules have embeddings of their own: pass input_ids")
        return self.mtp.embed_tokens(input_ids)

    def resize_token_embeddings(self, *args: object, **kwargs: object) -> nn.Embedding:
        """Resize the main model's embeddings and its head, which all parts share."""
        family, kind = family_of(self.main.config), self.main.config.model_type
        if (family.own_heads or family.own_embeddings) and self.mtp.count:
            raise ValueError(
                f"modules of model_type={kind!r} have their own heads or embeddings, which keep their size"
            )
        return untyped(super()).resize_token_embeddings(*args, **kwargs)

    def get_decoder(self, *args: object, **kwargs: object) -> nn.Module:
        """Return the main model without its head, and without towers of other modalities."""
        return self.main.get_decoder()

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, *args: object, inputs_embeds: Tensor | None = None, **kwargs: object
    ) -> Kwargs:
        prepare = untyped(self.main).prepare_inputs_for_generation
        inputs = prepare(input_ids, *args, inputs_embeds=inputs_embeds, **kwargs)
        return inputs | {"output_mtp_logits": False}

    def _prepare_position_ids_for_generation(self, *args: object, **kwargs: object) -> Tensor | None:
        """Return the main model's positions, which may be three with images; None where it ignores them."""
        if family_of(self.main.config).counts_columns:
            return None
        return untyped(self.main)._prepare_position_ids_for_generation(*args, **kwargs)

    def _validate_model_kwargs(self, model_kwargs: dict[str, object]) -> None:
        own = inspect.signature(self.forward).parameters
        others = {name: value for name, value in model_kwargs.items() if name not in own}
        untyped(self.main)._validate_model_kwargs(others)

    @property
    def drafting_part(self) -> nn.Module:
        if not self.num_modules or has_towers(self.main.config):
            own = f"model_type={self.main.config.model_type!r} with {self.num_modules} modules"
            raise ValueError(f"drafter: {own} does not learn online: it needs modules, and a main model of text alone")
        return self.mtp

    def learning_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """See `OwnLossMixin`; no gradient reaches the main model."""
        ids, mask, positions = batch["input_ids"], batch.get("attention_mask"), batch["position_ids"]
        hidden = state = batch[STATES][:, :, 0]  # [B, L, H]
        with torch.no_grad():
            if family_of(self.main.config).early:
                hidden = mapped_state(self.main.get_decoder(), self.main.config, state)
            embeds = input_embeddings(self.main)(ids)  # [B, L, H]
        if self.mtp.embed_tokens is not None:
            embeds = self.mtp.embed_tokens(ids)
        targets = depth_targets(batch["labels"], self.window, mask, positions)
        chain = [hidden, *self.chain(state, embeds, mask, positions, self.window - 1)[1:]]
        with parameters_frozen(output_embeddings(self.main)):
            return cast(Tensor, self.chain_loss(chain, targets).loss)

    def chain(
        self,
        hidden: Tensor,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        depths: int,
    ) -> list[Tensor]:
        """Return h^0 to h^depths; all but the first are computed from states that `loss_options` may detach."""
        options = self.loss_options
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1], device=hidden.device)[None]  # [1, L]
        start = hidden.detach() if options.detach_trunk else hidden
        is_held = options.detach_embedding and self.mtp.embed_tokens is None
        embeds = inputs_embeds.detach() if is_held else inputs_embeds
        return [hidden, *teacher_forced(self.mtp, start, embeds, position_ids, attention_mask, depths)]

    def chain_loss(self, chain: list[Tensor], targets: Tensor, counts: Tensor | None = None) -> MTPOutput:
        """Return the loss over h^0 to h^D, `chain`, from the targets of all depths [B, L, D + 1]."""
        size = self.main.config.get_text_config().vocab_size
        heads = [self.readout_of(depth) for depth in range(len(chain[: self.window]))]
        states = [reads.normed(state) for reads, state in zip(heads, chain)]
        windows = [targets[:, : state.shape[1], k] for k, state in enumerate(states)]
        detached = self.loss_options.detach_head and not heads[-1].has_own_head
        learns = not detached and any(parameter.requires_grad for parameter in heads[-1].head.parameters())
        part = None if learns else self.draft_vocabulary
        return chain_loss(heads, states, windows, size, self.loss_options, counts, part)

    def distributions(self, batch: Mapping[str, Tensor], length: int) -> DraftDistributions:
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        options = {"use_cache": False} | ({} if mask is None else {"attention_mask": mask})
        main = run_main(self.main, ids, None, batch.get("position_ids"), options)
        hidden, embeds = main.outputs.last_hidden_state, self.module_inputs(main, ids)
        chain = self.chain(main.state, embeds, mask, main.position_ids, length)[1:]
        states = stacked_steps(chain, hidden.shape[1])  # [B, L, depths, H]

        def draft(rows: Tensor, columns: Tensor, tokens: Tensor) -> Tensor:
            drafted = enumerate(states[rows, columns].unbind(1), start=1)
            return torch.stack([self.readout_of(depth)(state) for depth, state in drafted], 1).float().log_softmax(-1)

        return DraftDistributions(draft, self.readout, hidden)

    def pooled_loss(self, sums: Tensor, counts: Tensor) -> Tensor:
        return (sums * depth_weights(counts.to(sums), self.loss_options)).sum()

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Make each module one checkpoint; its decoder layer must not be another one, computed a third time."""
        super()._set_gradient_checkpointing(enable, *args, **kwargs)
        for name, module in self.mtp.named_modules():
            if "block" in name.split(".") and "gradient_checkpointing" in vars(module):
                vars(module)["gradient_checkpointing"] = False

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_mtp_logits: bool | None = None,
        logits_to_keep: int | Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> DeepSeekMTPOutput:
        """Return next-token logits of the main model, teacher-forced logits of the modules, and the loss of both.

        Args:
            input_ids: [B, L] int64.
            attention_mask: [B, past + L], 0 for padding.
            position_ids: [B or 1, L]; where they restart, another packed document begins. Beside images, also as the
                main model reads them.
            cache: Cache of the main model, which is extended.
            inputs_embeds: [B, L, H] instead of `input_ids`.
            labels: [B, L] int64 as in transformers (shifted here, -100 ignored).
            use_cache: Return a cache.
            output_hidden_states: True for all layers, or indices of those to return (-1: h^0). None: as in the config.
            output_mtp_logits: Compute `mtp_logits`. None: unless the model is training, a Trainer evaluates it (with
                `num_items_in_batch`) or a cache is used.
            logits_to_keep: Number of last positions whose main logits are computed (0: all), or these positions. None:
                all, but none in training with labels.
            num_items_in_batch: Targets per depth over all micro-batches, [D + 1] or one number (from the Trainer).
            past_key_values: The older name of `cache`.
            **kwargs: Of the main model without its head, pixels for example; `shift_labels` [B, L], the target of every
                position, replaces `labels`. With `output_router_logits`, also of the configuration, the balance of the
                experts is part of the loss.

        Returns:
            See `DeepSeekMTPOutput`.
        """
        cache, shift_labels = given_cache(cache, past_key_values), kwargs.pop("shift_labels", None)
        has_labels = labels is not None or shift_labels is not None
        if output_mtp_logits is None:
            only_loss = self.training or num_items_in_batch is not None
            output_mtp_logits = not (only_loss or use_cache or cache is not None) and self.num_modules > 0
        has_past = cache is not None and cache.get_seq_length()
        if (output_mtp_logits or has_labels) and has_past:
            raise ValueError(f"{CACHE}: labels and output_mtp_logits need whole sequences; leave it out")
        if has_labels and use_cache is None:
            use_cache = False  # with a cache, transformers ignores packed documents
        if field(self.config.get_text_config(), "output_router_logits"):
            kwargs.setdefault("output_router_logits", True)
        inputs: Kwargs = kwargs | {"attention_mask": attention_mask, CACHE: cache, "use_cache": use_cache}
        inputs["output_hidden_states"] = requested_states(output_hidden_states, self.config)
        with checkpointing_paused(self):
            main_output = run_main(self.main, input_ids, inputs_embeds, position_ids, inputs)
        outputs, position_ids = main_output.outputs, main_output.position_ids
        positions = None if position_ids is None else text_positions(position_ids)
        hidden = outputs.last_hidden_state
        chain, loss, shown, logits, mtp_logits = [hidden], None, {}, None, None
        depths = max(self.num_modules if output_mtp_logits else 0, self.num_depths if has_labels else 0)
        if depths:
            embeds = self.module_inputs(main_output, input_ids)
            chain[1:] = self.chain(main_output.state, embeds, attention_mask, position_ids, depths)[1:]
        if has_labels:
            targets = depth_targets(labels, self.window, attention_mask, positions, shift_labels)
            counts = counts_of_update(self, num_items_in_batch, labels, attention_mask, positions, shift_labels)
            result = self.chain_loss(chain, targets, counts)
            loss, shown = result.loss, dict(result)
        # of a block behind a cache there is none: its mask is of further columns
        aux_loss = router_loss(self.main, outputs, attention_mask) if has_labels or cache is None else None
        if loss is not None and aux_loss is not None:
            loss = loss + vars(self.main)["router_aux_loss_coef"] * aux_loss.to(loss.device)
        if output_mtp_logits:
            mtp_logits = tuple(self.readout_of(k)(chain[k]) for k in range(1, self.num_modules + 1))
        if logits_to_keep is not None or not (has_labels and self.training):
            logits = self.readout(selected_positions(hidden, logits_to_keep or 0))  # [B, K, V]
        states, parts = outputs.hidden_states, {}
        if states is not None and states[-1] is not None and main_output.state is not hidden:  # the last is h^0
            states = (*states[:-1], main_output.state)
        if use_cache and has_towers(self.config):  # what modules cannot compute from ids alone
            parts = {"inputs_embeds": main_output.inputs_embeds, "position_ids": position_ids}
        found = {"logits": logits, "mtp_logits": mtp_logits, "hidden_states": states, "attentions": outputs.attentions}
        return DeepSeekMTPOutput(
            aux_loss=aux_loss, **parts, **(shown | found | {"loss": loss, CACHE: cache_of(outputs)})
        )


class MiMoMTP(DeepSeekMTP):
    """`DeepSeekMTP` for MiMo-7B in bundled code: Auto classes accept remote code only if it names the config class."""

    config_class = MiMoConfig


DRAFTERS["modules"] = DeepSeekMTP
