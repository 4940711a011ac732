"""The networks. How drafts are verified is mixed in by each model class, in one line."""

from .deepseek.model import DeepSeekMTP
from .eagle.model import EagleHead
from .evabyte.backbone import EvaByteModel
from .evabyte.cache import EvaByteCache
from .evabyte.model import EvaByteForMTPC
from .evabyte.tokenizer import EvaByteTokenizer
from .heads.attached import MTPHeads
from .ptp.model import PTPForCausalLM
from .ptp.student import PTPStudent

__all__ = [
    "DeepSeekMTP",
    "EagleHead",
    "EvaByteCache",
    "EvaByteForMTPC",
    "EvaByteModel",
    "EvaByteTokenizer",
    "MTPHeads",
    "PTPForCausalLM",
    "PTPStudent",
]
