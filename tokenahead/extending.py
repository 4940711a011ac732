"""The public names with which third parties write drafters, head families and tree policies.

A drafter is a class that inherits from `AttachableDrafter` and returns a `DraftSession` from `start`; the session
proposes a `DraftTree` in every cycle. `docs/extending.md` has examples, which are run as tests. What is not named here
may move. The contract of `SpeculativeCache` is provisional.
"""

from .configuration.head_families import HeadFamilyFacts
from .generation.attach import AttachableDrafter, MTPGenerationMixin
from .generation.call.automata import AutomatonProcessor, OffersAutomaton, TableAutomaton
from .generation.call.constraints import DraftMasks, OffersMask
from .generation.call.options import CallOptions, DraftOptions, draft_probs
from .generation.call.sequences import NewTokens, Sequences
from .generation.candidates import CandidateAdapter, candidate_generator
from .generation.contract import CacheView, DraftSession, DraftTree, SpeculativeCache, TargetOutput, VerificationResult
from .generation.drafter import BaseDrafter
from .generation.trees import drawn_tree, dynamic_tree, static_tree
from .generation.trees.growth import Ancestry, Growth, grow
from .generation.verification.verifiers import CoupledVerifier, GreedyVerifier, SampledVerifier, Verifier
from .modeling.common.outputs import TrainableDrafter
from .modeling.heads.circuit_head import factorised_distribution
from .modeling.heads.family import HeadFamily
from .modeling.heads.family import register as register_head_family
from .modeling.heads.window_distribution import WindowDistribution

__all__ = [
    "Ancestry",
    "AttachableDrafter",
    "AutomatonProcessor",
    "BaseDrafter",
    "CacheView",
    "CallOptions",
    "CandidateAdapter",
    "CoupledVerifier",
    "DraftMasks",
    "DraftOptions",
    "DraftSession",
    "DraftTree",
    "GreedyVerifier",
    "Growth",
    "HeadFamily",
    "HeadFamilyFacts",
    "MTPGenerationMixin",
    "NewTokens",
    "OffersAutomaton",
    "OffersMask",
    "SampledVerifier",
    "Sequences",
    "SpeculativeCache",
    "TableAutomaton",
    "TargetOutput",
    "TrainableDrafter",
    "VerificationResult",
    "Verifier",
    "WindowDistribution",
    "candidate_generator",
    "draft_probs",
    "drawn_tree",
    "dynamic_tree",
    "factorised_distribution",
    "grow",
    "register_head_family",
    "static_tree",
]
