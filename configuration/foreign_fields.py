"""Fields of configs that other libraries write: each is read, is known to change nothing, or is refused by its name.

A drafter that is read without one of its fields may be another network than the published one: texts stay right, and
hardly a draft is accepted. A layout lists its fields in a `FieldTable`; all other fields are refused. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

Raw = Mapping[str, Any]
"""The fields of a config.json."""


def names(text: str) -> frozenset[str]:
    """Return the names in a text, apart by spaces, in which tables of fields are written."""
    return frozenset(text.split())


CHANGES_NOTHING = names(
    # of transformers, old versions included
    "architectures model_type auto_map _name_or_path name_or_path transformers_version transformers_weights "
    "_commit_hash dtype torch_dtype _attn_implementation* attn_implementation use_cache return_dict "
    "output_hidden_states output_attentions torchscript use_bfloat16 pruned_heads chunk_size_feed_forward "
    "is_encoder_decoder is_decoder "
    "add_cross_attention cross_attention_hidden_size bos_token_id eos_token_id pad_token_id sep_token_id "
    "decoder_start_token_id id2label label2id problem_type finetuning_task task_specific_params prefix tokenizer_class "
    "tie_word_embeddings tie_encoder_decoder tf_legacy_loss initializer_range attention_dropout pretraining_tp "
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k "
    "top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids "
    "num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id "
    "initial_context_length "  # of GPT-OSS, whose rope states it again
    "remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    # of repositories
    "license model_name library_name library_version "
    # of engines
    "runtime_block_size draft_window_size block_size_policy dflash_initial_block_size prefer_requested_block_size "
    "adaptive_max_block_size verify_mode dspark_draft_topk "
    # of training
    "num_anchors ttt_length step_loss_decay confidence_head_alpha train_embed_tokens embed_requires_grad "
    "draft_num_hidden_layers target_model_name_or_path target_model_type loss_* has_no_defaults_at_init"
)
"""Names, some with wildcards, that change nothing at any level of any layout."""
ROPE = names(
    "rope_type type rope_theta factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim "
    "attention_factor short_factor long_factor low_freq_factor high_freq_factor truncate"
)
"""Fields of `rope_parameters` and `rope_scaling` that transformers reads."""
ROPE_LEVELS = dict.fromkeys(
    names(
        "rope_parameters rope_parameters.full_attention rope_parameters.sliding_attention "
        "rope_scaling rope_scaling.full_attention rope_scaling.sliding_attention"
    ),
    ROPE,
)
"""The levels at which they stand, by kind of layer in some configs."""
LAYERS = names(
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim hidden_act "
    "rms_norm_eps vocab_size max_position_embeddings rope_theta attention_bias layer_types sliding_window "
    "use_sliding_window"
)
"""Fields of the layers of a drafter."""
ROPE_OF_TARGET = names("partial_rotary_factor mrope_*")
COPIED_FROM_TARGET = ROPE_OF_TARGET | names(
    "attn_output_gate output_gate_type full_attention_interval linear_* mtp_* text_config vision_config "
    "*_token_id mamba_ssm_dtype num_experts num_local_experts num_experts_per_tok "
    "moe_intermediate_size shared_expert_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers "
    "output_router_logits router_aux_loss_coef"
)
"""Fields of a Qwen target that DeepSpec copies into the config of a drafter, and that describe the target alone."""
INFORMATION = names(
    "qkv_bias max_window_layers max_sequence_length has_lm_head has_embed_tokens truncated_vocab_size "
    "num_target_layers num_depths down_sample_ratio down_sample_ratio_min parallel_draft_heads_num_layers "
    "method num_lookahead_tokens num_speculative_tokens"
)
"""Fields of drafters that tensors show, or that nothing reads."""
_MULTIPLIERS = re.compile(r"(.*_)?(scale|scaling|multiplier|factor)(_.*)?")
_NEUTRAL = {"num_nextn_predict_layers": (0,), "rope_is_neox_style": (True,), "is_neox_style": (True,)}


@dataclass(frozen=True)
class FieldTable:
    """What may stand in the config.json of a layout, by level: the dotted path of an object, `""` for the top."""

    layout: str  # its name, for messages
    read: Mapping[str, Collection[str]]
    known: Mapping[str, Collection[str]] = field(default_factory=dict)  # change nothing, beside `CHANGES_NOTHING`
    only: Mapping[str, tuple[object, ...]] = field(default_factory=dict)  # by name, values at which it changes nothing

    def with_copies(self, is_scaled: bool) -> FieldTable:
        """Return the table of DeepSpec's, with fields of its target; those of its rope only where its own is plain."""
        of_rope = names("") if is_scaled else ROPE_OF_TARGET
        top = COPIED_FROM_TARGET - ROPE_OF_TARGET | of_rope
        known = {"": top.union(self.known.get("", ()))} | dict.fromkeys(ROPE_LEVELS, of_rope)
        return replace(self, layout="deepspec", known={**self.known, **known})

    def unread(self, raw: Raw, level: str = "") -> Iterator[tuple[str, object]]:
        """Yield the dotted paths and values of fields that are neither read nor known to change nothing."""
        levels, known = {*self.read, *self.known}, [*CHANGES_NOTHING, *self.known.get(level, ())]
        for name, value in raw.items():
            path = f"{level}.{name}" if level else name
            if path in levels and isinstance(value, dict):
                yield from self.unread(value, path)
            elif name in self.read.get(level, ()) or any(fnmatchcase(name, each) for each in known):
                continue
            elif (allowed := (_NEUTRAL | dict(self.only)).get(name)) is None:
                if not is_neutral(name, value):
                    yield path, value
            elif not any(is_same(value, each) for each in (None, *allowed)):
                yield path, value


