"""The decoding loop: draft, one backbone call, verify, accept, roll back. Each sequence accepts on its own.

    tokens     ... x y b            b: the token that the last verification added, not in the cache yet
    draft            |  d1 d2 d3                              DraftSession.propose
    inputs           b  d1 d2 d3    one backbone call         Target.forward
    scores           d1 d2 z  -     the target's choices      Processing, Verifier.verify
    new tokens       d1 d2 z        two drafts and a token    Stopping.cut
    cache      ... x y b  d1 d2     rolled back to here       Target.keep
    next                     z = b  and so on                 DraftSession.advance

The host waits for the device once in a cycle, for accepted counts, tokens, drafts, and whether all scores are numbers.
Where sequences end (at eos, at stop strings, at the length limit) goes back in one copy, and only where sequences
differ.

Where scores of an open sequence, or what its draft was chosen from, are no numbers (NaN, +inf, -inf everywhere), the
cycle is repeated on the cache as it was with b alone: a row that nobody sees is multiplied by 0, and 0 times NaN is
NaN. If b's scores are none either, the backbone is at fault, which is an error; else the drafter is left out from there
on.
"""

from __future__ import annotations

import time
from typing import cast

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.generation.streamers import BaseStreamer

from ..configuration.cache_names import CACHE, cache_of
from ..configuration.fields import learned_positions, requested_states
from .backbone.backbones import target_of
from .backbone.target import OwnCacheBackbone, RaggedBackbone, Target
from .call.outputs import GenerateSpeculativeOutput, Speculation
from .call.records import Records
from .call.sequences import NewTokens, Sequences
from .call.stopping import Stopping
from .contract import DraftTree, SpeculativeCache, TargetOutput, VerificationResult
from .plan import SpeculationPlan, decode_plainly
from .tensors.masks import to_device
from .tensors.wrapped_models import has_foreign_hooks, untyped
from .trees.growth import most_nodes
from .verification.verifiers import Cycle, GreedyVerifier


