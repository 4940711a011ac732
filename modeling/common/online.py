"""Drafters that learn while they draft: verified sequences are stored, and an optimizer takes small steps on them.

A recording session wraps the drafter's own, and keeps states and ids of the new tokens of every cycle: no further
forward, no wait for the device. At the end of a call each sequence is a row as `training.features` makes them, so that
losses are those of stored features.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import logging

from ...configuration.fields import check_values
from ...generation.attach import AttachableDrafter
from ...generation.backbone.wrapped_models import is_unit, readable
from ...generation.call.sequences import Sequences, Speculation
from ...generation.contract import (
    CacheView,
    DraftSession,
    DraftTree,
    PrefillOutput,
    Recorder,
    TargetOutput,
    VerificationResult,
    joined_layers,
)
from ...generation.drafter import BaseDrafter
from ...generation.tensors.masks import to_device
from ..heads.losses import IGNORE, counted, depth_targets

logger = logging.get_logger(__name__)
_MAX_NORM = 1.0
STATES = "cached_states"
"""The states' column in training data, and the keyword of the `forward` of drafters."""
SUMMARIES = "cached_summaries"
"""The same of the backbone's logits (`logit_summaries`), for drafters with a draft vocabulary."""
Row = dict[str, Tensor]
"""A sequence: N + 1 `input_ids`, `labels` (-100 where the backbone did not choose) and `position_ids`; their states,
[N + 1, S, d], of which the last one, of a token that no forward has read, is 0."""


def collate(sequences: Sequence[Row]) -> Row:
    """Return a batch of sequences with stored states, padded on the right; with `attention_mask` if lengths differ."""
    lengths, fills, pad = {len(each["input_ids"]) for each in sequences}, {"labels": IGNORE}, nn.utils.rnn.pad_sequence
    batch = {name: pad([each[name] for each in sequences], True, fills.get(name, 0)) for name in sequences[0]}
    if len(lengths) > 1:
        batch["attention_mask"] = pad([torch.ones_like(each["input_ids"]) for each in sequences], True)
    return batch


class OnlineBuffer:
    """The newest sequences with the backbone's states of them.

    Attributes:
        capacity: Tokens that it holds; a longer sequence loses its beginning.
        rows: The sequences, the oldest first.
    """

    def __init__(self, capacity: int = 2**14) -> None:
        if not isinstance(capacity, int) or capacity < 2:
            raise ValueError(f"capacity={capacity!r} must be a whole number of at least 2 tokens")
        self.capacity, self.rows = capacity, list[Row]()
        self._lock = Lock()

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Add sequences, in the place of the oldest ones."""
        with self._lock:
            held, left = list[Row](), self.capacity
            for row in reversed([*self.rows, *rows]):
                size = min(left, len(row["input_ids"]) - 1)
                if 0 < size < len(row["input_ids"]) - 1:
                    row = {name: each[-size - 1 :].clone() for name, each in row.items()}
                    row["labels"][0] = IGNORE
                if size:
                    held.append(row)
                left -= size
            self.rows = held[::-1]

    def sample(self, count: int, generator: torch.Generator) -> list[Row]:
        """Return up to `count` of the sequences, chosen at random."""
        rows = self.rows
        return [rows[index] for index in torch.randperm(len(rows), generator=generator)[:count].tolist()]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of `load_state_dict`, on the processor."""
        tensors = {f"{number}.{name}": each.cpu() for number, row in enumerate(self.rows) for name, each in row.items()}
        return tensors | {"capacity": torch.tensor(self.capacity)}

    def load_state_dict(self, tensors: dict[str, Tensor], device: torch.device) -> None:
        """Load the sequences of another buffer, of the same capacity."""
        if (capacity := int(tensors["capacity"])) != self.capacity:
            raise ValueError(f"capacity={self.capacity} is not that of the buffer that was saved, {capacity}")
        rows: dict[int, Row] = {}
        for name, tensor in tensors.items():
            number, _, column = name.partition(".")
            if column:
                rows.setdefault(int(number), {})[column] = tensor.to(device)
        self.rows = [rows[number] for number in sorted(rows)]


