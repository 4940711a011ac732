"""Why a drafter accepts little: what its files say, what it drafts along known texts, and what else would fit."""

from .diagnosis import diagnose as diagnose
from .diagnosis import diagnose_source as diagnose_source
from .findings import Accepted as Accepted
from .findings import Diagnosis as Diagnosis
from .findings import Finding as Finding
