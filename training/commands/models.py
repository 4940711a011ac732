"""Models of a run: a backbone with what drafts for it, loaded or made new. Knows neither data nor trainers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, get_type_hints

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ...configuration import MTPHeadConfig, PTPConfig, PTPStudentConfig
from ...configuration.eagle import EagleHeadConfig
from ...configuration.mtp_families import FAMILIES, count_modules
from ...generation.attach import AttachableDrafter
from ...modeling import DeepSeekMTP, EagleHead, EvaByteForMTPC, EvaByteTokenizer, MTPHeads, PTPForCausalLM
from ...modeling.loss_options import SUPPORTED, LossOptions
from ..completion import load_config
from ..parts import has_adapters, put_adapters, tokenizer_source
from ..ptp.options import PTPOptions
from .sections import converted
from .settings import DrafterArguments, Settings

_NEW = {"heads": MTPHeads, "eagle": EagleHead, "modules": DeepSeekMTP, "parallel": PTPForCausalLM}
_CONFIGS = {"own": MTPHeadConfig, "heads": MTPHeadConfig, "eagle": EagleHeadConfig, "parallel": PTPConfig}
_LOSSES = {EagleHead: "eagle", DeepSeekMTP: "modules", PTPForCausalLM: "ptp"}


@dataclass(frozen=True)
class Trainee:
    """What a run trains.

    Attributes:
        model: What the trainer gets: a model with a drafter in it, or a drafter that is attached to its backbone.
        backbone: The model whose `generate` is called.
        tokenizer: The backbone's.
    """

    model: PreTrainedModel
    backbone: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def call_options(self) -> dict[str, Any]:
        """Options of `backbone.generate` that let the drafter draft."""
        return {"assistant_model": self.model} if isinstance(self.model, AttachableDrafter) else {}


def build(settings: Settings) -> Trainee:
    """Loads the backbone, and loads or makes what drafts for it.

    Args:
        settings: Of the run.

    Raises:
        ValueError: No model, a drafter or adapters that do not fit the model, or an option that is none.
        OSError: A directory or a name that holds no model.
    """
    arguments, source = settings.drafter, settings.model.model_name_or_path
    if not source:
        raise ValueError("model_name_or_path is missing: a directory, or a name on the Hub")
    if has_adapters(source):
        raise ValueError(
            f"model_name_or_path={source} holds adapters of peft without the model that they were trained for: merge "
            "them into it, and name the merged one"
        )
    config = load_config(source, "model_name_or_path")
    if isinstance(config, (MTPHeadConfig, EagleHeadConfig)):
        raise ValueError(
            f"model_name_or_path={source} holds a drafter without a backbone: name the backbone there, and the drafter "
            "as drafter_name_or_path"
        )
    if isinstance(config, PTPStudentConfig):
        raise ValueError(
            f"model_name_or_path={source} holds a student without its backbone: give the directory of the whole model, "
            "which student.whole.save_pretrained(directory) writes of an attached one"
        )
    backbone = _backbone(settings, source, config)
    tokenizer = _tokenizer(source, backbone)
    try:
        model = _drafter(arguments, backbone)
        _apply_loss_options(model, arguments)
        _choose_parts(model, arguments)
    except TypeError as error:  # an option that from_backbone does not know
        raise ValueError(f"drafter_options: {error}") from None
    trainee = Trainee(model, model.backbone if isinstance(model, AttachableDrafter) else model, tokenizer)
    if settings.adapters is not None:
        put_adapters(trainee.backbone, settings.adapters)
    return trainee


def _backbone(settings: Settings, source: str, config: Any) -> PreTrainedModel:
    model, kind = settings.model, AutoModelForCausalLM
    options: dict[str, Any] = {
        "revision": model.model_revision,
        "dtype": getattr(torch, model.dtype or "float32", "auto"),
    }
    if model.attn_implementation is not None:
        options["attn_implementation"] = model.attn_implementation
    if settings.training.trust_remote_code:
        options["trust_remote_code"] = True
    if config.model_type in FAMILIES and count_modules(config) and settings.drafter.drafter in ("own", "modules"):
        kind = DeepSeekMTP
    return kind.from_pretrained(source, **options)


def _tokenizer(source: str, backbone: PreTrainedModel) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_source(source))
    except (OSError, ValueError):
        if not isinstance(backbone, EvaByteForMTPC):
            raise
        tokenizer = EvaByteTokenizer()  # bytes are bytes, also where a directory has none
    size = backbone.config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise ValueError(
            f"the tokenizer of {source} has {len(tokenizer)} tokens, the model {size}: resize its embeddings first"
        )
    return tokenizer


def _drafter(arguments: DrafterArguments, backbone: PreTrainedModel) -> PreTrainedModel:
    """The model to train."""
    options = _drafter_options(arguments)
    brings_its_own = isinstance(backbone, (EvaByteForMTPC, DeepSeekMTP, PTPForCausalLM))
    if arguments.drafter_name_or_path is not None:
        return _stored(arguments, backbone)
    if arguments.drafter == "own" or isinstance(backbone, DeepSeekMTP):
        if not brings_its_own:
            raise ValueError(
                f"{type(backbone).__name__} brings nothing that drafts: set drafter: heads, eagle, modules or parallel"
            )
        return _own(backbone, options)
    if isinstance(backbone, PTPForCausalLM):
        raise ValueError(f"drafter={arguments.drafter!r}: a PTPForCausalLM is trained as it is; set drafter to 'own'")
    return _NEW[arguments.drafter].from_backbone(backbone, **options)


def _drafter_options(arguments: DrafterArguments) -> dict[str, Any]:
    """The options of a new drafter, by the types of its config and of what makes it."""
    makers = _CONFIGS.get(arguments.drafter), getattr(_NEW.get(arguments.drafter), "from_backbone", None)
    hints = [get_type_hints(maker, localns={"torch": torch}) for maker in makers if maker is not None]
    return converted(
        "drafter_options", arguments.drafter_options or {}, {k: v for each in hints for k, v in each.items()}
    )


def _own(model: PreTrainedModel, options: dict[str, Any]) -> PreTrainedModel:
    if isinstance(model, EvaByteForMTPC):
        if options:
            model.set_head(**options)
    elif options:
        raise ValueError(f"drafter_options={options}: the {type(model).__name__} was made already, and is what it is")
    return model


def _stored(arguments: DrafterArguments, backbone: PreTrainedModel) -> PreTrainedModel:
    name = arguments.drafter_name_or_path
    if arguments.drafter_options:
        raise ValueError(f"drafter_options are for a new drafter, and {name} is one already: leave one of them out")
    config = load_config(name, "drafter_name_or_path")
    wanted = {"heads": MTPHeadConfig, "eagle": EagleHeadConfig}.get(arguments.drafter)
    if wanted is None:
        raise ValueError(f"drafter={arguments.drafter!r}: only heads and eagle live in directories of their own")
    if not isinstance(config, wanted):
        raise ValueError(f"drafter_name_or_path={name} holds a {config.model_type!r}, not {wanted.model_type!r}")
    return AutoModel.from_pretrained(name).attach(backbone)


def _apply_loss_options(model: PreTrainedModel, arguments: DrafterArguments) -> None:
    given = arguments.loss_options
    kind = next((options for cls, options in _LOSSES.items() if isinstance(model, cls)), None)
    if given and kind is None:
        raise ValueError(
            f"loss_options={given}: the loss of a {type(model).__name__} follows its drafter_options (gamma, "
            "loss_weights, ...) and the strategy"
        )
    if not given or isinstance(model, PTPForCausalLM):
        return
    model.loss_options = LossOptions.of(kind, _typed_options(LossOptions, SUPPORTED[kind], given))
    if isinstance(model, EagleHead):
        model.loss_options.resolved(model.config.version)


def _choose_parts(model: PreTrainedModel, arguments: DrafterArguments) -> None:
    """Freezes the backbone of a PTP model, unless `base_weight` lets it learn; of others the strategy says."""
    if isinstance(model, PTPForCausalLM):
        model.train_only("all" if ptp_options(arguments).base_weight else "drafter")


def _typed_options(kind: type, known: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    for name in given:
        if name not in known:
            raise ValueError(f"loss_options has no {name!r}; choose from {', '.join(known)}")
    return converted("loss_options", given, get_type_hints(kind))


def ptp_options(arguments: DrafterArguments) -> PTPOptions:
    """Options of `PTPTrainer`.

    Raises:
        ValueError: An unknown option, or a value of another type or out of range.
    """
    known = [entry.name for entry in fields_of(PTPOptions)]
    return PTPOptions(**_typed_options(PTPOptions, known, arguments.loss_options or {}))


def is_parallel(model: Any) -> bool:
    """Whether `PTPTrainer` trains it."""
    return isinstance(model, PTPForCausalLM) or isinstance(getattr(model, "config", None), PTPConfig)
