"""A conformance kit for decoding functions: whether a loop with drafts keeps the text of its model.

>>> from tokenahead.testing import verify
>>> for found in verify(my_decoding_function):  # (model, input_ids, **options of generate) -> sequences
...     print(found.check, found.result, found.words)
"""

from .training.conformance.kit import DECODERS as DECODERS
from .training.conformance.kit import Decoder as Decoder
from .training.conformance.kit import Verified as Verified
from .training.conformance.kit import disturbed as disturbed
from .training.conformance.kit import drafted_by as drafted_by
from .training.conformance.kit import letters as letters
from .training.conformance.kit import small_model as small_model
from .training.conformance.kit import verify as verify
from .training.conformance.kit import verify_greedy as verify_greedy
from .training.conformance.kit import verify_sampled as verify_sampled
from .training.conformance.sampled import ALARM as ALARM
from .training.conformance.sampled import chi_square as chi_square
from .training.conformance.sampled import continuation_distribution as continuation_distribution
from .training.conformance.sampled import continuation_p_value as continuation_p_value
