"""What a call of `generate` streams on the way, and returns in the end."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..configuration.cache_names import CACHE
from ..configuration.fields import learned_positions
from .backbone.static import StaticBackbone
from .backbone.target import Target
from .call.outputs import GenerateSpeculativeOutput, Speculation
from .call.records import Records
from .call.sequences import NewTokens, Sequences
from .call.stopping import Stopping
from .contract import DraftTree
from .plan import SpeculationPlan
from .tensors.wrapped_models import untyped
from .verification.cycles import Cycle


class Results:
    """The sequences of one call, and what is said of them; the loop fills them.

    Args:
        plan: Complete (`SpeculationPlan.complete`).
    """

    target: Target
    ahead: Cycle | None = None
    """Launched, and not read yet; in the end nobody does."""

    def __init__(self, plan: SpeculationPlan) -> None:
        prompt, config = plan.prompt, plan.config
        self.plan, self.backbone, self.session, self.keywords = plan, plan.call.backbone, plan.session, plan.keywords
        self.config, self.streamer, self.pad = config, plan.streamer, plan.draft_options.pad
        self.returns_cache = plan.has_user_cache or config.return_dict_in_generate
        self.tokens, self.streamed = Sequences(prompt), prompt.shape[1]
        self.done = [False] * len(prompt)
        is_recorded = config.output_scores or config.output_logits or config.output_hidden_states
        self.records = Records(config, len(prompt)) if config.return_dict_in_generate and is_recorded else None
        self.stopping = Stopping(plan.criteria, self.pad, self.records and self.records.scores_of)
        self.statistics = Speculation([[] for _ in prompt], [[] for _ in prompt], rows_depths=[[] for _ in prompt])
        self.empty = DraftTree.chain(prompt[:, :0])
        self.table = learned_positions(self.backbone.config.get_text_config())
        self.starts: list[int] | None = None
        self.unwritten = 0  # columns of the cache without ids: embeddings, or an earlier call's

    def _may_leave_table(self, new_tokens: int) -> bool:
        """Return whether so many new tokens need more positions than a table has."""
        return self.starts is not None and self.table is not None and max(self.starts) + new_tokens > self.table

    def _positions_left(self) -> int:
        """Return how many positions of a table follow b in every open sequence.

        Sequences that have ended repeat the last position. Open ones never do: beyond a table there is no text, and the
        backbone raises an error of its own.
        """
        if self.starts is None or self.table is None:
            return 2**31
        left = [self.table - start - n for start, n in zip(self.starts, self.tokens.num_new)]
        fewest = min((count for count, done in zip(left, self.done) if not done), default=0)
        self.target.last_position = self.table - 1 if fewest >= 0 and any(self.done) else None
        return fewest

    def _tokens_left(self) -> int:
        """Return how many tokens the length limit leaves for the shortest open sequence."""
        open_lengths = [n for n, done in zip(self.tokens.lengths, self.done) if not done]
        return max((self.stopping.tokens_left(n) for n in open_lengths), default=1)

    def _stream(self, streamer: BaseStreamer) -> None:
        lengths, ends = self.tokens.lengths, None
        ready = min((n for n, done in zip(lengths, self.done) if not done), default=max(lengths))
        if self.stopping.in_step:
            ready, ends = self.stopping.shown, self.stopping.ends
        # one column at a time: text streamers are exact only so
        for column in self.tokens.columns(self.streamed, ready, self.pad, ends).cpu().unbind(1):
            streamer.put(column)
        self.streamed = max(self.streamed, ready)

    def _finished(self) -> GenerateSpeculativeOutput | Tensor:
        """Tell all who want to know that every sequence has ended, and return the output."""
        if self.streamer is not None:
            self.streamer.end()
        output = self._output()
        if (told := self.statistics.graphs) is not None and isinstance(self.target, StaticBackbone):
            told.buffer_bytes, told.buffers_made = self.target.buffer_use()
            if self.ahead is not None and told.replayed:
                told.replayed["cycle"] -= 1
        self.session.finish(self.statistics)
        return output

    def _output(self) -> GenerateSpeculativeOutput | Tensor:
        decoded = self.tokens.lengths
        if self.stopping.in_step:
            self._drop_what_ran_ahead(self.stopping.ends)
        self.statistics.new_tokens = sum(self.tokens.num_new)
        sequences = self.tokens.columns(0, max(self.tokens.lengths), self.pad)  # [B, L + new]
        if self.returns_cache:  # it may cost a forward
            self._align_cache(decoded)
        if not self.config.return_dict_in_generate:
            return sequences
        generated = zip(sequences[:, self.tokens.prompt_length :], self.tokens.num_new)
        self.statistics.vocabulary_coverage = self.session.coverage(torch.cat([ids[:n] for ids, n in generated]))
        scores = logits = hidden_states = None
        if self.records is not None:
            scores, logits, hidden_states = self.records.per_token(self.tokens.num_new, self.pad)
        return GenerateSpeculativeOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=scores,
            logits=logits,
            hidden_states=hidden_states,
            speculation=self.statistics,
            **untyped({CACHE: self.target.cache}),
        )

    def _drop_what_ran_ahead(self, ends: list[int]) -> None:
        """Cut sequences, records and statistics where criteria ended sequences that had run ahead."""
        self.tokens.shorten(ends)
        self.statistics.cut(self.tokens.num_new)
        if self.records is not None:
            self.records.cut(self.tokens.num_new)

    def _align_cache(self, decoded: list[int]) -> None:
        """Add the last token of sequences that ended early, so that the next call may start at the last column.

        Of sequences that had run ahead, the cache has `decoded` tokens but one, and all that are returned.
        """
        longest = max(self.tokens.lengths)
        early = [n < longest and n == before for n, before in zip(self.tokens.lengths, decoded)]
        if any(early) and self.target.supports_rollback:
            self.statistics.backbone_calls += 1
            self._positions_left()
            self.target.forward(self.tokens.last()[:, None], self.empty, None)
            self.target.keep(NewTokens([int(row) for row in early], self.tokens.ids.device))
        self.target.align(longest - 1 + self.unwritten)
