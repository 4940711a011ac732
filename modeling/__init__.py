"""The networks. How drafts are verified is mixed in by each model class, in one line."""

from .block.model import BlockDrafter as BlockDrafter
from .deepseek.model import DeepSeekMTP as DeepSeekMTP
from .eagle.model import EagleHead as EagleHead
from .evabyte.backbone import EvaByteModel as EvaByteModel
from .evabyte.cache import EvaByteCache as EvaByteCache
from .evabyte.model import EvaByteForMTPC as EvaByteForMTPC
from .evabyte.tokenizer import EvaByteTokenizer as EvaByteTokenizer
from .heads.attached import MTPHeads as MTPHeads
from .ptp.model import PTPForCausalLM as PTPForCausalLM
from .ptp.student import PTPStudent as PTPStudent
