"""The decoding loop: draft, one backbone call, verify, keep, roll back. Rows of a batch accept on their own.

    tokens     ... x y b            b: the token that the last verification added, not in the cache yet
    draft            |  d1 d2 d3                              DraftSession.propose
    fed              b  d1 d2 d3    one backbone call         Target.forward
    scores           d1 d2 z  -     the target's choices      Processing, Verifier.judge
    kept             d1 d2 z        two drafts and a token    Stopping.cut
    cache      ... x y b  d1 d2     rolled back to here       Target.keep
    next                     z = b  and so on                 DraftSession.advance

The host waits for the device once in a cycle, for all that it must know: accepted counts, tokens, drafts. What it then
decides (rows end at eos, at stop strings, at the length limit) goes back in one copy, and only where rows differ.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..configuration.fields import learned_positions
from ..modeling.indices import to_device
from .call.options import DraftOptions
from .call.outputs import GenerateSpeculativeOutput, Records, Speculation
from .call.schedule import DraftSchedule
from .call.sequences import NewTokens, Sequences, Stopping
from .protocols import DraftSession
from .target.cache import is_repackable
from .target.target import EvenTarget, HiddenLayers, RepackedTarget, RowLengthTarget, Target, TargetOutput
from .trees.contract import DraftTree, VerificationResult
from .verification.verifiers import Verifier


class SpeculativeLoop:
    """One call of `generate`.

    State between cycles: every row's tokens, of which all but the last are in the cache, and what the drafter keeps.

    Args:
        model: The backbone, as `generate` sees it.
        drafter: Proposes tokens.
        rule: Verifies them.
        options: What was asked of this call.
        schedule: How many tokens to draft.
        prompt: [B, L] int64.
        config: Prepared generation config.
        criteria: Prepared stopping criteria.
        model_kwargs: Prepared keyword arguments of the model, the cache among them.
        cache_is_given: Whether the cache is the caller's own, who may look into it after the call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        session: DraftSession,
        rule: Verifier,
        options: DraftOptions,
        schedule: DraftSchedule,
        prompt: torch.Tensor,
        config: GenerationConfig,
        criteria: StoppingCriteriaList,
        model_kwargs: dict[str, Any],
        cache_is_given: bool = False,
    ) -> None:
        self.model, self.session, self.rule, self.options = model, session, rule, options
        self.config, self.model_kwargs = config, model_kwargs
        self.cache_is_seen = cache_is_given or config.return_dict_in_generate
        self.tokens, self.streamed = Sequences(prompt), prompt.shape[1]
        self.done = [False] * len(prompt)
        self.processing, self.records = options.processing, Records(config, len(prompt))
        self.stopping = Stopping(criteria, options.processing.pad, self.records.scores_of)
        self.schedule = schedule
        pad = getattr(config, "_pad_token_tensor", None)
        self.pad = 0 if pad is None else int(pad)
        self.statistics = Speculation(*([[] for _ in prompt] for _ in range(2)), rows_depths=[[] for _ in prompt])
        self.streamer: BaseStreamer | None = None
        self.target: Target | None = None
        self.table = learned_positions(model.config.get_text_config())
        self.starts: list[int] | None = None

    def run(self, streamer: BaseStreamer | None = None, synced_gpus: bool = False) -> Any:
        """Decodes until every row has ended.

        Args:
            streamer: Receives every column of tokens once all open rows have it.
            synced_gpus: Keep calling the backbone until all peers are done.

        Returns:
            The sequences [B, L + new], or a `GenerateSpeculativeOutput` where the config asks for a dict.
        """
        self.streamer = streamer
        self._prefill()
        while self.model._has_unfinished_sequences(all(self.done), synced_gpus, device=self.tokens.ids.device):
            self._cycle()
        if streamer is not None:
            streamer.end()
        return self._output()

    @property
    def _hidden_layers(self) -> HiddenLayers:
        return True if self.config.output_hidden_states else self.session.hidden_layers

    def _prefill(self) -> None:
        """The first pass, through transformers' own prefill; it emits one token per row."""
        wanted = self.model_kwargs | {"output_hidden_states": self._hidden_layers}
        prompt = self.tokens.ids[:, : self.tokens.prompt_length]
        outputs = self.model._prefill(prompt, self.config, wanted)
        self.target = self._target(outputs.past_key_values)
        if self.table is not None and isinstance(self.target, RepackedTarget):
            self.starts = self.target.next_positions()
        self.statistics.backbone_calls += 1
        logits = to_device(outputs.logits[:, -1:], prompt.device, torch.float32)
        tree = DraftTree.chain(prompt[:, :0])
        scores = self.processing(self.tokens, logits, tree, self.done)
        first = self.rule.first(scores[:, 0], self.tokens)
        result = VerificationResult(torch.zeros_like(first), first[:, None])
        self._settle(tree, result, TargetOutput(logits, outputs.hidden_states), scores, is_prefill=True)
        self.session.begin(outputs, self.target)

    def _target(self, cache: Cache) -> Target:
        mask = self.model_kwargs.get("attention_mask")
        if hasattr(cache, "keep_last"):
            return RowLengthTarget(self.model, cache, mask)
        kind = RepackedTarget if is_repackable(cache) else EvenTarget
        return kind(self.model, cache, self.tokens.ends, mask, self.model_kwargs)

    def _cycle(self) -> None:
        started = time.perf_counter()
        length = self._length()
        tree = self.session.propose(self.tokens, length)
        drafted = time.perf_counter()
        block = torch.cat([self.tokens.last()[:, None], tree.tokens], dim=1)
        fed = self.target.forward(block, tree, self._hidden_layers)
        self.statistics.backbone_calls += 1
        called = time.perf_counter()
        fed.logits = to_device(fed.logits, block.device, torch.float32)
        scores = self.processing(self.tokens, fed.logits, tree, self.done)
        result = self.rule.verify(tree, scores)
        accepted, kept = self._settle(tree, result, fed, scores)
        self.target.keep(kept, result, tree)
        self.session.advance(fed.along(result, tree), result)
        ended = time.perf_counter()
        self.schedule.update(tree.depth, accepted, ended - started, length)
        self.statistics.draft_seconds += drafted - started
        self.statistics.verify_seconds += ended - called

    def _length(self) -> int:
        """The longest path to draft now: the verification result adds one more token, and nothing is drafted beyond the
        text."""
        ahead = self._places_ahead()
        if getattr(self.session, "is_deterministic", False):  # a draft that is cut short is verified otherwise
            return self.schedule.length()
        open_rows = [n for n, done in zip(self.tokens.lengths, self.done) if not done]
        room = max((self.stopping.room(n) for n in open_rows), default=1)
        return max(min(self.schedule.length(), room - 1, ahead), 0)

    def _places_ahead(self) -> int:
        """How many positions a table of them has behind b in every open row.

        Rows that have ended are fed on beside the others, and repeat the last position. Open rows never do: beyond a
        table there is no text, and the backbone says so.
        """
        if self.starts is None:
            return 2**31
        written = [n - self.tokens.prompt_length for n in self.tokens.lengths]
        rows = [self.table - start - count for start, count in zip(self.starts, written)]
        ahead = min((left for left, done in zip(rows, self.done) if not done), default=0)
        self.target.last_position = self.table - 1 if ahead >= 0 and any(self.done) else None
        return ahead

    def _settle(
        self,
        tree: DraftTree,
        result: VerificationResult,
        fed: TargetOutput,
        scores: torch.Tensor,
        is_prefill: bool = False,
    ) -> tuple[list[int], NewTokens]:
        """Takes a verification result over into texts, records and statistics; accepted drafts of open rows, and what
        is kept."""
        self.tokens.write(result.tokens)
        accepted, new, drafts = self._on_host(tree, result)
        verified = [ids[: count + 1] for ids, count in zip(new, accepted)]
        before = self.done
        if self.records.is_wanted:
            counts = [0 if done else count + 1 for count, done in zip(accepted, before)]
            self.records.add(fed.along(result, tree), self._along(scores, result, tree), counts, is_prefill)
        counts, self.done = self.stopping.cut(self.tokens, verified, before)
        kept = NewTokens(counts, self.tokens.ids.device)
        self.records.cut([n + count - self.tokens.prompt_length for n, count in zip(self.tokens.lengths, counts)])
        if not is_prefill:
            self._count(before, accepted, counts, drafts, tree.depth)
        self.tokens.keep(kept)
        self.statistics.new_tokens += sum(counts)
        if self.streamer is not None:
            self._stream()
        return [count for count, done in zip(accepted, before) if not done], kept

    def _on_host(
        self, tree: DraftTree, result: VerificationResult
    ) -> tuple[list[int], list[list[int]], list[list[int]]]:
        """The cycle's one wait: accepted counts, new tokens and real drafts of every row.

        Raises:
            ValueError: A row was to be sampled from scores that are no distribution.
        """
        faults, real, width = self.rule.invalid(result), tree.num_nodes, result.tokens.shape[1]
        parts = [part[:, None] for part in (result.num_accepted, real, faults) if part is not None]
        rows = torch.cat([*parts, result.tokens, tree.tokens], dim=1).tolist()
        accepted = [row.pop(0) for row in rows]
        counts = [tree.tokens.shape[1] if real is None else row.pop(0) for row in rows]
        if faults is not None:
            self._refuse([row.pop(0) for row in rows])
        return accepted, [row[:width] for row in rows], [row[width:][:count] for row, count in zip(rows, counts)]

    def _refuse(self, faults: list[int]) -> None:
        for row, fault in enumerate(faults):
            if fault and not self.done[row]:
                raise ValueError(
                    f"row {row} has no token to sample: its scores are NaN, or all -inf, after the logits "
                    "processors; look for a damaged checkpoint, an overflow in half precision, or processors that "
                    "exclude every token"
                )

    @staticmethod
    def _along(scores: torch.Tensor, result: VerificationResult, tree: DraftTree) -> torch.Tensor:
        return TargetOutput(scores).along(result, tree).logits

    def _count(
        self, before: list[bool], accepted: list[int], kept: list[int], drafts: list[list[int]], depth: int
    ) -> None:
        for row, (count, keep, draft) in enumerate(zip(accepted, kept, drafts)):
            if not before[row]:
                self.statistics.rows_accepted[row].append(min(count, keep))
                self.statistics.rows_drafts[row].append(draft)
                self.statistics.rows_depths[row].append(min(depth, len(draft)))

    def _stream(self) -> None:
        lengths = self.tokens.lengths
        ready = min((n for n, done in zip(lengths, self.done) if not done), default=max(lengths))
        # one column at a time: text streamers are exact only so
        for column in self.tokens.columns(self.streamed, ready, self.pad).cpu().unbind(1):
            self.streamer.put(column)
        self.streamed = max(self.streamed, ready)

    def _output(self) -> GenerateSpeculativeOutput | torch.Tensor:
        sequences = self.tokens.columns(0, max(self.tokens.lengths), self.pad)
        if self.cache_is_seen:  # it may cost a forward, which would be in vain elsewhere
            self._align_cache()
        if not self.config.return_dict_in_generate:
            return sequences
        generated = [n - self.tokens.prompt_length for n in self.tokens.lengths]
        if coverage := getattr(self.session, "coverage", None):
            rows = zip(sequences[:, self.tokens.prompt_length :], generated)
            self.statistics.vocabulary_coverage = coverage(torch.cat([row[:count] for row, count in rows]))
        scores, logits, hidden_states = self.records.per_token(generated, self.pad)
        return GenerateSpeculativeOutput(
            sequences=sequences,
            scores=scores,
            logits=logits,
            hidden_states=hidden_states,
            past_key_values=self.target.cache,
            speculation=self.statistics,
        )

    def _align_cache(self) -> None:
        """Feeds the last token of rows that ended early, so that the next call may start at the last column."""
        longest = max(self.tokens.lengths)
        kept = NewTokens([int(n < longest) for n in self.tokens.lengths], self.tokens.ids.device)
        if any(kept.counts) and self.target.supports_rollback:
            tree = DraftTree.chain(self.tokens.ids[:, :0])
            self.statistics.backbone_calls += 1
            self._places_ahead()
            self.target.forward(self.tokens.last()[:, None], tree, None)
            self.target.keep(kept, VerificationResult(self.tokens.ends, self.tokens.last()[:, None]), tree)
        self.target.align(longest - 1)
