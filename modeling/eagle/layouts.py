"""Layouts of EAGLE heads as data: the names of their architectures, and the fields of their config.json."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from ...configuration.foreign_fields import COPIED_FROM_TARGET, ROPE_LEVELS, FieldTable, names
from ...generation.tensors.tensor_files import Fields
from ..common.drafter_configs import architectures, rope_of

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id", "dflash_config.mask_token_id")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "use_aux_hidden_state")
NESTED = ("transformer_layer_config", "model")
"""Objects that hold the fields of the layers: speculators', vLLM's."""
LAYER_FIELDS = names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps vocab_size max_position_embeddings rope_theta attention_bias mlp_bias layer_types sliding_window "
    "use_sliding_window"
)
_HEAD_FIELDS = names(
    "draft_vocab_size target_hidden_size parallel_drafting num_aux_hidden_states num_aux_layers target_layer_ids bias "
    f"loss_options {AUX_IDS} {' '.join(FLAGS)} mask_token_id pard_token ptd_token_id"
)
_INFORMATION = names(
    "qkv_bias max_window_layers max_sequence_length has_lm_head has_embed_tokens truncated_vocab_size "
    "num_target_layers num_depths down_sample_ratio down_sample_ratio_min parallel_draft_heads_num_layers "
    "method num_lookahead_tokens num_speculative_tokens"
)
_TRAINED_BY_MODEL_OPTIMIZER = {
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False,),
    "next_layer_regular": (True,),
    "parallel_draft_step": (1,),
    "position_embedding_type": ("rope",),
}
"""Fields of its networks, at the values of EAGLE-3's."""
_PLAIN = FieldTable(
    "official",
    {"": LAYER_FIELDS | _HEAD_FIELDS, "eagle_config": names(f"{AUX_IDS} {' '.join(FLAGS)}"), **ROPE_LEVELS}
    | {"dflash_config": ("mask_token_id",), "model": LAYER_FIELDS}
    | {f"model.{level}": fields for level, fields in ROPE_LEVELS.items()},
    {"": _INFORMATION, "model": _INFORMATION, "eagle_config": _INFORMATION},
    _TRAINED_BY_MODEL_OPTIMIZER,
)


@dataclass(frozen=True)
class EagleLayout:
    """A layout of checkpoints of EAGLE heads.

    Attributes:
        names: Of architectures; those that begin with `PEagle` have rows that run at once.
        table: The fields of its config.json.
        saved_as: `config.layout` of what is read.
        states_theta: Its config always has a `rope_theta`; in others, 10,000 is meant where there is none.
        scales_rope: Its code knows other rotary positions than the default ones.
        counts_layers: `num_hidden_layers` is the head's, and not the target's, whose config was copied.
    """

    names: Collection[str]
    table: FieldTable
    saved_as: str
    states_theta: bool = False
    scales_rope: bool = True
    counts_layers: bool = True


def _named(layout: str, top: Collection[str] = (), rope: Collection[str] = ()) -> FieldTable:
    """Return the table of a layout that knows more fields than the official one, at the top and of rope."""
    more = {"": {*_INFORMATION, *top}} | dict.fromkeys(ROPE_LEVELS, rope)
    return replace(_PLAIN, layout=layout, known={**_PLAIN.known, **more})


_SPECULATORS = FieldTable(
    "speculators",
    {"": _HEAD_FIELDS, "transformer_layer_config": LAYER_FIELDS, "speculators_config": ("verifier",)}
    | {f"transformer_layer_config.{level}": fields for level, fields in ROPE_LEVELS.items()},
    {
        "": names("speculators_model_type speculators_version ignore_keys"),
        "transformer_layer_config": _INFORMATION,
        "speculators_config": names("algorithm default_proposal_method proposal_methods"),
    },
    _PLAIN.only,
)
SPECULATORS = EagleLayout(names("Eagle3DraftModel Eagle3Speculator"), _SPECULATORS, "speculators")
_OF_ROPE = names("partial_rotary_factor mrope_*")
"""Of the target: DeepSpec's heads rotate whole heads by a plain rope, and NeMo's as their config says."""
_OF_TARGETS = COPIED_FROM_TARGET - _OF_ROPE | names("resid_pdrop embd_pdrop")
_DEEPSPEC = EagleLayout(
    names("Qwen3Eagle3Model"), _named("deepspec", COPIED_FROM_TARGET, _OF_ROPE), "tokenahead", states_theta=True
)
_DEEPSPEC_SCALED = replace(_DEEPSPEC, table=_named("deepspec", COPIED_FROM_TARGET - _OF_ROPE))
_OFFICIAL = "LlamaForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM MistralForCausalLM MixtralForCausalLM"
_OF_VLLM = (
    "EagleLlamaForCausalLM LlamaForCausalLMEagle Eagle3LlamaForCausalLM PeagleLlamaForCausalLM "
    "Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM"
)
_NEMO = names("LlamaEagle3DraftModel")
LAYOUTS = (
    EagleLayout(names(_OFFICIAL), _PLAIN, "official"),
    EagleLayout(names("LlamaForCausalLMEagle3"), _named("specforge"), "specforge"),
    EagleLayout(names("PEagleDraftModel"), _named("specforge (P-EAGLE)"), "vllm", states_theta=True, scales_rope=False),
    EagleLayout(names(_OF_VLLM), _named("vllm"), "official"),
    _DEEPSPEC,
    EagleLayout(_NEMO, _named("nemo", _OF_TARGETS), "vllm", states_theta=True, counts_layers=False),
    SPECULATORS,
)


def layout_of(name: object, raw: Fields) -> EagleLayout:
    """Return the layout of the config.json of a head; one that names no architecture has the official one."""
    named = architectures(raw)
    found = [next((each for each in LAYOUTS if kind in each.names), None) for kind in named]
    if None in found:
        raise ValueError(f"{name}: architectures={named}: {named[found.index(None)]} is no EAGLE head known here")
    if "speculators_model_type" in raw:
        return SPECULATORS
    layout = next((each for each in found if each), LAYOUTS[0])
    is_scaled = layout is _DEEPSPEC and rope_of(name, raw, 1.0)["rope_type"] != "default"
    return _DEEPSPEC_SCALED if is_scaled else layout
