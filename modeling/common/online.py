"""Drafters that learn while they draft: verified sequences are stored, and an optimizer takes small steps on them."""

from __future__ import annotations

import time
import warnings
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import logging

from ...configuration.fields import check_values
from ...generation.backbone.wrapped_models import is_unit, readable
from ...generation.call.sequences import Speculation
from ...generation.contract import DraftSession, Recorder
from ...generation.drafter import BaseDrafter
from ..heads.losses import IGNORE, counted, depth_targets
from .recording import OnlineBuffer, RecordingSession, collate

logger = logging.get_logger(__name__)
_MAX_NORM = 1.0


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

    def check_policy(self) -> None:
        """Refuse a policy that has other sizes than the drafter."""

    def learning_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss on recorded sequences (`collate`), from which the drafting part learns."""
        return self(**batch).loss

    def learn_while_decoding(self, every: int = 4096, budget: float = 0.1, **options: Any) -> OnlineLearner:
        """Learn from now on from what calls of `generate` with this drafter verify; outputs keep their distribution.

        Args:
            every: New tokens after which the drafter learns, at the end of a call.
            budget: The largest share of the time of calls that learning may take.
            **options: Further arguments of `OnlineLearner`.

        Returns:
            The learner, with the `curve` of acceptance, `freeze` and `unfreeze`.
        """
        return OnlineLearner(self, every=every, budget=budget, **options)


class OnlineLearner(Recorder):
    """Stores the tokens that calls with a drafter verify, and trains the drafter on them with its own loss.

    Nothing but the drafter's own parameters changes, so that the output keeps its distribution. Learning costs no
    forward of the backbone: states and ids are those of the verified tokens. Log-probabilities in a loss are computed
    from these states by the backbone's present unembedding.

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

    def session(self, session: DraftSession) -> DraftSession:
        return RecordingSession(session, self.drafter.learning_layers, self.drafter.attends, self.buffer, self._finish)

    def _finish(self, statistics: Speculation, seconds: float) -> None:
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
        self.drafter.check_policy()
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
        if not (self.is_shared and distributed.is_available() and distributed.is_initialized()):
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
            if self.is_shared and distributed.is_available() and distributed.is_initialized():
                for parameter in self.parameters:
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