class RecordingSession(DraftSession):
    """A drafter's session that also adds verified tokens and their states to a buffer, as many as it holds.

    Of the prompt only the last state is recorded where drafts depend on no other (`attends`).
    """

    def __init__(self, session: DraftSession, learner: OnlineLearner) -> None:
        self.session, self.learner, self.started = session, learner, time.perf_counter()
        self.layers, self.keeps_prompt = list(learner.drafter.learning_layers), learner.drafter.attends
        self.num_tokens, self.reads_cache = session.num_tokens, session.reads_cache
        self.supports_confidence_threshold = session.supports_confidence_threshold
        self.hidden_layers = joined_layers(session.hidden_layers, self.layers)
        self.priors, self.kinds, self.positions = session.priors, session.kinds, session.positions
        self.states, self.ids, self.counts = list[Tensor](), list[Tensor](), list[list[int]]()

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.view, mask, states = view, view.mask, self._states(outputs.hidden_states)
        batch, width = states.shape[:2]
        capacity = self.learner.buffer.capacity
        count = min(width, max(1, capacity // (2 * batch))) if self.keeps_prompt else 1
        self.real = (mask[:, -width:] if mask is not None else states.new_ones(batch, width)).bool()  # [B, width]
        self.ends = view.counts.clone() if view.has_columns else self.real.sum(1)  # [B], positions of the first token
        self.states, self.left = [states[:, -count:].clone()], capacity
        self.session.begin(outputs, view)

    def _states(self, hidden_states: Sequence[Tensor | None]) -> Tensor:
        """Return the states of the recorded layers, [B, F, S, d]."""
        states = [cast(Tensor, hidden_states[layer]) for layer in self.layers]
        return torch.stack([to_device(state, states[0].device) for state in states], dim=2)  # [B, F, S, d]

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        if not self.ids:
            self.ids.append(tokens.newest(self.states[0].shape[1] + 1))  # with the token that was added first
        return self.session.propose(tokens, length)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        new = self.view.new_tokens
        if new.longest and self.left > 0:
            self.states.append(self._states(outputs.first(new.longest)))
            self.ids.append(result.tokens[:, : new.longest])
            self.counts.append(new.counts)
            self.left -= sum(new.counts)
        self.session.advance(outputs, result)

    def finish(self, statistics: Speculation) -> None:
        self.session.finish(statistics)
        if self.ids:
            with torch.inference_mode(False):
                self.learner.buffer.add(self._rows())
        self.learner.finish(statistics, time.perf_counter() - self.started)

    def _rows(self) -> list[Row]:
        """Return the sequences of the call."""
        states, ids, size = torch.cat(self.states, 1), torch.cat(self.ids, 1), self.states[0].shape[1]
        rows, offsets = list[Row](), [size]  # of the cycles among the columns
        for each in self.states[1:]:
            offsets.append(offsets[-1] + each.shape[1])
        for number, (real, end) in enumerate(zip(self.real[:, -size:].tolist(), self.ends.tolist())):
            prompt = [column for column, is_real in enumerate(real) if is_real]
            counts = [count[number] for count in self.counts]
            new = [start + column for start, count in zip(offsets, counts) for column in range(count)]
            tokens = ids[number, [*prompt, size, *(column + 1 for column in new)]]  # [N + 1]
            labels, first = tokens.clone(), end - len(prompt)
            labels[: len(prompt)] = IGNORE
            own = states[number, [*prompt, *new]]  # [N, S, d]
            positions = torch.arange(first, first + len(tokens), device=ids.device)
            row = {"input_ids": tokens, "labels": labels, "position_ids": positions}
            rows.append(row | {STATES: nn.functional.pad(own, (0, 0, 0, 0, 0, 1))})
        return rows

    def coverage(self, tokens: Tensor) -> float | None:
        return self.session.coverage(tokens)


class OwnLossMixin(nn.Module):
    """A drafter with a loss of its own, with a term per token of its window; it can learn from what its calls verify.

    Trainers of TRL do not ask for it: they pass `fused_lm_head=True`, and compute the loss of the next token.

    Attributes:
        own_trainer: The trainer that trains it.
        silent_part: Name of the part that the loss of others does not change; None: nothing learns from it.
        learns_besides: Whether the caller adds the drafter's own loss to that one.
        learning_layers: The backbone's states that it learns from, as indices of `output_hidden_states`.
        attends: Whether drafts at a position depend on the states of all positions before it.
    """

    own_trainer = "MTPSFTTrainer"
    silent_part: str | None = None
    learns_besides = False
    loss_unit = "head"
    loss_normalization: str = "tokens"
    window: int
    learning_layers: list[int]
    attends: bool
    policy: PreTrainedModel

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `forward`; warn, or refuse where nothing learns, that a trainer computes a loss of its own."""
        if kwargs.get("fused_lm_head") and not self.learns_besides:
            learning = f"train {type(self).__name__} with {self.own_trainer}"
            if self.silent_part is None:
                raise RuntimeError(f"a drafter learns from its own loss alone: {learning}")
            drafter: nn.Module = getattr(self, self.silent_part)
            if self.training and torch.is_grad_enabled() and any(p.requires_grad for p in drafter.parameters()):
                logger.warning_once(f"the loss of the next token leaves the drafter as it is: {learning}, or freeze it")
        return super().__call__(*args, **kwargs)

    @property
    def num_losses(self) -> int:
        return self.window

    @property
    def counts_sequences(self) -> bool:
        """Whether every sequence counts by itself, so that rows must not be joined."""
        return self.loss_normalization == "paper"

    def loss_counts(
        self,
        labels: Tensor | None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        shift_labels: Tensor | None = None,
    ) -> Tensor:
        """Return the targets per depth of a batch, [n] int64; arguments as for `forward`."""
        targets = depth_targets(labels, self.num_losses, attention_mask, position_ids, shift_labels)
        return counted(targets != IGNORE, self.loss_normalization)

    @property
    def drafting_part(self) -> nn.Module:
        """The module that learns."""
        return self

    def learning_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss on recorded sequences (`collate`), from which the drafting part learns."""
        return self(**batch).loss

    def learn_while_decoding(self, every: int = 4096, budget: float = 0.1, **options: Any) -> OnlineLearner:
        """Learn from now on from what calls of `generate` with this drafter verify; outputs keep their distribution.

        Args:
            every: New tokens after which the drafter learns, at the end of a call.
            budget: The largest share of the time of calls that learning may take.
            **options: Further arguments of `OnlineLearner`, which is returned.
        """
        return OnlineLearner(self, every=every, budget=budget, **options)


class OnlineLearner(Recorder):
    """Stores the tokens that calls with a drafter verify, and trains the drafter on them with its own loss.

    Nothing but the drafter's own parameters changes, so that the output keeps its distribution. Learning costs no
    forward of the backbone: a loss computes log-probabilities from stored states by its present unembedding.

    Args:
        drafter: Attached `MTPHeads`, `EagleHead` or `BlockDrafter`, an `EvaByteForMTPC`, whose drafting heads alone
            learn, or a `DeepSeekMTP`, whose modules do; its loss options decide what it learns.
        learning_rate: Of AdamW, whose weights and moments are float32.
        rows: Sequences of an update, chosen at random from those that are stored.
        updates: Steps of the optimizer each time that it learns.
        capacity: Tokens that are stored.
        seed: Of the choice.
        every: Learn as soon as a call ends with this number of new tokens since the last time; None: in `update` alone.
        budget: The largest share of the time of calls that learning by `every` may take.

    Attributes:
        buffer: The stored tokens (`OnlineBuffer`).
        curve: An entry for each time that it learned: `updates` and `tokens` so far, and, since the last entry,
            `accepted` drafts per verification (None: there was none) and the last `loss`.

    Example:
        >>> learner = OnlineLearner(head)
        >>> out = model.generate(**inputs, assistant_model=head, do_sample=True)
        >>> learner.update()
    """

    is_shared = False
    """Whether gradients are averaged over processes, which must then all learn at the same time."""

    def __init__(
        self,
        drafter: OwnLossMixin,
        learning_rate: float = 1e-4,
        rows: int = 8,
        updates: int = 1,
        capacity: int = 2**14,
        seed: int = 0,
        every: int | None = None,
        budget: float = 0.1,
    ) -> None:
        if getattr(drafter, "learning_layers", None) is None:
            raise TypeError(f"drafter: a {type(drafter).__name__} does not learn from a backbone's states")
        self.recorded = cast(BaseDrafter, drafter)
        if self.recorded.recorder is not None:
            raise ValueError(f"drafter: this {type(drafter).__name__} learns online already; freeze() that learner")
        self.learning_rate, self.rows, self.updates = learning_rate, rows, updates
        self.every, self.budget = every, budget
        counts = dict.fromkeys(("rows", "updates", *(() if every is None else ("every",))), "[1, inf)")
        check_values(self, {}, counts | {"learning_rate": "[0, inf)", "budget": "[0, 1]"})
        self.drafter, self.buffer = drafter, OnlineBuffer(capacity)
        self.generator = torch.Generator().manual_seed(seed)
        self.curve: list[dict[str, float | None]] = []
        self.part, self.masters = drafter.drafting_part, list[Tensor]()
        self.parameters = [parameter for parameter in self.part.parameters() if parameter.requires_grad]
        self._check_learns()
        self.optimizer: torch.optim.Optimizer | None = None
        self.tokens = self._learned_at = self.done_updates = self._accepted = self._verified = 0
        self._decoding_seconds = self._learning_seconds = 0.0
        self.unfreeze()

    @property
    def is_frozen(self) -> bool:
        """Whether nothing is stored or learned."""
        return self.recorded.recorder is not self

    def freeze(self) -> None:
        """Store and learn nothing more, until `unfreeze`."""
        if not self.is_frozen:
            self.recorded.recorder = None

    def unfreeze(self) -> None:
        """Store and learn again."""
        self.recorded.recorder = self

    @property
    def _is_spread(self) -> bool:
        return self.is_shared and distributed.is_available() and distributed.is_initialized()

    def session(self, session: DraftSession) -> DraftSession:
        return RecordingSession(session, self)

    def finish(self, statistics: Speculation, seconds: float) -> None:
        """Count the tokens of a call, and learn where that is due."""
        self.tokens += statistics.new_tokens
        self._accepted += sum(map(sum, statistics.rows_accepted))
        self._verified += sum(map(len, statistics.rows_accepted))
        self._decoding_seconds += seconds
        is_due = self.every is not None and self.tokens - self._learned_at >= self.every
        if not is_due or self._learning_seconds > self.budget * self._decoding_seconds:
            return
        try:
            self.update()
        except ValueError as error:  # the call's output must not be lost
            self.freeze()
            warnings.warn(f"This {type(self.drafter).__name__} learns no more: {error}", UserWarning, stacklevel=2)

    def update(self) -> float | None:
        """Learn from some of the stored sequences, and return the last loss; None: frozen, or nothing is stored."""
        if self.is_frozen:
            return None
        self._check_learns()
        if isinstance(self.drafter, AttachableDrafter):
            self.drafter.check_backbone(self.drafter.policy)
        started, was_training, loss = time.perf_counter(), self.part.training, None
        self.part.train()
        try:
            with readable(self.drafter.policy), torch.inference_mode(False), torch.enable_grad():
                for _ in range(self.updates):
                    loss = self._step()
        finally:
            self.part.train(was_training)
        self._learning_seconds += time.perf_counter() - started
        self._learned_at = self.tokens
        if loss is not None:
            accepted = self._accepted / self._verified if self._verified else None
            entry = {"updates": self.done_updates, "tokens": self.tokens, "accepted": accepted, "loss": loss}
            self.curve.append(entry)
            self._accepted = self._verified = 0
        return loss

    def _check_learns(self) -> None:
        if not self.parameters or not all(parameter.requires_grad for parameter in self.parameters):
            raise ValueError(f"drafter: parameters of this {type(self.drafter).__name__} are frozen (requires_grad)")
        policy = self.drafter.policy
        is_managed = is_fsdp_managed_module(policy) and not (self.part is self.drafter and is_unit(policy))
        if is_managed or is_deepspeed_zero3_enabled():
            name = type(policy).__name__
            raise ValueError(f"drafter: it cannot learn while {name} is sharded so; with fsdp_version=2 one apart can")

    def _step(self) -> float | None:
        """Take one step of the optimizer; None: no process has a sequence."""
        optimizer = self.prepare()
        sequences = self.buffer.sample(self.rows, self.generator)
        own = self._gradients(sequences) if sequences else ([torch.zeros_like(each) for each in self.masters], 0.0)
        if (averaged := self._averaged(*own, bool(sequences))) is None:
            return None
        *gradients, mean = averaged
        norm = torch.nn.utils.get_total_norm(gradients)
        factor = (_MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
        for master, gradient in zip(self.masters, gradients):
            master.grad = gradient * factor
        optimizer.step()
        optimizer.zero_grad()
        self.publish()
        self.done_updates += 1
        return float(mean)

    def _gradients(self, sequences: list[dict[str, Tensor]]) -> tuple[list[Tensor], float]:
        """Return the gradients of the drafter's parameters alone, in float32, and the loss."""
        like, columns = self.parameters[0], collate(sequences).items()
        batch = {name: each.to(like.device, like.dtype if each.is_floating_point() else None) for name, each in columns}
        loss = self.drafter.learning_loss(batch)
        # not backward(): it would leave gradients on the policy, whose unembedding drafters read
        gradients = zip(torch.autograd.grad(loss, self.parameters, allow_unused=True), self.masters)
        return [torch.zeros_like(m) if each is None else each.to(m.dtype) for each, m in gradients], loss.item()

    def _averaged(self, gradients: list[Tensor], loss: float, has_sequences: bool) -> list[Tensor] | None:
        """Return the mean gradients and loss of the processes that have sequences; None where none has."""
        values = [*gradients, gradients[0].new_tensor(loss)]
        if not self._is_spread:
            return values if has_sequences else None
        flat = torch.cat([*(value.flatten() for value in values), gradients[0].new_tensor([float(has_sequences)])])
        distributed.all_reduce(flat)
        if not flat[-1]:
            return None
        pieces = (flat[:-1] / flat[-1]).split([value.numel() for value in values])
        return [piece.view_as(value) for piece, value in zip(pieces, values)]

    def prepare(self) -> torch.optim.Optimizer:
        """Return the optimizer, made at first with the first process's weights on all of them."""
        if self.optimizer is None:
            for parameter in self.parameters if self._is_spread else ():
                distributed.broadcast(parameter.data, 0)
            self.masters = [
                parameter if torch.finfo(parameter.dtype).bits >= 32 else parameter.detach().float().requires_grad_()
                for parameter in self.parameters
            ]
            self.optimizer = torch.optim.AdamW(self.masters, self.learning_rate, weight_decay=0.0)
        return self.optimizer

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the optimizer's weights into the drafter, where these are rounded."""
        for parameter, master in zip(self.parameters, self.masters):
            if parameter is not master:
                parameter.copy_(master)