def speculators_table(
    own: Collection[str],
    layers: Collection[str] = LAYERS,
    only: Mapping[str, tuple[object, ...]] = MappingProxyType({}),
) -> FieldTable:
    """Return the fields of a drafter of speculators: its own, and those of its layers."""
    layer, engine = "transformer_layer_config", "speculators_config"
    read = {"": {"speculators_model_type", *own}, layer: layers, engine: names("proposal_methods verifier")}
    known = {"": names("speculators_version ignore_keys"), layer: INFORMATION}
    known[engine] = names("algorithm default_proposal_method")
    nested = {f"{layer}.{level}": fields for level, fields in ROPE_LEVELS.items()}
    return FieldTable("speculators", read | nested, known, only)


def is_neutral(name: str, value: object) -> bool:
    """Return whether a field says nothing: null, a switch that is off, a multiplier of 1, an empty list or object."""
    is_nothing = value is None or value is False or value == [] or value == {}
    return is_nothing or (is_same(value, 1) and _MULTIPLIERS.fullmatch(name) is not None)


def is_same(value: object, other: object) -> bool:
    """Return whether two values of a config are equal; True is not 1, and False is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def refuse_unread(
    owner: object, raw: Raw, table: FieldTable, ignored: Sequence[str] = (), source: str = "config.json"
) -> None:
    """Refuse a foreign config with a field that is neither read nor known to change nothing.

    `ignored` (`ignore_fields`) are last names of fields that are passed over (`"x"` is `dflash_config.x`, too).
    """
    ignored = [ignored] if isinstance(ignored, str) else ignored
    if read := [name for name in ignored if any(name in names for names in table.read.values())]:
        raise ValueError(f"ignore_fields={list(ignored)}: the layout {table.layout!r} reads {', '.join(read)}")
    found = {path: value for path, value in table.unread(raw) if path.rpartition(".")[2] not in ignored}
    if found:
        last = list(dict.fromkeys(path.rpartition(".")[2] for path in found))
        stated = ", ".join(f"{path}={str(value):.80}" for path, value in found.items())
        unread = f"{source} says {stated}, which is not read from the layout {table.layout!r}"
        raise ValueError(f"{owner}: {unread}; where it does not change the drafter, ignore_fields={last}")


def stated(raw: Raw, path: str) -> Any:
    """Return the field at a dotted path; None where there is none."""
    value: object = raw
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def agreed(owner: object, raw: Raw, *paths: str, meanings: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """Return what the fields at several dotted paths say, which are names of one thing; null and empty say nothing.

    `meanings` tells, by path or last name, what makes a field's value that of the first field.
    """
    found: dict[str, object] = {}
    for path in paths:
        value, known = stated(raw, path), meanings or {}
        if value is None or value == [] or value == {}:
            continue
        meaning = known.get(path) or known.get(path.rpartition(".")[2], lambda same: same)
        try:
            value = meaning(value)
        except (TypeError, ValueError):
            raise ValueError(f"{owner}: config.json has {path}={value!r}, which has no meaning") from None
        found |= {} if value is None else {path: value}
    first = next(iter(found), "")
    for path, value in found.items():
        if not is_same(value, found[first]):
            said = f"{first}={stated(raw, first)!r} and {path}={stated(raw, path)!r}"
            raise ValueError(f"{owner}: config.json says {said}, names of one thing that must agree")
    return found.get(first)


def settled(owner: object, name: str, said: object, shown: object) -> Any:
    """Return what a config says, or else what the tensors show, and refuse a contradiction; null says nothing."""
    if said is not None and shown is not None and not is_same(said, shown):
        raise ValueError(f"{owner}: config.json says {name}={said!r}, and the tensors show {shown!r}")
    return shown if said is None else said