class SpeculativeLoop:
    """One call of `generate`.

    State between cycles: the tokens of every sequence, of which all but the last are in the cache, and the session's.

    Args:
        plan: Complete (`SpeculationPlan.complete`).
    """

    target: Target
    called: float

    def __init__(self, plan: SpeculationPlan) -> None:
        prompt, options, config, session = plan.prompt, plan.draft_options, plan.config, plan.session
        self.plan, self.backbone, self.verifier_model = plan, plan.call.backbone, plan.verifier_model
        self.session, self.verifier, self.schedule, self.keywords = session, plan.verifier, plan.schedule, plan.keywords
        self.config, self.model_kwargs, self.streamer = config, plan.model_kwargs, plan.streamer
        self.processing = options.processing if options.processors else None
        self.watch = self.processing.watch() if self.processing is not None and options.drafts else None
        self.is_plain, self.is_trial, self.is_left_out = False, False, False
        self.returns_cache = plan.has_user_cache or config.return_dict_in_generate
        is_read = self.returns_cache or session.reads_cache
        may_drop_finished = len(prompt) > 1 and plan.keywords is None and not (is_read or session.lookahead)
        self.may_drop_finished = may_drop_finished and not has_foreign_hooks(plan.verifier_model)
        self.hidden_layers = requested_states(bool(config.output_hidden_states) or session.hidden_layers)
        self.tokens, self.streamed = Sequences(prompt), prompt.shape[1]
        self.done = [False] * len(prompt)
        is_recorded = config.output_scores or config.output_logits or config.output_hidden_states
        self.records = Records(config, len(prompt)) if config.return_dict_in_generate and is_recorded else None
        self.stopping = Stopping(plan.criteria, options.pad, self.records and self.records.scores_of)
        self.pad = options.pad
        self.span = most_nodes(options) if options.draft_tree else 1 + options.num_tokens
        self.statistics = Speculation([[] for _ in prompt], [[] for _ in prompt], rows_depths=[[] for _ in prompt])
        self.empty = DraftTree.chain(prompt[:, :0])
        self.table = learned_positions(self.backbone.config.get_text_config())
        self.starts: list[int] | None = None
        self.unwritten = 0  # columns of the cache without ids: embeddings, or an earlier call's

    def run(self, synced_gpus: bool = False) -> GenerateSpeculativeOutput | Tensor:
        """Decode until every sequence has ended.

        Args:
            synced_gpus: Keep calling the backbone until all peers are done.

        Returns:
            The sequences [B, L + new], or a `GenerateSpeculativeOutput` where the config asks for a dict.
        """
        try:
            self._prefill()
            device = self.tokens.ids.device
            while self.backbone._has_unfinished_sequences(all(self.done), synced_gpus, device=device):
                started = time.perf_counter()
                length = 0 if self.is_trial else self._length()
                tree = self.session.propose(self.tokens, length) if self._drafts() else self.empty
                drafted = time.perf_counter()
                cycle = self._verified(tree)
                if cycle.faults:
                    cycle = self._without_drafts(cycle)
                tree, result = cycle.tree, cycle.result
                accepted, new_tokens = self._settle(cycle)
                is_cut = sum(new_tokens.counts) < sum(accepted) + len(accepted)
                if is_cut and self.stopping.holds:  # the last token that a sequence keeps is a draft
                    result = result.first(new_tokens.on_device)
                self.target.keep(new_tokens, None if tree.is_chain else result.path)
                if self._drafts():
                    self.session.advance(cycle.outputs.along(result, tree), result)
                if self.may_drop_finished and any(self.done):
                    self.target.drop_finished(self.done)
                ended = time.perf_counter()
                if self.schedule is not None and self.target.is_steady and self._drafts() and not self.is_trial:
                    self.schedule.update(tree.depth, accepted, ended - started, length)
                self.statistics.cycle_seconds += ended - started
                self.statistics.draft_seconds += drafted - started
                self.statistics.verify_seconds += ended - self.called
            if self.streamer is not None:
                self.streamer.end()
            output = self._output()
            self.session.finish(self.statistics)
            return output
        except BaseException:  # a user's cache must not end with layers that only this loop can use
            target = vars(self).get("target")
            if isinstance(target, RaggedBackbone):
                target.align(max(target.layout.lengths))
            raise

    def _prefill(self) -> None:
        """Run the first pass, transformers' own prefill; it emits one token per sequence."""
        kwargs, prompt = self.model_kwargs, self.tokens.ids[:, : self.tokens.prompt_length]
        outputs = untyped(self.backbone)._prefill(
            prompt, self.config, kwargs | {"output_hidden_states": self.hidden_layers}
        )
        cache, mask = cache_of(outputs), kwargs.get("attention_mask")
        if self.keywords is not None:
            kwargs = kwargs | {"position_ids": self.keywords.position_ids}
        if isinstance(cache, EncoderDecoderCache):  # the other half is the encoder's, which every forward reads anew
            cache = cache.self_attention_cache
        if isinstance(cache, SpeculativeCache):
            self.target = OwnCacheBackbone(self.verifier_model, cache, mask)
        else:
            if mask is not None and kwargs.get("position_ids") is None:  # the model counts columns, padding included
                kwargs = kwargs | {"position_ids": mask.new_full((1, 1), cache.get_seq_length() - 1)}
            limit = self.config.max_length
            self.target = target = target_of(
                self.verifier_model, cache, self.tokens.ends, mask, kwargs, limit, self.span
            )
            self.unwritten = target.mask.shape[1] - self.tokens.prompt_length
            self.starts = None if self.table is None else target.next_positions()
        cannot_cut = self.returns_cache and not self.target.takes_cuts
        self.stopping.holds = cannot_cut or self._may_leave_table(self.stopping.tokens_left(prompt.shape[1]))
        self.statistics.backbone_calls += 1
        logits = outputs.logits[:, -1:].to(prompt.device, torch.float32)  # [B, 1, V]
        scores = self._scores(logits, self.empty, is_prefill=True)
        states = TargetOutput(logits, outputs.hidden_states)
        cycle = self._on_host(Cycle(self.empty, self.empty, states, scores, self._picked(scores)))
        if cycle.faults:
            cycle = self._without_drafts(cycle)
        self._settle(cycle, is_prefill=True)
        self.session.begin(outputs, self.target)

    def _drafts(self) -> bool:
        """Return whether the session still drafts."""
        return not (self.is_plain or self.is_left_out)

    def _verified(self, tree: DraftTree) -> Cycle:
        """Call the backbone on b and a draft, and verify this."""
        block = torch.cat([self.tokens.last()[:, None], tree.tokens], dim=1)  # [B, m + 1]
        if self.keywords is not None:
            self.target.keywords = self.keywords.of_block(self.tokens, tree.tokens, tree.depth, self.done)
        outputs = self.target.forward(block, tree, self.hidden_layers)
        self.statistics.backbone_calls += 1
        self.called = time.perf_counter()
        outputs.logits = to_device(outputs.logits, block.device, torch.float32)  # [B, m + 1, V]
        scores, fed = self._scores(outputs.logits, tree), tree  # [B, m + 1, V]
        if self.is_plain:  # since this cycle, perhaps: then its drafts were read, and are dropped
            tree, outputs = self.empty, TargetOutput(outputs.logits[:, :1], outputs.first(1))
        result = self.verifier.verify(tree, scores) if self._drafts() else self._picked(scores)
        return self._on_host(Cycle(fed, tree, outputs, scores, result))

    def _without_drafts(self, cycle: Cycle) -> Cycle:
        """Return a cycle of the bonus token alone in the place of one with faults; from then on nothing is drafted.

        Raises:
            ValueError: Processors left no token, or the scores of that token alone are no numbers: it is the backbone.
        """
        are_scores, are_drafts = cycle.has_finite_scores(), cycle.has_finite_drafts()
        if are_scores and are_drafts and isinstance(self.verifier, GreedyVerifier) and not self.verifier.takes_infinity:
            self.verifier.takes_infinity = True  # processors made it, and plain decoding goes on from it
            cycle = self._on_host(cycle)
            return self._without_drafts(cycle) if cycle.faults else cycle
        if are_drafts and (are_scores or cycle.fed.is_empty):
            raise cycle.refusal(self.backbone, self.processing)
        self.is_left_out = True
        self.target.forget(NewTokens([0] * len(self.done), self.tokens.ids.device))
        if self.watch is not None:
            self.watch.restore()
        cycle = self._verified(self.empty)
        if cycle.faults:
            cycle = self._without_drafts(cycle)
        self.plan.call.drafter.warn_of_numbers()
        return cycle

    def _picked(self, scores: Tensor) -> VerificationResult:
        """Return the result without drafts, from scores [B, 1, v]."""
        first = self.verifier.first(scores[:, 0], self.tokens)
        return VerificationResult(torch.zeros_like(first), first[:, None])

    def _scores(self, logits: Tensor, tree: DraftTree, is_prefill: bool = False) -> Tensor:
        """Return the target's scores [B, m + 1, v] of a block, after the logits processors of the call.

        Where their state moves, they are called as in plain decoding from now on, and drafts are dropped: in the
        prefill they may prepare, but what moves again after that is a state.
        """
        if self.processing is None:
            return logits
        if self.is_plain:
            return self.processing.in_step(self.tokens, logits, self.done)
        if self.watch is None:
            return self.processing(self.tokens, logits, tree, self.done)
        was_trial, self.is_trial = self.is_trial, False
        self.watch.note()
        if was_trial:
            scores = self.processing.in_step(self.tokens, logits, self.done)
        else:
            scores = self.processing(self.tokens, logits, tree, self.done)
        if not self.watch.has_moved():
            return scores
        if is_prefill and not self.watch.has_matcher:
            self.is_trial = True
            return scores
        self.is_plain = True
        decode_plainly(f"{self.watch.name}, whose state moves in its calls", self.plan.options)
        if is_prefill or was_trial:
            return scores
        self.watch.restore()
        return self.processing.in_step(self.tokens, logits, self.done)

    def _length(self) -> int:
        """Return the longest path to draft now: verification adds one more token, and nothing goes beyond the end."""
        longest = self.session.num_tokens if self.schedule is None else self.schedule.length()
        positions = self._positions_left()
        if self.session.is_deterministic:  # a shorter draft is verified differently
            return longest
        open_lengths = [n for n, done in zip(self.tokens.lengths, self.done) if not done]
        tokens = max((self.stopping.tokens_left(n) for n in open_lengths), default=1)
        length = max(min(longest, tokens - 1, positions), 0)
        return length if self.keywords is None else self.keywords.longest(self.tokens, length, self.done)

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

    def _settle(self, cycle: Cycle, is_prefill: bool = False) -> tuple[list[int], NewTokens]:
        """Write a verification result to sequences, records and statistics.

        Returns:
            Accepted drafts of the open sequences, and the new tokens, cut where sequences end.
        """
        accepted, drafts, depth = cycle.accepted, cycle.drafts, cycle.tree.depth
        if self.is_plain:
            accepted = [-1 if waits else count for count, waits in zip(accepted, self._waiting())]
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
            self._count(before, accepted, counts, drafts, depth)
        self.tokens.keep(new_tokens)
        self.tokens.newest_on_host = [ids[:count] for ids, count in zip(verified, counts)]
        self.tokens.drafted_on_host = [len(draft) for draft in drafts]
        if self.streamer is not None:
            self._stream(self.streamer)
        return [count for count, done in zip(accepted, before) if not done], new_tokens

    def _on_host(self, cycle: Cycle) -> Cycle:
        """Write new tokens, and let the host read what it needs: it waits for the device, once in a cycle."""
        self.tokens.write(cycle.result.tokens)
        if cycle.numbers is None and cycle.fed is not self.empty:
            cycle.numbers = self.plan.draft_options.numbers.taken(self.tokens.ids.device)
        rows = self.verifier.path_rows(cycle.result)
        if self.processing is not None and cycle.fed.auxiliary is not None:  # processors may make numbers of NaN
            largest = cycle.outputs.logits.amax((1, 2))[:, None]  # [B, 1]
            rows = largest if rows is None else rows + largest
        is_faulty, cycle.faults = cycle.read(rows), []
        if any(is_faulty):
            ignored = zip(is_faulty, self.done, self._waiting())
            cycle.faults = [row for row, (fault, done, waits) in enumerate(ignored) if fault and not (done or waits)]
        return cycle

    def _waiting(self) -> list[bool]:
        """Return which sequences are further on than others, wait for these in plain decoding, and get nothing."""
        lengths = self.tokens.lengths
        fewest = min((n for n, done in zip(lengths, self.done) if not done), default=0)
        return [self.is_plain and n > fewest for n in lengths]

    def _count(
        self, before: list[bool], accepted: list[int], new: list[int], drafts: list[list[int]], depth: int
    ) -> None:
        for index, draft in enumerate(drafts):
            if not before[index] and accepted[index] >= 0:
                count = new[index] - (not self.done[index])
                self.statistics.rows_accepted[index].append(min(accepted[index], count))
                self.statistics.rows_drafts[index].append(draft)
                self.statistics.rows_depths[index].append(min(depth, len(draft)))

    def _stream(self, streamer: BaseStreamer) -> None:
        lengths, ends = self.tokens.lengths, None
        ready = min((n for n, done in zip(lengths, self.done) if not done), default=max(lengths))
        if self.stopping.in_step:
            ready, ends = self.stopping.shown, self.stopping.ends
        # one column at a time: text streamers are exact only so
        for column in self.tokens.columns(self.streamed, ready, self.pad, ends).cpu().unbind(1):
            streamer.put(column)
        self.streamed = max(self.streamed, ready)

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
            is_prepared = self.keywords is not None and self.keywords.is_prepared
            lengths = sorted({n for n, is_early in zip(self.tokens.lengths, early) if is_early})
            for group in [[n] for n in lengths] if is_prepared else [lengths]:
                self._feed_last([is_early and n in group for n, is_early in zip(self.tokens.lengths, early)])
        self.target.align(longest - 1 + self.unwritten)

    def _feed_last(self, chosen: list[bool]) -> None:
        """Put the last token of the chosen sequences in the cache."""
        self.statistics.backbone_calls += 1
        self._positions_left()
        if self.keywords is not None:
            others = [not row for row in chosen]
            self.target.keywords = self.keywords.of_block(self.tokens, self.empty.tokens, 0, others)
        self.target.forward(self.tokens.last()[:, None], self.empty, None)
        self.target.keep(NewTokens([int(row) for row in chosen], self.tokens.ids.device))
