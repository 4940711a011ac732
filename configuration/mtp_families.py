"""Families of models with sequential modules that `DeepSeekMTP` supports, and the names of the parts in their files.

In this library a module has the names of DeepSeek-V3: module k (from 0) of a model with L layers is
`model.layers.{L + k}`, with `enorm`, `hnorm`, `eh_proj`, `shared_head.norm` and the tensors of one decoder layer.
`FAMILIES` lists other names, and modules that are unlike the model's last layer. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig, Qwen2Config

from .fields import field
from .foreign_fields import FieldTable, Raw, names, refuse_unread

SAME = "same"
"""Instead of a type of layer: the type of the main model's layer of the module's own index."""
COUNT = "num_nextn_predict_layers"
"""The field of config.json with the number of modules, in most families."""
_DSPARK = "dspark_block_size"


class MiMoConfig(Qwen2Config):
    """Configuration of MiMo-7B, which transformers does not have: Qwen2's, with `num_nextn_predict_layers`.

    Example:
        >>> DeepSeekMTP.from_pretrained("XiaomiMiMo/MiMo-7B-RL")
    """

    model_type = "mimo"


@dataclass(frozen=True)
class MTPFamily:
    """Layout of a family's modules."""

    names: tuple[tuple[str, str], ...] = ()
    """Pairs (in the family's files, in DeepSeek-V3) of prefixes of names, the longest first; `{index}` is k, `{layer}`
    is L + k. Empty for DeepSeek-V3's names. A pair without either would be shared by all modules: such a family has
    one module (but for `shares_norm`)."""
    embedding_first: bool = True  # `eh_proj` takes [enorm(embedding); hnorm(hidden)], not the other way round
    norm_before_head: bool = True  # there is a `shared_head.norm`; else h^k is the output of the decoder layer
    shares_norm: bool = False  # that norm is one for all, where there is one at all (`chain_hidden_post_norm`)
    scales_nothing: bool = False  # attention leaves out the main model's scaling by the number of columns
    unnormed: bool = False
    """Modules pass on states from before their norm, which is for the head; the first reads the main model's after."""
    own_heads: bool = False
    """Each module has a head of its own, `shared_head.output` after its norm, and passes on its state from before that
    norm; the first reads the main model's from before its final norm. Files may have `.transformer.` in these names."""
    own_embeddings: bool = False  # the module has embeddings of its own, `embed_tokens`
    copies: tuple[str, ...] = ()  # tensors of the main model that official files repeat in every module
    block: tuple[tuple[str, str | float], ...] = ()
    """Per-layer fields of the configuration with their value for a module, where it is unlike the last layer; `SAME`:
    that of the main model's layer of the same index. A field `mtp_<name>` of the model's configuration overrides it."""
    rotates: bool = False  # full attention has rotary positions, which the model's own layers of it lack
    one_stream: bool = False  # a module is a layer without hyper-connections: one stream, to which it adds
    streams: bool = False
    """A module reads the streams of the main model's last layer, before they are mixed into one, and hands on its own.
    `eh_proj` is a linear map of embeddings, `e_proj`, and one of every stream, `h_proj`; `hnorm` is over all streams,
    or of each; `shared_head.mixer` mixes them, for the main model's head."""
    body: str = "layer"
    """`"layer"`, a decoder layer of the model; `"stack"`, several, of the kinds in `mtp_layers_block_type`; `"latent"`,
    one latent attention and a dense MLP."""
    has_twin: bool = True  # the model has a layer of the module's kind, which `from_backbone` can copy
    count: str = COUNT  # the field of config.json that holds the number of modules
    counts_outside: bool = False  # beside a tower, it is a field of the whole configuration
    counts_columns: bool = False  # transformers' class counts positions by columns, padding included
    layers: str = "num_hidden_layers"  # the field that holds L
    retrofit: bool = False  # it has no official modules: `DeepSeekMTP.from_backbone` makes them
    stem: str = "model"  # where the decoder is: `model.language_model` beside a vision tower
    tower_prefix: str = ""  # of `names` in files with a tower

    @property
    def early(self) -> bool:
        """Whether the main model's states are read from before what makes the state that its head reads."""
        return self.own_heads or self.streams

    @property
    def last_part(self) -> str:
        """The name of what makes the state that the head reads."""
        return "shared_head.mixer" if self.streams else "shared_head.norm"

    @property
    def most_modules(self) -> int | None:
        """The largest D that the names can distinguish; None: any."""
        return 1 if any("{" not in theirs for theirs, _ in self.names) and not self.shares_norm else None

    def renames(self, num_layers: int, num_modules: int) -> dict[str, str]:
        """Return patterns of names in files and their replacements, for `key_mapping` of transformers."""
        pairs = self._pairs(num_layers, num_modules)
        if self.own_heads:
            layers = [f"layers.{num_layers + k}." for k in range(num_modules)]
            pairs += [(f"model.{layer}transformer.", f"{self.stem}.{layer}") for layer in layers]
        return {"^" + theirs.replace(".", r"\."): ours for theirs, ours in pairs}

    def file_name(self, name: str, num_layers: int, num_modules: int) -> str:
        """Return the name in the family's files of a tensor with DeepSeek-V3's name."""
        for theirs, ours in self._pairs(num_layers, num_modules):
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def prefixes(self, num_layers: int, k: int) -> list[str]:
        """Return the prefixes of all tensors of module k, from 0, in the family's files."""
        templates = [theirs for theirs, _ in self.names if "{layer}" not in theirs]
        if not templates or self.own_embeddings:
            templates = [f"{stem}.layers.{{layer}}." for stem in dict.fromkeys(["model", self.stem])] + templates
        if k:
            templates = [template for template in templates if "{" in template]
        return [template.format(index=k, layer=num_layers + k) for template in templates]

    def _pairs(self, num_layers: int, num_modules: int) -> list[tuple[str, str]]:
        pairs = list[tuple[str, str]]()
        for k in range(num_modules):
            numbers = {"index": k, "layer": num_layers + k}
            pairs += [(theirs.format(**numbers), ours.format(**numbers)) for theirs, ours in self.names]
        return [(theirs, self.stem + ours.removeprefix("model")) for theirs, ours in pairs]


