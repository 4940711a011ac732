"""Lossless multi-token prediction for Hugging Face transformers.

Importing this package registers its own model types with transformers' Auto classes.
"""

__version__ = "0.1.0"

from pathlib import Path

_ROOT = Path(__file__).resolve().parent
if not (_ROOT / "modeling").is_dir() and (_ROOT.parent / "modeling").is_dir():
    # In a clone without symbolic links the five links beside this file are plain files: look beside them, too.
    __path__.append(str(_ROOT.parent))

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from .configuration import EvaByteConfig, MTPHeadConfig, PTPConfig
from .generation import GenerateSpeculativeOutput, Speculation
from .modeling import (
    DeepSeekMTP,
    EvaByteCache,
    EvaByteForMTPC,
    EvaByteModel,
    EvaByteTokenizer,
    MTPHeads,
    PTPForCausalLM,
)

AutoConfig.register(EvaByteConfig.model_type, EvaByteConfig)
AutoConfig.register(MTPHeadConfig.model_type, MTPHeadConfig)
AutoConfig.register(PTPConfig.model_type, PTPConfig)
AutoModel.register(EvaByteConfig, EvaByteModel)
AutoModel.register(MTPHeadConfig, MTPHeads)
AutoModelForCausalLM.register(EvaByteConfig, EvaByteForMTPC)
AutoModelForCausalLM.register(PTPConfig, PTPForCausalLM)
AutoTokenizer.register(EvaByteConfig, slow_tokenizer_class=EvaByteTokenizer)

__all__ = [
    "DeepSeekMTP",
    "EvaByteCache",
    "EvaByteConfig",
    "EvaByteForMTPC",
    "EvaByteModel",
    "EvaByteTokenizer",
    "GenerateSpeculativeOutput",
    "MTPHeadConfig",
    "MTPHeads",
    "PTPConfig",
    "PTPForCausalLM",
    "Speculation",
]
