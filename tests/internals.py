"""The one place where tests import names that are not public, so that moving them changes one file.

Names are looked up when they are first asked for: a test pays for the modules that it uses.
"""

import importlib
from typing import Any

_MODULES = {
    "bundle_module": "tokenahead.model_cards.bundle",
    "card_module": "tokenahead.model_cards.card",
    "cli_module": "tokenahead.training.cli",
    "commands_analyze": "tokenahead.training.commands.analyze",
    "commands_evaluate": "tokenahead.training.commands.evaluate",
    "commands_run_directory": "tokenahead.training.commands.run_directory",
    "completion_module": "tokenahead.training.completion",
    "deepseek_readout": "tokenahead.modeling.deepseek.modules",
    "deepseek_retrofit": "tokenahead.modeling.deepseek.retrofit",
    "demo_figures": "tokenahead.training.commands.figures",
    "demo_report": "tokenahead.training.demo",
    "demo_run": "tokenahead.training.demo",
    "drafters_modules": "tokenahead.generation.drafters.modules",
    "drafters_protocol": "tokenahead.generation.call.options",
    "eagle_losses": "tokenahead.modeling.eagle.losses",
    "eagle_retrofit": "tokenahead.modeling.eagle.conversion",
    "evaluation_decoding": "tokenahead.training.evaluation.decoding",
    "export_module": "tokenahead.model_cards.export",
    "features_module": "tokenahead.training.features",
    "growth_module": "tokenahead.generation.trees.growth",
    "heads_chunks": "tokenahead.modeling.heads.chunks",
    "heads_losses": "tokenahead.modeling.heads.losses",
    "layer_module": "tokenahead.modeling.heads.layer",
    "generate_module": "tokenahead.generation.generate",
    "mixins_module": "tokenahead.generation.generate",
    "options_module": "tokenahead.generation.call.options",
    "parallel_drafter_module": "tokenahead.generation.parallel",
    "ptp_completions": "tokenahead.training.ptp.completions",
    "schedule_module": "tokenahead.generation.call.schedule",
    "trainer_base": "tokenahead.training.trainer_base",
    "tree_verification_module": "tokenahead.generation.verification.drawn_trees",
    "trees_module": "tokenahead.generation.trees.building",
    "verification_module": "tokenahead.generation.verification.chains",
    "vllm_proposer_module": "tokenahead.model_cards.vllm_proposer",
}
"""Whole modules, for tests that replace a name in them."""

