"""Lossless multi-token prediction for Hugging Face transformers."""

__version__ = "0.1.0"

from .configuration import EvaByteConfig, MTPHeadConfig
from .modeling.evabyte_mtpc import EvaByteForMTPC
from .modeling.evabyte_tokenizer import EvaByteTokenizer

__all__ = ["EvaByteConfig", "EvaByteForMTPC", "EvaByteTokenizer", "MTPHeadConfig"]
