"""The decoding loop: draft, one backbone call, verify, keep, roll back. Rows of a batch accept on their own.

State between cycles: every row's tokens, of which all but the last are in the cache, and what the drafter remembers. A
cycle drafts behind the last token b, feeds [b, draft] to the backbone, keeps the accepted drafts and the token that the
verifier adds, and rolls the cache back to all but that token.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..modeling.sampling import race
from .drafters.heads import Drafter
from .processing import Processing
from .records import Records
from .schedule import AdaptiveSchedule, ConstantSchedule, DraftSchedule
from .statistics import GenerateSpeculativeOutput, Speculation
from .stopping import Stopping
from .targets import RepackedTarget, RowLengthTarget, Target
from .tokens import TokenRows
from .verification import verify, verify_greedy


class SpeculativeLoop:
    """One call of `generate`.

    Args:
        model: The target.
        drafter: Proposes tokens.
        prompt: [B, L] int64.
        config: Prepared generation config; `verification` may name the rule for sampled drafts.
        processors: Prepared logits processors.
        criteria: Prepared stopping criteria.
        model_kwargs: Prepared keyword arguments of the model, the cache among them.
        streamer: Receives every column of tokens once all open rows have it.
        synced_gpus: Keep calling the backbone until all peers are done.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        prompt: torch.Tensor,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        model_kwargs: dict[str, Any],
        streamer: BaseStreamer | None = None,
        synced_gpus: bool = False,
    ) -> None:
        self.model, self.drafter, self.config, self.model_kwargs = model, drafter, config, model_kwargs
        self.streamer, self.synced_gpus, self.streamed = streamer, synced_gpus, prompt.shape[1]
        self.tokens = TokenRows(prompt)
        self.done = [False] * len(prompt)
        self.processing, self.stopping = Processing(processors), Stopping(criteria)
        adaptive = config.num_assistant_tokens_schedule == "adaptive"
        self.schedule: DraftSchedule = (AdaptiveSchedule if adaptive else ConstantSchedule)(drafter.num_tokens)
        self.rule = getattr(config, "verification", None) or "block"
        pad = getattr(config, "_pad_token_tensor", None)
        self.pad = 0 if pad is None else int(pad)
        self.records = Records(config, len(prompt))
        self.statistics = Speculation([[] for _ in prompt], [[] for _ in prompt])
        self.target: Target | None = None

    def run(self) -> GenerateSpeculativeOutput | torch.Tensor:
        """Decodes until every row has ended."""
        self._prefill()
        while self.model._has_unfinished_sequences(all(self.done), self.synced_gpus, device=self.tokens.ids.device):
            self._cycle()
        if self.streamer is not None:
            self.streamer.end()
        return self._output()

    def _prefill(self) -> None:
        """The first pass, through transformers' own prefill; it emits one token per row."""
        wanted = {"output_hidden_states": True if self.config.output_hidden_states else -1}
        outputs = self.model._prefill(
            self.tokens.ids[:, : self.tokens.prompt_length], self.config, self.model_kwargs | wanted
        )
        self.target = self._target(outputs.past_key_values)
        self.statistics.backbone_calls += 1
        logits = outputs.logits[:, -1:].float()
        scores = self.processing(self.tokens, logits, self.done)
        first = self._first(scores)
        self.tokens.write(first)
        kept, self.done = self.stopping.cut(self.tokens, first.tolist(), self.done)
        self.records.add(logits, scores, outputs.hidden_states, kept, is_prefill=True)
        self._keep(kept)
        self.drafter.begin(outputs, self.target)

    def _target(self, cache: Cache) -> Target:
        if getattr(cache, "has_row_lengths", False):
            return RowLengthTarget(self.model, cache)
        return RepackedTarget(self.model, cache, len(self.done), self.model_kwargs.get("attention_mask"))

    def _first(self, scores: torch.Tensor) -> torch.Tensor:
        """The token after the prompt, [B, 1], from scores [B, 1, v]."""
        return race(scores.softmax(-1)) if self.config.do_sample else scores.argmax(-1)

    def _cycle(self) -> None:
        started = time.perf_counter()
        last = self.tokens.last()
        draft, q = self._draft(last)
        drafted = time.perf_counter()
        outputs = self._forward(torch.cat([last[:, None], draft], dim=1))
        called = time.perf_counter()
        draft, logits, scores, accepted, new = self._judge(draft, q, outputs)
        self.tokens.write(new)
        accepted, new, drafts = accepted.tolist(), new.tolist(), draft.tolist()
        verified = [ids[: count + 1] for ids, count in zip(new, accepted)]
        before = self.done
        kept, self.done = self.stopping.cut(self.tokens, verified, before)
        self._count(before, accepted, kept, drafts)
        self.records.add(logits, scores, outputs.hidden_states, kept)
        self._keep(kept)
        self.target.roll_back(kept, draft.shape[1] + 1)
        self.drafter.advance(outputs, kept)
        ended = time.perf_counter()
        self.schedule.update(draft.shape[1], [n for n, done in zip(accepted, before) if not done], ended - started)
        self.statistics.draft_seconds += drafted - started
        self.statistics.verify_seconds += ended - called

    def _draft(self, last: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        open_rows = [n for n, done in zip(self.tokens.lengths, self.done) if not done]
        room = max((self.stopping.room(n) for n in open_rows), default=1)
        length = min(self.schedule.length(), room - 1)
        if length < 1:
            return last[:, None][:, :0], None
        return self.drafter.propose(self.tokens, length)

    def _forward(self, block: torch.Tensor) -> Any:
        """One backbone call on [b, draft]."""
        self.statistics.backbone_calls += 1
        selection = True if self.config.output_hidden_states else -1
        return self.target.forward(block, output_hidden_states=selection)

    def _judge(self, draft: torch.Tensor, q: torch.Tensor | None, outputs: Any) -> tuple[torch.Tensor, ...]:
        """Draft [B, m], logits and scores [B, m + 1, v] behind it, and what `_verify` says."""
        logits = outputs.logits.float()
        self.tokens.write(draft)
        scores = self.processing(self.tokens, logits, self.done)
        return draft, logits, scores, *self._verify(draft, q, scores)

    def _verify(
        self, draft: torch.Tensor, q: torch.Tensor | None, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Accepted drafts [B], and tokens [B, m + 1] of which the accepted ones and the next are the row's own."""
        if not self.config.do_sample:
            return verify_greedy(draft, scores)
        accepted, added = verify(draft, q, scores.softmax(-1), self.rule)
        new = torch.nn.functional.pad(draft, (0, 1))
        return accepted, new.scatter_(1, accepted[:, None], added[:, None])

    def _count(self, before: list[bool], accepted: list[int], kept: list[int], drafts: list[list[int]]) -> None:
        for row, (count, keep, draft) in enumerate(zip(accepted, kept, drafts)):
            if not before[row]:
                self.statistics.rows_accepted[row].append(min(count, keep))
                self.statistics.rows_drafts[row].append(draft)

    def _keep(self, kept: list[int]) -> None:
        self.tokens.keep(kept)
        self.statistics.new_tokens += sum(kept)
        if self.streamer is not None:
            self._stream()

    def _stream(self) -> None:
        lengths = self.tokens.lengths
        ready = min((n for n, done in zip(lengths, self.done) if not done), default=max(lengths))
        # one column at a time: text streamers are exact only so
        for column in self.tokens.columns(self.streamed, ready, self.pad).cpu().unbind(1):
            self.streamer.put(column)
        self.streamed = max(self.streamed, ready)

    def _output(self) -> GenerateSpeculativeOutput | torch.Tensor:
        sequences = self.tokens.columns(0, max(self.tokens.lengths), self.pad)
        if not self.config.return_dict_in_generate:
            return sequences
        self._align_cache()
        generated = [n - self.tokens.prompt_length for n in self.tokens.lengths]
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
        kept = [int(n < longest) for n in self.tokens.lengths]
        if any(kept):
            self._forward(self.tokens.last()[:, None])
            self.target.roll_back(kept, 1)
        self.target.align(longest - 1)