def _names(layer: str, parts: str) -> tuple[tuple[str, str], ...]:
    """Return the `names` of a family from pairs `ours=theirs`; theirs that begin with a dot are below its `layer`."""
    named = [part.split("=") for part in parts.split()]
    pairs = [(layer + theirs if theirs.startswith(".") else theirs, ours) for ours, theirs in named]
    found = [(f"{theirs}.", f"model.layers.{{layer}}.{ours}.") for theirs, ours in pairs]
    return (*found, (f"{layer}.", "model.layers.{layer}.")) if layer else tuple(found)


_MTP_NAMES = _names(
    "mtp.layers.0",
    "eh_proj=mtp.fc enorm=mtp.pre_fc_norm_embedding hnorm=mtp.pre_fc_norm_hidden shared_head.norm=mtp.norm",
)
_FINAL_NORM = _names("", "shared_head.norm=model.layers.{layer}.final_layernorm")
_FULL, _SLIDING = ("layer_types", "full_attention"), ("layer_types", "sliding_attention")
_DENSE, _SPARSE = ("mlp_layer_types", "dense"), ("mlp_layer_types", "sparse")
_COPIES = "embed_tokens.weight", "shared_head.head.weight"
_DEEPSEEK = MTPFamily(copies=_COPIES)
_QWEN = MTPFamily(names=_MTP_NAMES, block=(_FULL,))
_QWEN_3_5 = replace(_QWEN, count="mtp_num_hidden_layers")
_INKLING = MTPFamily(
    names=_names(
        "model.mtp.layers.{index}.transformer_block",
        "eh_proj=model.mtp.layers.{index}.input_proj enorm=model.mtp.layers.{index}.embed_norm "
        "hnorm=model.mtp.layers.{index}.hidden_norm shared_head.norm=model.mtp.chain_norm",
    ),
    embedding_first=False,
    shares_norm=True,
    scales_nothing=True,
    has_twin=False,
    count="num_mtp_layers",
)
RETROFIT = MTPFamily(retrofit=True)
"""Families without official modules, which are not listed: `from_backbone` checks each model numerically."""
FAMILIES: dict[str, MTPFamily] = {
    "bailing_hybrid": MTPFamily(names=_FINAL_NORM, block=(_FULL, _SPARSE)),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": MTPFamily(
        copies=_COPIES,
        names=(
            ("mtp.{index}.hc_head_", "model.layers.{layer}.shared_head.mixer.hc_head.hc_"),
            *_names(
                "mtp.{index}",
                "shared_head.mixer.out_norm=.norm shared_head.head=.head embed_tokens=.emb.tok_emb "
                "eh_proj.e_proj=.e_proj eh_proj.h_proj=.h_proj",
            ),
        ),
        block=(_SLIDING, ("mlp_layer_types", "moe")),
        streams=True,
        has_twin=False,
    ),
    "dots3_note_text": MTPFamily(
        names=_names("", "embed_tokens=model.mtp.embed_tokens"),
        own_embeddings=True,
        copies=("shared_head.head.weight",),
        block=(_SLIDING, _DENSE),
        has_twin=False,
    ),
    "ernie4_5_moe": MTPFamily(
        names=_names(
            "model.mtp_block.{index}",
            "enorm=model.mtp_emb_norm.{index} hnorm=model.mtp_hidden_norm.{index} "
            "eh_proj=model.mtp_linear_proj.{index}",
        ),
        norm_before_head=False,
        has_twin=False,  # a dense layer, like the model's first ones only
    ),
    "exaone4_5": MTPFamily(names=_MTP_NAMES, block=(("layer_types", SAME),), counts_outside=True, counts_columns=True),
    "exaone_moe": MTPFamily(names=_MTP_NAMES, block=(("layer_types", SAME), _DENSE), rotates=True),
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm4v_moe_text": _DEEPSEEK,
    "glm_ocr_text": _DEEPSEEK,
    "glm5_next_text": MTPFamily(
        copies=_COPIES,
        block=(("layer_types", "indexed_attention"), ("indexer_types", "full"), _SPARSE),
        one_stream=True,
        has_twin=False,
    ),
    "glm_moe_dsa": MTPFamily(copies=("embed_tokens.weight",), block=(("indexer_types", "full"),)),
    "hy_v3": MTPFamily(copies=_COPIES, names=_FINAL_NORM),
    "hy_v4": MTPFamily(
        copies=_COPIES, names=_FINAL_NORM, block=(("indexer_types", "full"), _SPARSE), one_stream=True, has_twin=False
    ),
    "inkling_mm_model": _INKLING,
    "inkling_text": _INKLING,
    "longcat_flash": MTPFamily(
        names=_names(
            "model.mtp.layers.0",
            "enorm=.enorm.m hnorm=.hnorm.m mlp=.transformer_layer.mlp shared_head.norm=model.mtp.norm "
            "embed_tokens=model.mtp.embed_tokens",
        ),
        copies=("embed_tokens.weight",),
        body="latent",
        has_twin=False,
        layers="num_layers",
    ),
    "mellum": MTPFamily(names=_MTP_NAMES, block=(_SLIDING, _SPARSE)),
    "mimo": MTPFamily(
        names=_names(
            "model.mtp_layers.{index}",
            "enorm=.token_layernorm hnorm=.hidden_layernorm eh_proj=.input_proj shared_head.norm=.final_layernorm",
        ),
        embedding_first=False,
    ),
    "mimo_v2_flash": MTPFamily(
        names=_names(
            "model.mtp.layers.{index}", "shared_head.norm=.final_layernorm post_attention_layernorm=.pre_mlp_layernorm"
        ),
        block=(_SLIDING, _DENSE),
    ),
    "minimax_m3_vl_text": MTPFamily(
        names=_names(
            "model.mtp.layers.{index}.transformer_layer",
            "eh_proj=model.mtp.layers.{index}.eh_proj enorm=model.mtp.layers.{index}.enorm "
            "hnorm=model.mtp.layers.{index}.hnorm shared_head.norm=model.mtp.layers.{index}.final_layernorm",
        ),
        unnormed=True,
        block=(("layer_types", "minimax_m3_sparse"), _SPARSE),
        count="num_mtp_modules",
        tower_prefix="language_model.",
    ),
    "nemotron_h": MTPFamily(
        names=_names(
            "",
            "enorm=mtp.layers.0.enorm hnorm=mtp.layers.0.hnorm eh_proj=mtp.layers.0.eh_proj "
            "shared_head.norm=mtp.layers.1.final_layernorm parts.0=mtp.layers.0 parts.1=mtp.layers.1",
        ),
        body="stack",
        has_twin=False,
    ),
    "qwen3_5_moe_text": _QWEN_3_5,
    "qwen3_5_text": _QWEN_3_5,
    "qwen3_next": _QWEN,
    "qwen4_exp_text": MTPFamily(
        names=_names(
            "mtp.layers.0",
            "eh_proj.e_proj=mtp.fc_embedding eh_proj.h_proj=mtp.fc_hidden enorm=mtp.pre_fc_norm_embedding "
            "hnorm=mtp.pre_fc_norm_hidden shared_head.mixer=mtp.hyper_connection_mixer",
        ),
        block=(("layer_types", "indexed_attention"),),
        streams=True,
        has_twin=False,
        count="mtp_num_hidden_layers",
    ),
    "step3p7": MTPFamily(own_heads=True, block=(("swiglu_limits", 0.0), ("swiglu_limits_shared", 0.0))),
    "kimi_linear": replace(RETROFIT, block=(_FULL,)),
}
"""Families with official modules, or with modules unlike the model's last layer, by `model_type`."""

