"""The bar of a training: tokens per second, how many of them are not padding, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import ProgressCallback, Trainer, TrainerControl, TrainerState, TrainingArguments


class TokenProgress(ProgressCallback):
    """`Trainer`'s own bar, which says the time that is left, with tokens per second and the share of useful ones.

    Tokens are those of all steps since the bar was last written, over all processes as far as each has as many as this
    one. Evaluations and checkpoints do not count.
    """

    seconds_between = 1.0
    """An accelerator waits once in that time, for the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._restart()

    @classmethod
    def replace_bar(cls, trainer: Trainer) -> TokenProgress | None:
        """Replace a trainer's own bar; return the new one, or None where it has none, or one of a notebook."""
        own = next((each for each in trainer.callback_handler.callbacks if type(each) is ProgressCallback), None)
        if own is None:
            return None
        trainer.remove_callback(own)
        bar = cls()
        trainer.add_callback(bar)
        return bar

    def count(self, inputs: Mapping[str, Any]) -> None:
        """Count the tokens of a micro-batch; those that its `attention_mask` leaves out are padding."""
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if isinstance(ids, Tensor):
            self._tokens += ids.numel()
            if isinstance(mask, Tensor) and mask.shape == ids.shape:
                self._useful = self._useful + mask.sum()
            else:
                self._useful += ids.numel()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar."""
        super().on_train_begin(args, state, control, **kwargs)
        self._restart()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the bar."""
        seconds = time.monotonic() - self._since
        if self.training_bar is not None and self._tokens and seconds >= self.seconds_between:
            rate, share = self._tokens * args.world_size / seconds, int(self._useful) / self._tokens
            self.training_bar.set_postfix_str(f"{rate:,.0f} tokens/s, {share:.0%} useful", refresh=False)
            self._restart()
        super().on_step_end(args, state, control, **kwargs)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the bar of the evaluation."""
        super().on_evaluate(args, state, control, **kwargs)
        self._restart()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the time of a checkpoint out."""
        self._restart()

    def _restart(self) -> None:
        self._since, self._tokens = time.monotonic(), 0
        self._useful: Tensor | int = 0
