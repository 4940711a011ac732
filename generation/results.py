"""What the host reads of a cycle, and the text of a call that it is added to: streamed, counted, and returned."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from ..configuration.cache_names import CACHE
from .backbone.target import Target, traits_of
from .call.processing import Processing
from .call.records import Records
from .call.sequences import NewTokens, Sequences, Speculation
from .call.stopping import Stopping
from .contract import DraftTree, TargetOutput, VerificationResult
from .plan import Plan
from .tensors.masks import cached_arange

_NO_NUMBER = 0xFF << 23  # the bits of a float32 that are all set in NaN and in infinity, and in no number
_MASKED = -1 << 23  # the bits of -inf as int32: what was noted of a row that processors masked


@dataclass(eq=False)
class Cycle:
    """One verification, and what the host reads of it.

    A stray is a draft that was chosen from what is no number. It is never accepted in sampled calls, and is verified as
    any in others; of the drafts of its sequence those that were accepted count.
    """

    fed: DraftTree  # read by the backbone
    tree: DraftTree  # verified
    outputs: TargetOutput
    scores: Tensor  # [B, m + 1, v], after the logits processors
    result: VerificationResult
    accepted: list[int] = field(default_factory=list)  # drafts per sequence; -1: it gets not even a token
    new: list[list[int]] = field(default_factory=list)  # tokens per sequence, and what follows them in `result.tokens`
    drafts: list[list[int]] = field(default_factory=list)  # real ones per sequence
    depths: list[int] = field(default_factory=list)  # the longest path of these
    faults: list[int] = field(default_factory=list)  # open sequences that would go on from scores that are no numbers
    strays: list[bool] = field(default_factory=list)  # whether a sequence has any
    rows: Tensor | None = None  # `Verifier.path_rows`, or [B, 1]
    report: Tensor | None = None  # [B, n] int64, all that the host reads
    arrival: torch.cuda.Event | None = None  # on an accelerator, when a report that was sent has arrived

    def send(self) -> Cycle:
        """Begin to copy the report to the host, which goes on meanwhile: what runs next may write to its tensors."""
        assert self.report is not None
        sent = replace(self, report=self.report.to("cpu", non_blocking=True, copy=True))  # [B, n], in pinned memory
        if self.report.is_cuda:
            sent.arrival = torch.cuda.Event()
            sent.arrival.record(torch.cuda.current_stream(self.report.device))
        return sent

    def write(self, rows: Tensor | None) -> None:
        """Write the report; see `rows`."""
        self.rows, numbers = rows, self.fed.numbers
        floats = [part for part in (None if numbers is None else numbers[:, None], rows) if part is not None]
        joined = torch.cat(floats, 1) if len(floats) > 1 else floats[0] if floats else None  # [B, up to 1 + r]
        bits = None if joined is None else joined.float().view(torch.int32).long()  # `cat` copies one dtype at once
        counts = [part[:, None] for part in (self.result.num_accepted, self.tree.num_nodes) if part is not None]
        parts = counts if bits is None else [*counts, bits]
        # [B, up to 3 + r + (k + 1) + m]
        self.report = torch.cat([*parts, self.result.tokens, self.tree.tokens], dim=1)

    def read(self, skipped: list[bool]) -> None:
        """Read the report, in one copy; sequences that are `skipped` get nothing, and are at no fault."""
        assert self.report is not None
        if self.arrival is not None:
            self.arrival.synchronize()
        real, numbers, width = self.tree.num_nodes, self.fed.numbers, self.result.tokens.shape[1]
        start = 1 if real is None else 2
        first = start + (numbers is not None)
        text = first + (0 if self.rows is None else self.rows.shape[1])
        self.faults, self.strays, self.accepted, self.new, self.drafts, self.depths = [], [], [], [], [], []
        for row, (ids, skips) in enumerate(zip(self.report.tolist(), skipped)):
            read = ids[first : min(text, first + 1 + ids[0])]
            if not skips and any(number & _NO_NUMBER == _NO_NUMBER for number in read):
                self.faults.append(row)
            is_known = numbers is not None and ids[start] != _MASKED
            is_stray = is_known and ids[start] & _NO_NUMBER == _NO_NUMBER
            self.strays.append(is_stray and not skips)
            self.accepted.append(-1 if skips else ids[0])
            self.new.append(ids[text : text + width])
            drafts = ids[text + width :] if real is None else ids[text + width :][: ids[1]]
            # how many were drafted before such a number only the device knows
            self.drafts.append(self.new[-1][: ids[0]] if is_stray else drafts)
            self.depths.append(min(self.tree.depth, len(self.drafts[-1])))

    def is_sound(self) -> Tensor | None:
        """Return which sequences are not at fault, [B] bool on the device; None: nothing looks at any."""
        if self.rows is None:
            return None
        is_after = cached_arange(self.rows.shape[1], self.rows.device) > self.result.num_accepted[:, None]  # [B, r]
        return (self.rows.isfinite() | is_after).all(1)

    def shorten(self, longest: int) -> None:
        """Count no more drafts than so many, which could be accepted: longer ones were drafted to keep a shape."""
        self.accepted = [min(count, longest) for count in self.accepted]
        if self.tree.is_chain:
            self.drafts = [draft[:longest] for draft in self.drafts]
            self.depths = [min(depth, longest) for depth in self.depths]

    def has_finite_scores(self) -> bool:
        """Return whether the backbone's scores of the faulty sequences are numbers; the host waits."""
        return bool(self.outputs.logits[self.faults].amax(-1).isfinite().all())

    def refusal(self, backbone: object, processing: Processing | None) -> ValueError:
        """Return the error of a sequence that has no token to choose."""
        first = f"sequence {self.faults[0]}"
        if not self.has_finite_scores():
            return ValueError(
                f"{first}: the scores of the backbone itself ({type(backbone).__name__}) are not finite: NaN, +inf, or "
                "-inf for every token; look for a damaged checkpoint, or an overflow in half precision"
            )
        constraints = [] if processing is None else processing.constraints.all
        names = ", ".join(type(processor).__name__ for processor in constraints)
        return ValueError(
            f"{first} has no token to choose: its scores are NaN, or all -inf, after the logits processors, and those "
            f"of the backbone are finite; look for processors that exclude every token (here: {names or 'none'})"
        )


