"""Lossless multi-token prediction for Hugging Face transformers.

Importing this package registers its own model types with transformers' Auto classes.
"""

__version__ = "0.1.0"

from functools import partial
from importlib import import_module
from pathlib import Path

_ROOT = Path(__file__).resolve().parent
if not (_ROOT / "modeling").is_dir() and (_ROOT.parent / "modeling").is_dir():
    # In a clone without symbolic links the five links beside this file are plain files: look beside them, too.
    __path__.append(str(_ROOT.parent))

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from .configuration import (
    BlockDrafterConfig,
    EagleHeadConfig,
    EvaByteConfig,
    MTPHeadConfig,
    PTPConfig,
    PTPStudentConfig,
)
from .configuration.mtp_families import MiMoConfig
from .configuration.transformers_names import warn_of_newer_version
from .generation import GenerateSpeculativeOutput, Speculation
from .generation.assistant.drafter import AssistantDrafter
from .generation.backbone.static import free_buffers
from .generation.call.grammar import GrammarConstraint
from .generation.lookups.cascade import DrafterCascade
from .generation.lookups.lookahead import LookaheadDrafter
from .generation.lookups.ngram import NgramDrafter
from .generation.lookups.recycling import RecyclingDrafter
from .generation.lookups.suffix import SuffixDrafter
from .modeling import (
    BlockDrafter,
    DeepSeekMTP,
    EagleHead,
    EvaByteCache,
    EvaByteForMTPC,
    EvaByteModel,
    EvaByteTokenizer,
    MTPHeads,
    PTPForCausalLM,
    PTPStudent,
)
from .modeling.common.remote_code import HANDED
from .modeling.deepseek.conversion import MiMoForCausalLM

warn_of_newer_version()

for _config in (BlockDrafterConfig, EagleHeadConfig, EvaByteConfig, MTPHeadConfig, PTPConfig, PTPStudentConfig):
    AutoConfig.register(_config.model_type, _config)
AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
AutoModel.register(BlockDrafterConfig, BlockDrafter)
AutoModel.register(EagleHeadConfig, EagleHead)
AutoModel.register(EvaByteConfig, EvaByteModel)
AutoModel.register(MTPHeadConfig, MTPHeads)
AutoModel.register(PTPStudentConfig, PTPStudent)
AutoModelForCausalLM.register(EvaByteConfig, EvaByteForMTPC)
AutoModelForCausalLM.register(PTPConfig, PTPForCausalLM)
AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
AutoTokenizer.register(EvaByteConfig, tokenizer_class=EvaByteTokenizer)

HANDED.update({name: partial(import_module, f".model_cards.{name}", __name__) for name in ("bundle", "card", "push")})

__all__ = [
    "AssistantDrafter",
    "BlockDrafter",
    "BlockDrafterConfig",
    "DeepSeekMTP",
    "DrafterCascade",
    "EagleHead",
    "EagleHeadConfig",
    "EvaByteCache",
    "EvaByteConfig",
    "EvaByteForMTPC",
    "EvaByteModel",
    "EvaByteTokenizer",
    "GenerateSpeculativeOutput",
    "GrammarConstraint",
    "LookaheadDrafter",
    "MTPHeadConfig",
    "MTPHeads",
    "NgramDrafter",
    "PTPConfig",
    "PTPForCausalLM",
    "PTPStudent",
    "PTPStudentConfig",
    "RecyclingDrafter",
    "Speculation",
    "SuffixDrafter",
    "free_buffers",
]
