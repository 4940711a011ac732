"""The networks. Nothing here knows how drafts are judged; each model class mixes that in, in one line."""

from .assistant import MTPHeads
from .deepseek_mtp import DeepSeekMTP
from .eva_cache import EvaByteCache
from .evabyte import EvaByteModel
from .evabyte_mtpc import EvaByteForMTPC
from .evabyte_tokenizer import EvaByteTokenizer
from .ptp import PTPForCausalLM

__all__ = [
    "DeepSeekMTP",
    "EvaByteCache",
    "EvaByteForMTPC",
    "EvaByteModel",
    "EvaByteTokenizer",
    "MTPHeads",
    "PTPForCausalLM",
]
