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

On a cache of a fixed size the ends are also found on the device (`Stopping.counts`), so that a whole cycle comes before
the host reads it, and can be recorded and replayed (`graphs`). Where the next cycle needs nothing of the host, it is
launched before the host reads this one (`ahead`); where all sequences turn out to have ended, it does nothing.

Where scores of an open sequence are no numbers (NaN, +inf, -inf everywhere), the cycle is repeated on the cache as it
was with b alone: a row that nobody sees is multiplied by 0, and 0 times NaN is NaN. If b's scores are none either, the
backbone is at fault, which is an error; else the drafter is left out from there on. So it is where its draft was chosen
from no numbers; what was drafted before these is verified, for drafts that are dropped for what was drawn come too
seldom.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import EncoderDecoderCache

from ..configuration.cache_names import cache_of
from ..configuration.fields import requested_states
from .backbone.backbones import target_of
from .backbone.static import StaticBackbone
from .backbone.target import OwnCacheBackbone, RaggedBackbone, Target
from .call.outputs import GenerateSpeculativeOutput, Graphs
from .call.sequences import FixedSequences, NewTokens
from .contract import DraftTree, SpeculativeCache, TargetOutput, VerificationResult
from .graphs import Observer, Recorder, fingerprint, held_draft, obstacle_to_whole
from .plan import SpeculationPlan, decode_plainly
from .results import Results
from .tensors.masks import to_device
from .tensors.wrapped_models import has_foreign_hooks, untyped
from .trees.building import up_to
from .trees.growth import most_nodes
from .verification.cycles import Cycle
from .verification.verifiers import GreedyVerifier

_LENGTHS = 1, 2, 4
"""Lengths of drafts that adaptive ones are rounded up to where each has a recording; full ones have another."""
P = ParamSpec("P")
R = TypeVar("R")
REGION_OBSERVER: Observer | None = None
"""Called in place of every region that could be replayed: `"cycle"`, or `"forward"` where the rest of a cycle needs the
host."""


