"""The public names with which third parties write drafters, head families and tree policies.

A drafter is a class that inherits from `AttachableDrafter` and returns a `DraftSession` from `start`; the session
proposes a `DraftTree` in every cycle. `docs/extending.md` has examples, which are run as tests. What is not named here
may move. The contract of `SpeculativeCache` is provisional.
"""

from .configuration.head_families import HeadFamilyFacts as HeadFamilyFacts
from .generation.attach import AttachableDrafter as AttachableDrafter
from .generation.attach import MTPGenerationMixin as MTPGenerationMixin
from .generation.call.automata import AutomatonProcessor as AutomatonProcessor
from .generation.call.automata import OffersAutomaton as OffersAutomaton
from .generation.call.automata import TableAutomaton as TableAutomaton
from .generation.call.constraints import DraftMasks as DraftMasks
from .generation.call.constraints import OffersMask as OffersMask
from .generation.call.options import CallOptions as CallOptions
from .generation.call.options import DraftOptions as DraftOptions
from .generation.call.options import draft_probs as draft_probs
from .generation.call.sequences import NewTokens as NewTokens
from .generation.call.sequences import Sequences as Sequences
from .generation.candidates import CandidateAdapter as CandidateAdapter
from .generation.candidates import candidate_generator as candidate_generator
from .generation.contract import CacheView as CacheView
from .generation.contract import DraftSession as DraftSession
from .generation.contract import DraftTree as DraftTree
from .generation.contract import SpeculativeCache as SpeculativeCache
from .generation.contract import TargetOutput as TargetOutput
from .generation.contract import VerificationResult as VerificationResult
from .generation.drafter import BaseDrafter as BaseDrafter
from .generation.trees import drawn_tree as drawn_tree
from .generation.trees import dynamic_tree as dynamic_tree
from .generation.trees import static_tree as static_tree
from .generation.trees.growth import Ancestry as Ancestry
from .generation.trees.growth import Growth as Growth
from .generation.trees.growth import grow as grow
from .generation.verification.verifiers import CoupledVerifier as CoupledVerifier
from .generation.verification.verifiers import GreedyVerifier as GreedyVerifier
from .generation.verification.verifiers import SampledVerifier as SampledVerifier
from .generation.verification.verifiers import Verifier as Verifier
from .modeling.common.outputs import TrainableDrafter as TrainableDrafter
from .modeling.heads.circuit_head import factorised_distribution as factorised_distribution
from .modeling.heads.family import HeadFamily as HeadFamily
from .modeling.heads.family import register as _register
from .modeling.heads.window_distribution import WindowDistribution as WindowDistribution

register_head_family = _register