REFUSED: dict[str, str] = {
    "dots3_note": "its towers for images and sound are not loaded here: pass config=AutoConfig.from_pretrained(name)."
    "get_text_config(), dots3_note_text, whose class reads the same files "
    "(transformers/models/dots3_note/modeling_dots3_note.py)",
    "mistral_large4": "transformers drops the tensors of its drafter (mtp_dspark.*), and neither transformers nor vLLM "
    "0.32 has a class that reads them (transformers/models/mistral_large4/modeling_mistral_large4.py)",
    "step3p5": "transformers has its network as the text of step3p7 (Step-3.7) only, and no causal language model of "
    "it alone (models/auto/modeling_auto.py)",
}
"""Families with modules that are not supported, why, and the file of vLLM 0.32 or transformers 5.23 that shows it."""


def family_of(config: PreTrainedConfig) -> MTPFamily:
    """Return the layout of a model's modules; refuse an unsupported family."""
    if reason := REFUSED.get(config.model_type):
        raise ValueError(f"DeepSeekMTP does not support model_type={config.model_type!r}: {reason}")
    text = config.get_text_config()
    family = FAMILIES.get(config.model_type) or FAMILIES.get(text.model_type, RETROFIT)
    if family.shares_norm and not field(text, "chain_hidden_post_norm"):
        family = replace(family, norm_before_head=False)
    if text is config:
        return family
    names = tuple((family.tower_prefix + theirs, ours) for theirs, ours in family.names)
    return replace(family, stem="model.language_model", names=names)