@dataclass
class GenerateSpeculativeOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: transformers' output, and the statistics of the call."""

    speculation: Speculation | None = None


class Results:
    """The sequences of one call (`tokens`), which of them have ended (`done`), and what is returned of them."""

    def __init__(self, plan: Plan, target: Target) -> None:
        prompt, config = plan.prompt, plan.config
        self.plan, self.target, self.session, self.config = plan, target, plan.session, config
        self.streamer, self.pad = plan.call.streamer, plan.draft_options.pad
        accepted, drafts, depths = ([[] for _ in prompt] for _ in range(3))
        schedule = "constant" if plan.schedule is None else plan.draft_options.schedule
        self.statistics = Speculation(accepted, drafts, 1, rows_depths=depths, schedule=schedule)
        self.table = traits_of(plan.call.backbone).table
        self.tokens, self.streamed, self.done = Sequences(prompt), prompt.shape[1], [False] * len(prompt)
        is_recorded = config.output_scores or config.output_logits or config.output_hidden_states
        self.records = Records(config, len(prompt)) if config.return_dict_in_generate and is_recorded else None
        self.stopping = Stopping(plan.criteria, self.pad, self.records and self.records.scores_of)
        # columns of the cache without ids: embeddings, or an earlier call's
        self.unwritten = target.mask.shape[1] - prompt.shape[1] if target.has_columns else 0
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

    def write(self, cycle: Cycle) -> Cycle:
        """Write new tokens, and what the host reads of a cycle."""
        self.tokens.write(cycle.result.tokens)
        rows = self.plan.verifier.path_rows(cycle.result)
        if self.plan.draft_options.processors and cycle.fed.auxiliary is not None:  # which may make numbers of NaN
            largest = cycle.outputs.logits.amax((1, 2))[:, None]  # [B, 1]
            rows = largest if rows is None else rows + largest
        cycle.write(rows)
        return cycle

    def take(self, cycle: Cycle, is_prefill: bool = False) -> NewTokens:
        """Add verified tokens to the sequences, records and statistics, cut where sequences end, and return them."""
        before, accepted = self.done, cycle.accepted
        verified = [ids[: count + 1] for ids, count in zip(cycle.new, accepted)]
        if self.records is not None:
            counts = [count + 1 for count in accepted]
            path = cycle.result, cycle.tree
            scores = TargetOutput(cycle.scores).along(*path).logits
            self.records.add(cycle.outputs.along(*path), scores, counts, is_prefill)
        counts, self.done = self.stopping.cut(self.tokens, verified, before)
        self.tokens.done = self.done
        new_tokens = NewTokens(counts, self.tokens.ids.device)
        if self.records is not None:
            self.records.cut([n + count for n, count in zip(self.tokens.num_new, counts)])
        if not is_prefill:
            self.statistics.count(accepted, counts, self.done, cycle.drafts, cycle.depths)
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
        if self.stopping.in_step:  # criteria ended sequences that had run ahead
            self.tokens.shorten(self.stopping.ends)
            self.statistics.cut(self.tokens.num_new)
            if self.records is not None:
                self.records.cut(self.tokens.num_new)
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
            **cast(Any, {CACHE: self.target.cache}),
        )

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
