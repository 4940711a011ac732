"""Acceptance while a drafter trains: expected along held-out data at every evaluation, and of generated outputs."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object, send_to_device
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..generation.backbone.wrapped_models import is_sharded, readable
from .batches import at_rest
from .evaluation.decoding import decode, drafting_method, sampled
from .evaluation.drafts import TOP_K, DraftMeasures, has_probs
from .trainer_base import BaseTrainer, drafter_of

_CONSTRAINED = "constrained_accepted"


class AcceptanceCallback(TrainerCallback):
    """Adds acceptance to the metrics of every evaluation, for the log, the best checkpoint and early stopping.

    - `eval_expected_accepted`: drafts that one block verification of decoding at T = 1 is expected to accept along the
      evaluation data, with drafts of the drafter's default length (exact where the data are the backbone's own outputs,
      an approximation elsewhere), and `eval_accepted_1`, ...: the share of verifications that accept at least so many;
      `eval_top_1_draft_1`, `eval_top_5_draft_1`, ...: how often the text's token is the likeliest of draft 1, ..., or
      one of the five likeliest. PTP models, which have no distributions, log `eval_num_correct` instead.
    - where the backbone learns, too, `eval_backbone_loss`, in nats per token of the same data, and
      `eval_constrained_accepted`: the accepted drafts of a checkpoint whose backbone loss is within `tolerance` of the
      best so far, and 0 of others. As `metric_for_best_model` it chooses, among all such checkpoints that are on the
      disk, the one with most accepted drafts. Acceptance alone is refused there: it prefers the worst backbone.
    - `eval_generated_accepted` and `eval_generated_tokens_per_call`: mean accepted drafts per verification, and new
      tokens per call of the backbone, of sampled continuations (T = 1) of held-out rows.

    The random numbers of training are not advanced. Under FSDP1 and DeepSpeed, where parts of a model cannot be called
    on their own, nothing is measured.

    Example:
        >>> args = TrainingArguments("out", eval_strategy="steps", save_strategy="steps", load_best_model_at_end=True,
        ...                          metric_for_best_model="expected_accepted", greater_is_better=True)
        >>> MTPTrainer(heads, args, train_dataset=data, eval_dataset=held_out, callbacks=[AcceptanceCallback()]).train()
    """

    def __init__(
        self,
        rows: int | None = 64,  # of the evaluation data to measure on; None: all
        generate_every: int = 4,  # evaluations; 0: never
        prompts: int = 4,  # held-out rows that are continued
        prompt_tokens: int = 64,
        new_tokens: int = 64,
        seed: int = 0,  # of the samples
        tolerance: float = 0.01,  # nats by which a backbone may be worse than the best one
    ) -> None:
        self.rows, self.generate_every, self.prompts = rows, generate_every, prompts
        self.prompt_tokens, self.new_tokens, self.tolerance = prompt_tokens, new_tokens, tolerance
        self.seed, self._evaluations = seed, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        metric = (args.metric_for_best_model or "").removeprefix("eval_")
        is_acceptance = metric.startswith(("expected_accepted", "accepted_", "generated_"))
        if is_acceptance and has_probs(drafter_of(model)) and _backbone_learns(model):
            raise ValueError(f"metric_for_best_model={metric!r} prefers the worst backbone: choose {_CONSTRAINED!r}")

    def evaluation_metrics(self, trainer: BaseTrainer, prefix: str) -> dict[str, float]:
        """Return the further metrics of an evaluation, their names with a prefix; called by every process."""
        data = trainer.eval_dataset
        data = next(iter(data.values())) if isinstance(data, dict) else data
        has_whole_parts = not trainer.is_fsdp_enabled or trainer.accelerator.is_fsdp2
        if data is None or trainer.is_deepspeed_enabled or not has_whole_parts:
            return {}
        model = drafter_of(trainer.accelerator.unwrap_model(trainer.model))
        metrics: dict[str, float] = {}
        devices = [] if model.device.type == "cpu" else [model.device]
        forks = torch.random.fork_rng(devices, device_type=model.device.type)
        trained = cast(PreTrainedModel, trainer.model)
        # autocast as in training: a drafter may have another dtype than its backbone
        with forks, trainer.accelerator.autocast(), readable(trained), readable(model.policy):
            if has_probs(model):
                metrics |= self._expected(trainer, model, data)
            if self.generate_every and self._evaluations % self.generate_every == 0:
                torch.manual_seed(self.seed)
                metrics |= self._generated(trainer, model, data)
        self._evaluations += 1
        return {f"{prefix}_{name}": value for name, value in metrics.items()}

    def _expected(self, trainer: BaseTrainer, model: Any, data: Any) -> dict[str, float]:
        measures, sharded = DraftMeasures(), any(map(is_sharded, (cast(PreTrainedModel, trainer.model), model.policy)))
        for batch in trainer.get_eval_dataloader(_first(data, self.rows)):
            own = trainer.without_repeats(trainer._prepare_inputs(batch))
            # processes that share weights must call each part equally often: each measures the rows of all
            for each in gather_object([send_to_device(own, "cpu")]) if sharded else [own]:
                measures.add(model, trainer._prepare_inputs(each))
        measures = measures.reduced()
        if not measures.calls:
            return {}
        expected, means = measures.calls["block"], measures.means()
        metrics = {"expected_accepted": expected.tokens_per_call - 1}
        metrics |= {f"accepted_{count}": share for count, share in enumerate(expected.by_position, 1)}
        for k in TOP_K:
            metrics |= {f"top_{k}_draft_{count}": share for count, share in enumerate(means[f"top_{k}"], 1)}
        if _backbone_learns(trainer.model):
            metrics["backbone_loss"] = means["backbone_loss"][0]
            metrics[_CONSTRAINED] = self._constrained(trainer, metrics["backbone_loss"], metrics["expected_accepted"])
        return metrics

    def _constrained(self, trainer: BaseTrainer, loss: float, accepted: float) -> float:
        """Return the constrained metric, and let the trainer's state point to the best checkpoint by it.

        A better backbone may exclude the checkpoint that was the best one, so that an earlier one replaces it.
        """
        args, state = trainer.args, trainer.state
        earlier = [entry for entry in state.log_history if "eval_backbone_loss" in entry]
        bound = min([loss, *(entry["eval_backbone_loss"] for entry in earlier)]) + self.tolerance
        is_allowed, allowed = loss <= bound, {}
        for entry in earlier:
            checkpoint = Path(str(args.output_dir), f"checkpoint-{entry['step']}")
            if entry["eval_backbone_loss"] <= bound and checkpoint.is_dir():
                allowed[int(entry["step"])] = entry["eval_expected_accepted"]
        if (args.metric_for_best_model or "").removeprefix("eval_") == _CONSTRAINED and state.best_metric is not None:
            best = max(allowed, key=lambda step: allowed[step], default=None)
            if best is not None and not (is_allowed and accepted > allowed[best]):
                state.best_global_step, state.best_metric = best, allowed[best]
            elif is_allowed:
                state.best_metric = float("-inf")  # this one will be the best
        return accepted if is_allowed else 0.0

    def _generated(self, trainer: BaseTrainer, model: Any, data: Any) -> dict[str, float]:
        """Generate on every process: each samples the same outputs, so that none waits for another."""
        rows = islice(iter(_first(data, self.prompts)), self.prompts)
        prompts = [torch.as_tensor(row["input_ids"])[None, : self.prompt_tokens].to(model.device) for row in rows]
        method = drafting_method("own", model.policy, model if model.is_apart else None)
        mode = sampled(1.0)
        mode = replace(mode, options=mode.options | {"min_new_tokens": self.new_tokens})
        with at_rest(model), at_rest(method.model), torch.no_grad():
            batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in prompts]
            runs = [decode(method, batch, mode, self.new_tokens) for batch in batches]
        accepted = [count for run in runs for count in run.accepted[0]] if all(run.accepted for run in runs) else []
        if not accepted:
            return {}
        calls = sum(run.forwards for run in runs)
        per_call = sum(run.new_tokens for run in runs) / calls
        return {"generated_accepted": sum(accepted) / len(accepted), "generated_tokens_per_call": per_call}


def _backbone_learns(model: Any) -> bool:
    """Return whether more than the drafter of a trained model learns."""
    drafter = {id(parameter) for part in drafter_of(model).parts().values() for parameter in part.parameters()}
    return any(each.requires_grad and id(each) not in drafter for each in model.parameters())


def _first(data: Any, count: int | None) -> Any:
    """Return the first rows of a dataset of `datasets` or torch."""
    if count is None or not (hasattr(data, "take") or hasattr(data, "__len__")):
        return data
    return data.take(count) if hasattr(data, "take") else torch.utils.data.Subset(data, range(min(count, len(data))))
