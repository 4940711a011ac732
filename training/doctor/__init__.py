"""Why a drafter accepts little: what its files say, what it drafts along known texts, and what else would fit."""

from .report import diagnose as diagnose
from .report import diagnose_source as diagnose_source
