"""The text of one call of `generate` and what is said of it: what the loop fills, streams, and returns in the end."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..configuration.cache_names import CACHE
from ..configuration.fields import learned_positions
from .backbone.target import Target
from .call.outputs import GenerateSpeculativeOutput, Speculation
from .call.records import Records
from .call.sequences import NewTokens, Sequences
from .call.stopping import Stopping
from .contract import DraftTree, TargetOutput
from .plan import SpeculationPlan
from .tensors.wrapped_models import untyped
from .verification.cycles import Cycle


class Results:
    """The sequences of one call, and where they end.

    Args:
        plan: Complete (`SpeculationPlan.complete`).
        target: With the prompt in its cache.

    Attributes:
        tokens: The sequences.
        done: Which of them have ended.
        statistics: What is returned of them.
    """

    def __init__(self, plan: SpeculationPlan, target: Target) -> None:
        prompt, config = plan.prompt, plan.config
        self.plan, self.target, self.session, self.config = plan, target, plan.session, config
        self.streamer, self.pad = plan.streamer, plan.draft_options.pad
        self.tokens, self.streamed, self.done = Sequences(prompt), prompt.shape[1], [False] * len(prompt)
        is_recorded = config.output_scores or config.output_logits or config.output_hidden_states
        self.records = Records(config, len(prompt)) if config.return_dict_in_generate and is_recorded else None
        self.stopping = Stopping(plan.criteria, self.pad, self.records and self.records.scores_of)
        self.statistics = Speculation([[] for _ in prompt], [[] for _ in prompt], rows_depths=[[] for _ in prompt])
        self.statistics.backbone_calls = 1
        # columns of the cache without ids: embeddings, or an earlier call's
        self.unwritten = target.mask.shape[1] - prompt.shape[1] if target.has_columns else 0
        self.table = learned_positions(plan.call.backbone.config.get_text_config())
        self.starts = target.next_positions() if self.table is not None and target.has_columns else None
        most = self.stopping.tokens_left(prompt.shape[1])
        leaves_table = self.starts is not None and self.table is not None and max(self.starts) + most > self.table
        self.stopping.holds = (plan.returns_cache and not target.takes_cuts) or leaves_table

    def positions_left(self) -> int:
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

    def tokens_left(self) -> int:
        """Return how many tokens the length limit leaves for the shortest open sequence."""
        return self.stopping.most_left(self.tokens.lengths, self.done)

    def take(self, cycle: Cycle, accepted: list[int], is_prefill: bool = False) -> NewTokens:
        """Add verified tokens to the sequences, records and statistics, and return them, cut where sequences end.

        Args:
            cycle: What the host has read.
            accepted: Accepted drafts per sequence; -1: it gets not even a token.
            is_prefill: The token after the prompt.
        """
        verified = [ids[: count + 1] for ids, count in zip(cycle.new, accepted)]
        before = self.done
        if self.records is not None:
            counts = [0 if done else count + 1 for count, done in zip(accepted, before)]
            path = cycle.result, cycle.tree
            scores = TargetOutput(cycle.scores).along(*path).logits
            self.records.add(cycle.outputs.along(*path), scores, counts, is_prefill)
        counts, self.done = self.stopping.cut(self.tokens, verified, before)
        self.tokens.done = self.done
        new_tokens = NewTokens(counts, self.tokens.ids.device)
        if self.records is not None:
            self.records.cut([n + count for n, count in zip(self.tokens.num_new, counts)])
        if not is_prefill:
            asked = [-1 if old else count for count, old in zip(accepted, before)]
            self.statistics.count(asked, counts, self.done, cycle.drafts, cycle.tree.depth)
        self.tokens.keep(new_tokens)
        self.tokens.newest_on_host = [ids[:count] for ids, count in zip(verified, counts)]
        self.tokens.drafted_on_host = [len(draft) for draft in cycle.drafts]
        if self.streamer is not None:
            self._stream(self.streamer)
        return new_tokens

    def _stream(self, streamer: BaseStreamer) -> None:
        lengths, ends = self.tokens.lengths, None
        ready = min((n for n, done in zip(lengths, self.done) if not done), default=max(lengths))
        if self.stopping.in_step:
            ready, ends = self.stopping.shown, self.stopping.ends
        # one column at a time: text streamers are exact only so
        for column in self.tokens.columns(self.streamed, ready, self.pad, ends).cpu().unbind(1):
            streamer.put(column)
        self.streamed = max(self.streamed, ready)

    def finished(self) -> GenerateSpeculativeOutput | Tensor:
        """Tell all who want to know that every sequence has ended, and return the output."""
        if self.streamer is not None:
            self.streamer.end()
        output = self._output()
        self.session.finish(self.statistics)
        return output

    def _output(self) -> GenerateSpeculativeOutput | Tensor:
        decoded = self.tokens.lengths
        if self.stopping.in_step:
            self._drop_what_ran_ahead(self.stopping.ends)
        self.statistics.new_tokens = sum(self.tokens.num_new)
        sequences = self.tokens.columns(0, max(self.tokens.lengths), self.pad)  # [B, L + new]
        if self.plan.returns_cache:  # it may cost a forward
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
            self.positions_left()
            self.target.forward(self.tokens.last()[:, None], DraftTree.chain(self.tokens.ids[:, :0]), None)
            self.target.keep(NewTokens([int(row) for row in early], self.tokens.ids.device))
        self.target.align(longest - 1 + self.unwritten)