_NAMES = {
    "tokenahead.configuration.transformers_names": (
        "CORE",
        "TESTED_VERSIONS",
        "TRAINER",
        "check_names",
        "missing_names",
    ),
    "tokenahead.configuration.head_families": (
        "HEAD_FAMILIES",
        "HeadFamilyFacts",
    ),
    "tokenahead.configuration.heads": ("HEAD_TYPES",),
    "tokenahead.configuration.mtp_families": (
        "MTPFamily",
        "REFUSED",
        "RETROFIT",
        "family_of",
        "mtp_families_FAMILIES",
        "num_layers",
        "set_modules",
    ),
    "tokenahead.configuration.fields": ("rotary_border",),
    "tokenahead.generation.attach": ("AttachableDrafter",),
    "tokenahead.generation.call.options": (
        "CallOptions",
        "DraftOptions",
    ),
    "tokenahead.generation.call.outputs": ("Records",),
    "tokenahead.generation.call.processing": ("Processing",),
    "tokenahead.generation.call.schedule": ("AdaptiveSchedule",),
    "tokenahead.generation.call.sequences": (
        "NewTokens",
        "Sequences",
        "Stopping",
    ),
    "tokenahead.generation.drafters.assistant": ("AssistantSession",),
    "tokenahead.generation.drafters.eagle": ("EagleSession",),
    "tokenahead.generation.drafters.heads": (
        "AttendingHeadSession",
        "HeadSession",
        "WindowGrowth",
    ),
    "tokenahead.generation.drafters.modules": ("ModuleGrowth",),
    "tokenahead.generation.drafters.ngram": ("NgramSession",),
    "tokenahead.generation.drafters.parallel_assistant": ("ParallelAssistant",),
    "tokenahead.generation.drafters.slots": (
        "SlotLayout",
        "split_budget",
    ),
    "tokenahead.generation.drafters.vocabulary": ("SharedVocabulary",),
    "tokenahead.generation.loop": ("SpeculativeLoop",),
    "tokenahead.generation.target.cache": (
        "compact",
        "shift_cache",
    ),
    "tokenahead.generation.target.inputs": (
        "dense_mask",
        "tree_mask",
    ),
    "tokenahead.generation.target.replay": ("Replay",),
    "tokenahead.generation.target.target": (
        "RepackedTarget",
        "TargetOutput",
        "is_recurrent",
    ),
    "tokenahead.generation.trees.building": (
        "choices_from_accuracies",
        "drawn_tree",
        "dynamic_tree",
        "ranked_tree",
        "static_tree",
    ),
    "tokenahead.generation.trees.choice": (
        "CycleSeconds",
        "Trial",
        "WatchedVerifier",
        "best_tree",
        "expected_tokens",
        "measured_tree",
        "rates_of",
    ),
    "tokenahead.generation.trees.contract": (
        "DraftTree",
        "VerificationResult",
        "follow",
        "path_columns",
    ),
    "tokenahead.generation.trees.growth": ("tree_options",),
    "tokenahead.generation.verification.chains": (
        "block_acceptance",
        "token_acceptance",
        "verify",
        "verify_greedy",
        "verify_sampled",
        "verify_tree",
        "verify_tree_greedy",
    ),
    "tokenahead.generation.verification.drawn_trees": (
        "kept_path",
        "tree_acceptance",
    ),
    "tokenahead.generation.verification.verifiers": (
        "SampledVerifier",
        "Uniforms",
        "seed_streams",
    ),
    "tokenahead.model_cards.bundle": ("bundle",),
    "tokenahead.model_cards.command": (
        "CardRequest",
        "make_card",
        "read_prompts",
    ),
    "tokenahead.model_cards.card": ("card_metadata",),
    "tokenahead.model_cards.export": ("export",),
    "tokenahead.model_cards.facts": ("describe",),
    "tokenahead.model_cards.vllm_proposer": (
        "HeadProposer",
        "listen",
    ),
    "tokenahead.modeling.deepseek.checkpoint_files": ("dequantize", "tensor_dtypes"),
    "tokenahead.modeling.deepseek.conversion": ("main_class",),
    "tokenahead.modeling.deepseek.draft_vocabulary": (
        "DraftVocabulary",
        "frequent_tokens",
    ),
    "tokenahead.modeling.deepseek.losses": (
        "chain_loss",
        "teacher_forced",
    ),
    "tokenahead.modeling.deepseek.modules": ("Readout",),
    "tokenahead.modeling.evabyte.geometry": ("Rows",),
    "tokenahead.modeling.evabyte.tokenizer": (
        "CHAT_TEMPLATE",
        "SPECIAL_TOKENS",
    ),
    "tokenahead.modeling.loss_options": ("EagleLossOptions", "ModuleLossOptions", "TrainableDrafter"),
    "tokenahead.modeling.gemma4": ("buildable",),
    "tokenahead.modeling.heads.backbone_parts": ("BackboneParts",),
    "tokenahead.modeling.heads.circuit_head": (
        "CircuitHead",
        "circuit_from_logits",
    ),
    "tokenahead.modeling.heads.teacher": (
        "DIVERGENCES",
        "acceptance",
        "divergence",
        "head_and_rest",
        "log_acceptance",
        "lumped",
    ),
    "tokenahead.modeling.heads.family": (
        "HeadFamily",
        "heads_FAMILIES",
        "register",
    ),
    "tokenahead.modeling.heads.ff": (
        "FFHead",
        "factorised_distribution",
    ),
    "tokenahead.modeling.heads.joint": ("JointMTPModel",),
    "tokenahead.modeling.heads.losses": (
        "IGNORE",
        "counts_of_update",
        "depth_means",
        "depth_targets",
        "depth_weights",
        "discounted_mtp_loss",
        "head_loss",
        "tokens_ahead",
        "window_targets",
    ),
    "tokenahead.modeling.heads.registry": (
        "build_head",
        "init_head",
        "window_distribution",
    ),
    "tokenahead.modeling.heads.tree_circuit": ("balanced",),
    "tokenahead.modeling.heads.window_distribution": (
        "FactorisedDistribution",
        "SequentialDistribution",
        "logsumexp",
    ),
    "tokenahead.modeling.indices": ("selected_positions",),
    "tokenahead.modeling.uniforms": (
        "best_of",
        "place",
        "beta_shares",
        "uniform_features",
    ),
    "tokenahead.modeling.ptp.gated_lora": (
        "ADAPTER",
        "gate_linears",
        "Gate",
        "opened",
    ),
    "tokenahead.modeling.ptp.inputs": (
        "packed_mask",
        "packed_positions",
        "stepwise_mask",
        "token_mask",
        "token_positions",
    ),
    "tokenahead.modeling.ptp.registers": (
        "REGISTER",
        "RegisterModel",
    ),
    "tokenahead.modeling.remote_code": (
        "TRANSFORMERS",
        "TravellingMixin",
        "whole_folder",
    ),
    "tokenahead.modeling.sampling": (
        "philox",
        "stream_uniforms",
        "draw",
        "interval",
        "pick",
        "picked",
        "race_order",
        "raced",
    ),
    "tokenahead.training.analysis": (
        "layer_divergences",
        "marginal_log_probs",
        "next_token_spread",
    ),
    "tokenahead.training.box": (
        "BoxDamagedError",
        "EXCERPT",
        "Excerpt",
        "box_folder",
        "check_box",
        "code_prompts",
        "excerpt_prompts",
        "excerpt_windows",
        "load_box",
        "load_excerpts",
        "load_heads",
        "Box",
        "BoxMeasurement",
    ),
    "tokenahead.training.byte_text": (
        "RawWriter",
        "TerminalWriter",
        "decode",
        "encode",
        "escaped",
        "writer_for",
    ),
    "tokenahead.training.commands.figures": (
        "analysis_figure",
        "evaluation_figure",
        "learning_figure",
    ),
    "tokenahead.training.commands.models": (
        "build",
        "ptp_options",
    ),
    "tokenahead.training.commands.run_directory": ("write_run",),
    "tokenahead.training.commands.settings": (
        "AnalysisArguments",
        "EvaluationArguments",
        "_KINDS",
        "read_settings",
    ),
    "tokenahead.training.commands.train": ("commands_train",),
    "tokenahead.training.completion": (
        "Request",
        "complete",
    ),
    "tokenahead.training.demo": (
        "MARK",
        "check_output",
        "run_demo",
    ),
    "tokenahead.training.evaluation": ("MODES",),
    "tokenahead.training.evaluation.decoding": (
        "GREEDY",
        "Comparison",
        "Completion",
        "Measurement",
        "acceptance_by_position",
        "compare_decoding",
        "drafted_flags",
        "repeated_share",
        "sampled",
    ),
    "tokenahead.training.evaluation.drafts": (
        "DraftMeasures",
        "rank_accuracies",
        "drafted_probs",
        "text_of",
    ),
    "tokenahead.training.evaluation.expected": ("ExpectedCalls", "acceptance_along", "ratio_of_sums"),
    "tokenahead.training.evaluation.reports": (
        "HeadReport",
        "read_reports",
    ),
    "tokenahead.training.utils": ("needs_extra",),
    "tokenahead.training.features": (
        "FeatureDataset",
        "FeatureIndex",
    ),
    "tokenahead.training.checkpoints": ("last_whole_checkpoint", "put_adapters"),
    "tokenahead.training.trainer_base": ("drafter_of",),
    "tokenahead.training.ptp.completions": (
        "CompletionSequences",
        "at_columns",
        "draw_starts",
    ),
    "tokenahead.training.ptp.losses": (
        "MaskReader",
        "ptp_LOSSES",
        "slot_losses",
        "slot_weights",
        "target_probs",
        "SEQUENCES",
    ),
    "tokenahead.training.ptp.mutor": ("Registers",),
    "tokenahead.training.ptp.forwards": (
        "PackedRows",
        "SlotInputs",
        "Teacher",
        "student_drafts",
    ),
    "tokenahead.training.regeneration": ("RegeneratedText",),
}
"""Internal names, by the module that defines them."""

_RENAMED = {
    "CompletionSequences": "Sequences",
    "commands_train": "train",
    "heads_FAMILIES": "FAMILIES",
    "mtp_families_FAMILIES": "FAMILIES",
    "ptp_LOSSES": "LOSSES",
}
"""Names that several modules use, and what they are called at home."""

_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"tests.internals has no name {name!r}: add it beside the module that defines it")
    return getattr(importlib.import_module(_HOMES[name]), _RENAMED.get(name, name))