def dspark_block_size(raw: Raw) -> int | None:
    """Return `dspark_block_size` of a config.json, whose `mtp.*` are a DSpark drafter, not modules (DeepSeek-V4)."""
    parts = [part for part in (raw, raw.get("text_config")) if isinstance(part, Mapping)]
    return next((part[_DSPARK] for part in parts if part.get(_DSPARK) is not None), None)


def refuse_dspark(owner: object, raw: Raw) -> None:
    """Refuse a release whose `mtp.*` are a DSpark drafter, with layers of the model itself."""
    if size := dspark_block_size(raw):
        alone = "DeepSeekMTP.from_pretrained(..., inference_only=True) loads the model alone"
        raise ValueError(f"{owner} ships a DSpark drafter ({_DSPARK}={size}), which is not supported: {alone}")


_OF_MODULES = re.compile(r"(.*_)?(mtp|nextn|dspark)(_.*)?")
_READ = names(
    "num_nextn_predict_layers num_mtp_layers num_mtp_modules mtp_num_hidden_layers mtp_layers_block_type "
    "mtp_hybrid_override_pattern mtp_layer_types mtp_mlp_layer_types mtp_indexer_types mtp_no_rope_layers "
    "mtp_swiglu_limits mtp_swiglu_limits_shared mtp_local_layer_ids mtp_loss"
)
_KNOWN = names(
    "mtp mtp_config n_mtp_layers mtp_num_layers mtp_replicate_modules mtp_use_repeated_layer mtp_detach_heads "
    "mtp_loss_* use_mtp"
)
_ONLY = {"mtp_hidden_states_first": (True,), "mtp_transformer_layers": (1,), "mtp_disable_over_tokenizer": (True,)}
_LEVELS = "", "text_config"
_FIELDS = FieldTable("modules", dict.fromkeys(_LEVELS, _READ), dict.fromkeys(_LEVELS, _KNOWN), _ONLY)


def check_fields_of_modules(owner: object, raw: Raw, ignored: Sequence[str] = ()) -> None:
    """Refuse a config.json with a field of modules that is not read; the model's own are transformers' business."""
    refuse_dspark(owner, raw)
    text = raw.get("text_config")
    parts = raw, text if isinstance(text, Mapping) else {}
    own, of_text = ({key: part[key] for key in part if _OF_MODULES.fullmatch(key)} for part in parts)
    refuse_unread(owner, own | {"text_config": of_text}, _FIELDS, ignored)


def announced_modules(config: PreTrainedConfig) -> int | None:
    """Return the number of modules in a configuration; None where it has no such field."""
    family = family_of(config)
    count = field(config if family.counts_outside else config.get_text_config(), family.count)
    return None if count is None else int(count)


def count_modules(config: PreTrainedConfig) -> int:
    """Return the number of modules in a configuration; 0 where it has no such field."""
    return announced_modules(config) or 0


def set_modules(config: PreTrainedConfig, count: int, like: PreTrainedConfig | None = None) -> None:
    """Write the number of modules, and all fields of theirs that `like` has; refuse more than names can distinguish."""
    family, fields = family_of(config), {} if like is None else vars(like.get_text_config())
    for name in _READ & fields.keys():
        setattr(config.get_text_config(), name, fields[name])
    if (most := family.most_modules) is not None and count > most:
        raise ValueError(f"{family.count}={count}: files of {config.model_type} have names for {most} module only")
    setattr(config if family.counts_outside else config.get_text_config(), family.count, count)


def num_layers(config: PreTrainedConfig) -> int:
    """Return L, the number of decoder layers of the main model."""
    return int(field(config.get_text_config(), family_of(config).layers))
