"""Any chain drafter as a transformers `CandidateGenerator`: lossless in transformers' own assisted loop (batch 1)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import CandidateGenerator
from transformers.modeling_outputs import CausalLMOutputWithPast

from .backbone.wrapped_models import Kwargs
from .call.options import CallOptions, DraftOptions
from .call.sequences import NewTokens, Sequences
from .contract import CacheView, DraftSession, TargetOutput, VerificationResult, requested_states
from .drafter import BaseDrafter


class _View(CacheView):
    """The session's view of the cache of transformers' own loop, whose one sequence never moves."""

    has_columns = True
    mask: Tensor
    counts: Tensor
    is_padded: bool
    new_tokens: NewTokens


class CandidateAdapter(CandidateGenerator):
    """Hands the chains of a session to transformers' assisted loop; drafts that come from no numbers end its work."""

    requires_model_outputs = True

    def __init__(
        self,
        session: DraftSession,
        options: DraftOptions,
        mask: Tensor | None = None,
        drafter: BaseDrafter | None = None,
    ) -> None:
        self.session, self.options, self.mask, self.drafter = session, options, mask, drafter
        self.is_left_out = False
        self.drafted = -1  # the prefill drafts nothing
        self.view = _View()
        wanted = session.hidden_layers
        self.model_kwargs_overrides = {} if wanted is None else {"output_hidden_states": requested_states(wanted)}

    def get_candidates(
        self,
        input_ids: Tensor,
        model_outputs: CausalLMOutputWithPast | None = None,
        is_first_iteration: bool = True,
        n_last_matches: int = 0,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Return candidate ids [1, L + m] and log q [1, m, v] (None where the draft is deterministic or empty).

        The last of the ids [1, L] is the token that the last verification added, after `n_last_matches` drafts.
        """
        if is_first_iteration or self.is_left_out:
            return input_ids, None
        outputs = cast(CausalLMOutputWithPast, model_outputs)
        self._take(input_ids, outputs, n_last_matches)
        length = min(self.session.num_tokens, self.options.max_length - input_ids.shape[1] - 1)
        tree = self.session.propose(Sequences(input_ids), max(length, 0))
        draft, q = tree.tokens, tree.probs
        numbers = self.options.numbers.taken(input_ids.device)
        if numbers is not None and not bool((numbers < torch.inf).all()):
            self.is_left_out = True
            if self.drafter is not None:
                self.drafter.warn_of_numbers()
            # drawn tokens before such a number are verified: dropped for what was drawn, they would come too seldom
            are_drawn = [] if q is None else [bool(row) for row in q[0].isfinite().all(-1)]
            draft = draft[:, : [*are_drawn, False].index(False)]
            q = None if q is None else q[:, : draft.shape[1]]
        self.drafted = draft.shape[1]
        self.block = torch.cat([input_ids[:, -1:], draft], dim=1)  # [1, m + 1]
        if self.drafted == 0:
            return input_ids, None
        if q is None and self.options.do_sample:  # transformers takes candidates without distributions as greedy ones
            q = torch.nn.functional.one_hot(draft, cast(Tensor, outputs.logits).shape[-1]).float()
        return torch.cat([input_ids, draft], dim=1), None if q is None else q.log()

    def _take(self, input_ids: Tensor, outputs: CausalLMOutputWithPast, matches: int) -> None:
        """Pass the outputs of the last forward to the session, as our own loop would."""
        length, device = input_ids.shape[1] - 1, input_ids.device  # the last token is not in the cache yet
        mask = torch.ones(1, length, dtype=torch.bool, device=device)
        if self.mask is not None:
            mask[:, : self.mask.shape[1]] = self.mask[:, :length].bool()
        self.view.mask, self.view.counts, self.view.is_padded = mask, mask.sum(1), self.mask is not None
        self.view.new_tokens = NewTokens([matches + 1], device)
        if self.drafted < 0:
            self.session.begin(outputs, self.view)
            return
        tokens = input_ids[:, -(matches + 1) :]
        padded = torch.nn.functional.pad(tokens, (0, self.drafted - matches))
        accepted = torch.full((1,), matches, device=device)
        logits = cast(Tensor, outputs.logits)
        taken = TargetOutput(logits, outputs.hidden_states, block=(self.block, logits))
        self.session.advance(taken, VerificationResult(accepted, padded))


def candidate_generator(
    drafter: BaseDrafter,
    backbone: PreTrainedModel,
    config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: Kwargs,
    input_ids: Tensor,
) -> CandidateAdapter:
    """Return a drafter's chains for transformers' own assisted loop (batch 1), which feeds no slots."""
    number, longest = drafter.default_draft(), drafter.longest_draft()
    number = min(config.num_assistant_tokens or number, number if longest is None else longest)
    options = CallOptions(num_assistant_tokens=number, speculates=True).cut(backbone, input_ids, config.max_length)
    made = DraftOptions.of_call(options, backbone, config, processors, input_ids)
    session = drafter.start(made)
    if session.lookahead:
        name = type(drafter).__name__
        raise ValueError(f"{name} drafts in slots, which transformers' own loop does not feed: pass assistant_model=")
    return CandidateAdapter(session, made, model_kwargs.get("attention_mask"), drafter)