class SpeculativeLoop(Results):
    """One call of `generate`.

    State between cycles: the tokens of every sequence, of which all but the last are in the cache, and the session's.

    Args:
        plan: Complete (`SpeculationPlan.complete`).

    Attributes:
        limits: The most tokens of every sequence, in the cycle in which a processor's state moved on a drawn draft.
    """

    fixed: FixedSequences | None = None
    recorder: Recorder | None = None
    limits: list[int] | None = None
    is_whole = is_constant = needs_host = False
    drafted = called = 0.0

    def __init__(self, plan: SpeculationPlan) -> None:
        super().__init__(plan)
        prompt, options, config, session = plan.prompt, plan.draft_options, plan.config, plan.session
        self.verifier_model, self.verifier, self.schedule = plan.verifier_model, plan.verifier, plan.schedule
        self.model_kwargs = plan.model_kwargs
        self.processing = options.processing if options.processors else None
        self.watch = self.processing.watch() if self.processing is not None and options.drafts else None
        self.is_plain, self.is_trial, self.is_left_out = False, False, False
        is_read = self.returns_cache or session.reads_cache
        may_drop_finished = len(prompt) > 1 and plan.keywords is None and not (is_read or session.lookahead)
        self.may_drop_finished = may_drop_finished and not has_foreign_hooks(plan.verifier_model)
        self.hidden_layers = requested_states(bool(config.output_hidden_states) or session.hidden_layers)
        self.span = max(most_nodes(options) if options.draft_tree else 1 + options.num_tokens, 1 + session.num_tokens)

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
                started = self.drafted = self.called = time.perf_counter()
                length = 0 if self.is_trial else self._length()
                cycle, accepted = self._cycle(length)
                if self.may_drop_finished and any(self.done):
                    self.target.drop_finished(self.done)
                ended = time.perf_counter()
                is_steady = self.target.is_steady and (self.recorder is None or self.recorder.is_steady)
                if self.schedule is not None and is_steady and self._drafts() and not self.is_trial:
                    self.schedule.update(cycle.tree.depth, accepted, ended - started, length)
                self.statistics.cycle_seconds += ended - started
                self.statistics.draft_seconds += self.drafted - started
                self.statistics.verify_seconds += ended - self.called
            return self._finished()
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
            kwargs = kwargs | self.keywords.continued
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
        if self.keywords is not None:
            self.target.keywords = self.keywords.constant
        cannot_cut = self.returns_cache and not self.target.takes_cuts
        self.stopping.holds = cannot_cut or self._may_leave_table(self.stopping.tokens_left(prompt.shape[1]))
        self.statistics.backbone_calls += 1
        logits = outputs.logits[:, -1:].to(prompt.device, torch.float32)  # [B, 1, V]
        scores = self._scores(logits, self.empty, is_prefill=True)
        states = TargetOutput(logits, outputs.hidden_states)
        cycle = self._on_host(self._checked(Cycle(self.empty, self.empty, states, scores, self._picked(scores))))
        if cycle.faults:
            cycle = self._without_drafts(cycle)
        self._settle(cycle, is_prefill=True)
        if self.plan.config.cache_implementation == "static":
            self.statistics.graphs = self._fix(self.target)
        self.session.begin(outputs, self.target)

    def _fix(self, target: Target) -> Graphs:
        """Go on in tensors with constant addresses, if shapes are fixed, and record what can be replayed."""
        plan, told = self.plan, Graphs()
        if not isinstance(target, StaticBackbone) or target.buffers is None or not target.is_fixed:
            told.reasons["cycle"] = plan.unfixed or "another cache than transformers' own"
            return told
        room, hold = target.layout.capacity - self.unwritten, target.held
        self.tokens = self.fixed = FixedSequences(self.tokens, room, hold)
        self.stopping.hold(hold, self.tokens.ids.device)
        self.verifier.hold(hold, room - self.tokens.prompt_length)
        if self.records is not None:
            self.records.copies = True
        if (reason := obstacle_to_whole(plan.draft_options, self.stopping.others)) is not None:
            told.reasons["cycle"] = reason
        self.is_whole = reason is None
        served = self.records, self.streamer, self.schedule, self.table
        is_served = any(each is not None for each in served)
        self.needs_host = is_served or self.session.reads_host or plan.synced_gpus  # between two cycles
        if plan.unrecorded is not None:
            told.reasons["cycle" if self.is_whole else "forward"] = plan.unrecorded
        else:
            shape = fingerprint(*plan.marks, self.is_whole, self.table, self.hidden_layers, *target.marks)
            self.recorder = Recorder(target.buffers, shape, self.verifier_model.device, told)
        return told

    def _drafts(self) -> bool:
        """Return whether the session still drafts."""
        return not (self.is_plain or self.is_left_out)

    def _cycle(self, length: int) -> tuple[Cycle, list[int]]:
        """Draft, verify, and move on; return the cycle, and the accepted drafts of the open sequences."""
        self.statistics.backbone_calls += 1
        drafted = None
        if self.fixed is not None and self.session.reads_host and self._drafts():
            drafted = held_draft(self.session.propose(self.tokens, length), self.target.held)
        if self.fixed is not None and self.is_whole and (self._drafts() or self.ahead is not None):
            cycle = self.ahead or self._launched(length, self.fixed, drafted)
            self.ahead = self._launched(length, self.fixed, None) if self._is_followed() else None
            cycle = self._on_host(cycle)
            if cycle.faults and self.ahead is not None:  # it left no trace, so that the next one did its work
                cycle, self.ahead = self._on_host(self.ahead), None
            if not cycle.faults:
                return cycle, self._settle(cycle)[0]
        else:
            cycle = self._on_host(self._verified(*self._region("forward", self._read, length, drafted)))
        if cycle.faults:
            cycle = self._without_drafts(cycle)
        accepted, new_tokens = self._settle(cycle)
        is_cut = sum(new_tokens.counts) < sum(accepted) + len(accepted)
        # the last token that a sequence keeps is a draft; where none is cut `first` would change nothing
        if is_cut and self.stopping.holds:
            cycle.result = cycle.result.first(new_tokens.on_device)
        if self.fixed is not None:
            self.fixed.end(self.done)
        self._move_on(cycle, new_tokens)
        return cycle, accepted

    def _launched(self, length: int, tokens: FixedSequences, drafted: DraftTree | None) -> Cycle:
        """Launch a whole cycle, and send what the host reads of it."""
        return self._region("cycle", self._whole, length, tokens, drafted).send()

    def _is_followed(self) -> bool:
        """Return whether another cycle surely follows one that nobody has read, but for ends of sequences by eos."""
        is_alike = self.is_constant and self._drafts() and not self.needs_host
        return is_alike and self._tokens_left() > self.session.num_tokens + 1

    def _region(self, name: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what a part of a cycle returns in which the host waits for nothing."""
        caller = REGION_OBSERVER or (self.recorder if self.is_constant and self._drafts() else None)
        return function(*args, **kwargs) if caller is None else caller(name, function, *args, **kwargs)

    def _whole(self, length: int, tokens: FixedSequences, drafted: DraftTree | None) -> Cycle:
        """Return a cycle that ends before the host has read it; where a sequence is at fault, it leaves no trace."""
        cycle = self._verified(*self._read(length, drafted))
        counts = self.stopping.counts(tokens, cycle.result, cycle.is_sound())  # [B]
        self._move_on(cycle, NewTokens.unread(counts))
        return cycle

    def _move_on(self, cycle: Cycle, new: NewTokens) -> None:
        """Leave new tokens in sequences and cache, and show the session what was verified."""
        tree, result = cycle.tree, cycle.result
        if self.fixed is not None:
            new = NewTokens.unread(new.on_device)  # nobody is told more
            self.fixed.extend(new)
        self.target.keep(new, None if tree.is_chain else result.path)
        if self._drafts():
            self.session.advance(cycle.outputs.along(result, tree), result)

    def _read(self, length: int, drafted: DraftTree | None) -> tuple[DraftTree, TargetOutput, Tensor | None]:
        """Draft, where nobody has, and call the backbone on b and the draft; return also `Cycle.numbers`."""
        tree = drafted or (self.session.propose(self.tokens, length) if self._drafts() else self.empty)
        numbers = None if tree is self.empty else self.plan.draft_options.numbers.taken(self.tokens.ids.device)
        self.drafted = time.perf_counter()
        return tree, self._forward(tree), numbers

    def _forward(self, tree: DraftTree) -> TargetOutput:
        """Call the backbone on b and a draft."""
        block = torch.cat([self.tokens.last()[:, None], tree.tokens], dim=1)  # [B, m + 1]
        outputs = self.target.forward(block, tree, self.hidden_layers)
        outputs.logits = to_device(outputs.logits, block.device, torch.float32)  # [B, m + 1, V]
        outputs.block = block, outputs.logits
        self.called = time.perf_counter()
        return outputs

    def _verified(self, tree: DraftTree, outputs: TargetOutput, numbers: Tensor | None = None) -> Cycle:
        """Verify a draft."""
        scores, fed = self._scores(outputs.logits, tree), tree  # [B, m + 1, V]
        if self.limits is not None:
            limits = torch.tensor(self.limits, device=scores.device)  # [B]
            result = self.verifier.verify(up_to(tree, limits), scores).first(limits)
        elif self._drafts():
            result = self.verifier.verify(tree, scores)
        else:  # since this cycle, perhaps: then its drafts were read, and are dropped
            tree, outputs = self.empty, TargetOutput(outputs.logits[:, :1], outputs.first(1))
            result = self._picked(scores)
        return self._checked(Cycle(fed, tree, outputs, scores, result, numbers))

    def _without_drafts(self, cycle: Cycle) -> Cycle:
        """Return a cycle of the bonus token alone in the place of one with faults; from then on nothing is drafted.

        What was drafted is not looked at: scores that drafts alone made none are those of a backbone at fault.

        Raises:
            ValueError: Processors left no token, or the scores of that token alone are no numbers: it is the backbone.
        """
        are_scores = cycle.has_finite_scores()
        if are_scores and isinstance(self.verifier, GreedyVerifier) and not self.verifier.takes_infinity:
            self.verifier.takes_infinity = True  # processors made it, and plain decoding goes on from it
            self.recorder = None
            cycle = self._on_host(self._checked(cycle))
            return self._without_drafts(cycle) if cycle.faults else cycle
        if are_scores or cycle.fed.is_empty:
            raise cycle.refusal(self.backbone, self.processing)
        self.is_left_out = True
        self.target.forget(NewTokens([0] * len(self.done), self.tokens.ids.device))
        if self.watch is not None:
            self.watch.restore()
        self.statistics.backbone_calls += 1
        cycle = self._on_host(self._verified(self.empty, self._forward(self.empty)))
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

        Where their state moves, they are called as in plain decoding from now on: in the prefill they may prepare, but
        what moves again after that is a state. Drafts are dropped then, but drawn ones at which it moved: those up to
        them, themselves included, are verified (`limits`), for a token that is drawn anew because it was drafted comes
        too seldom.
        """
        self.limits = None
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
        if tree.probs is not None:
            watch = self.watch
            scores, limits = self.processing.until(
                self.tokens, logits, tree, self.done, lambda: watch.moved() is not None
            )
            watch.restore()
            if any(limit and not done for limit, done in zip(limits, self.done)):
                self.limits = limits
                return scores
        return self.processing.in_step(self.tokens, logits, self.done)

    def _length(self) -> int:
        """Return the longest path to draft now: verification adds one more token, and nothing goes beyond the end."""
        longest = self.session.num_tokens if self.schedule is None else self.schedule.length()
        positions = self._positions_left()
        is_recorded = self.recorder is not None or REGION_OBSERVER is not None
        self.is_constant = is_recorded and self.fixed is not None and positions >= self.session.num_tokens
        if self.is_constant:  # drafts beyond the end are cut
            self.target.last_position = None if self.table is None else self.table - 1
            return min(n for n in (0, *_LENGTHS, self.session.num_tokens) if n >= longest)
        if self.session.is_deterministic:  # a shorter draft is verified differently
            return longest
        return max(min(longest, self._tokens_left() - 1, positions), 0)

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
            asked = [-1 if old else count for count, old in zip(accepted, before)]
            self.statistics.count(asked, counts, self.done, drafts, depth)
        self.tokens.keep(new_tokens)
        self.tokens.newest_on_host = [ids[:count] for ids, count in zip(verified, counts)]
        self.tokens.drafted_on_host = [len(draft) for draft in drafts]
        if self.streamer is not None:
            self._stream(self.streamer)
        return [count for count, done in zip(accepted, before) if not done], new_tokens

    def _checked(self, cycle: Cycle) -> Cycle:
        """Write new tokens, and what the host reads of a cycle."""
        self.tokens.write(cycle.result.tokens)
        rows = self.verifier.path_rows(cycle.result)
        if self.processing is not None and cycle.fed.auxiliary is not None:  # processors may make numbers of NaN
            largest = cycle.outputs.logits.amax((1, 2))[:, None]  # [B, 1]
            rows = largest if rows is None else rows + largest
        cycle.write(rows)
        return cycle

    def _on_host(self, cycle: Cycle) -> Cycle:
        """Let the host read what it needs: it waits for the device, once in a cycle."""
        is_faulty, cycle.faults = cycle.read(), []
        if any(is_faulty) or any(cycle.strays):
            ignored = [done or waits for done, waits in zip(self.done, self._waiting())]
            cycle.faults = [row for row, (fault, skips) in enumerate(zip(is_faulty, ignored)) if fault and not skips]
            if any(stray and not skips for stray, skips in zip(cycle.strays, ignored)):
                self.is_left_out = True
                if not cycle.faults:  # else the backbone itself may be at fault
                    self.plan.call.drafter.warn_of_numbers()
        if self.is_constant:
            cycle.shorten(self._tokens_left() - 1)
        return cycle

    def _waiting(self) -> list[bool]:
        """Return which sequences are further on than others, wait for these in plain decoding, and get nothing."""
        if self.limits is not None:
            return [not limit for limit in self.limits]
        lengths = self.tokens.lengths
        fewest = min((n for n, done in zip(lengths, self.done) if not done), default=0)
        return [self.is_plain and n > fewest for n in lengths]
