"""GRPO with TRL's trainer and several drafters: tokens per call while the policy learns, and how far it has moved.

    python benchmarks/grpo.py --model HuggingFaceTB/SmolLM2-135M-Instruct --head model_cards/smollm2/eagle1 \\
        --prompts gsm8k_train.jsonl --folder grpo

Every drafter has a separate run of the same policy (bfloat16, adapters of peft) on the same prompts, a group of 8
answers per step, sampled at temperature 1. The reward is the share of an answer's words that are short, each counted
once: it differs within almost every group from the start. Drafters take turns of some steps, and a run that is stopped
goes on from its last checkpoints. Times are those of the processor, in which other processes do not count.

`grpo.json` and the table that is printed have tokens per call and sequence (accepted drafts per
verification, and one), the divergence from the start per token that TRL estimates, and, by how many sequences of a
group are there already, what `SuffixDrafter` accepts of the next one: its drafts are certain tokens, so that they are
accepted as far as the text that was written has them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from measuring import accepted_of, markdown
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tokenahead import DrafterCascade, EagleHead, SuffixDrafter
from tokenahead.generation.lookups.suffix import Reader
from tokenahead.training import OnlineDrafterTraining
from tokenahead.training.evaluation.prompts import read_prompts
from tokenahead.training.utils import replace_file

DRAFTERS = ("none", "static", "online", "suffix", "cascade")
TEXTS = ("prompt", "answers")
LOGGED = ("kl", "reward", "reward_std", "frac_reward_zero_std", "completions/mean_length")
SHORT, WORDS, PARTS = 4, 24, 5


def short_words(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """Return the share of the words of each answer that are short; a word counts where it stands first."""
    found = []
    for (message,) in completions:
        words = [word.strip(".,;:!?\"'()*").lower() for word in message["content"].split()]
        found.append(len({word for word in words if 0 < len(word) <= SHORT}) / max(1, len(words)))
    return found


class TimedTraining(OnlineDrafterTraining):
    """Adds up the processor's time of what the drafter learns."""

    seconds = 0.0

    def update(self) -> float | None:
        """Learn, by the clock."""
        started = time.process_time()
        loss = super().update()
        self.seconds += time.process_time() - started
        return loss


class Notes(TrainerCallback):
    """Notes what every step did with a drafter, and what `online` learned."""

    def __init__(self, name: str, online: TimedTraining | None) -> None:
        self.name, self.online = name, online
        self.steps: list[dict[str, Any]] = []
        self.rollout: dict[str, object] = {}
        self.started = time.process_time()

    def noted(self, generate: Callable[..., object]) -> Callable[..., torch.Tensor]:
        """Return `generate`, with what it accepted, wrote and took noted."""

        def noting(**kwargs: object) -> torch.Tensor:
            started = time.process_time()
            out: Any = generate(**kwargs, return_dict_in_generate=True)
            accepted = accepted_of(out)
            prompt = cast(torch.Tensor, kwargs["input_ids"])
            self.rollout = {
                "tokens_per_call": 1 + sum(accepted) / max(1, len(accepted)),
                "rollout_seconds": time.process_time() - started,
                "prompt": prompt[0].tolist(),
                "answers": out.sequences[:, prompt.shape[1] :].tolist(),
            }
            return out.sequences

        return noting

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a step."""
        log = state.log_history[-1]
        if "kl" not in log:
            return
        now, learning = time.process_time(), 0.0 if self.online is None else self.online.seconds
        shown = {"step": state.global_step, **{name: log[name] for name in LOGGED}}
        shown |= {"step_seconds": now - self.started, "learning_seconds": learning}
        print(self.name, json.dumps(shown | {"tokens_per_call": self.rollout["tokens_per_call"]}), flush=True)
        self.steps.append(shown | self.rollout)
        self.started = now
        if self.online is not None:
            self.online.seconds = 0.0


def train(name: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the steps of the run with a drafter, which a file keeps."""
    written = arguments.folder / f"{name}.json"
    if written.exists():
        return json.loads(written.read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    # of a part of the states a frozen unembedding would be copied for every row
    model.lm_head.register_forward_pre_hook(lambda _, given: (given[0].contiguous(),))
    head = EagleHead.from_pretrained(arguments.head) if name in ("static", "online", "cascade") else None
    suffixes = SuffixDrafter() if name in ("suffix", "cascade") else None
    made = [drafter for drafter in (suffixes, head) if drafter is not None]
    if made:
        (made[0] if len(made) == 1 else DrafterCascade(made)).attach(model, default=True)
    online = None
    if head is not None and name != "static":
        rate, rows, every = arguments.drafter_rate, arguments.rows, arguments.every
        online = TimedTraining(head, rate, rows, capacity=2**12, every_steps=every)
    notes = Notes(name, online)
    config = GRPOConfig(
        str(arguments.folder / name), max_steps=arguments.steps, num_generations=arguments.group, bf16=False,
        use_cpu=arguments.cpu, per_device_train_batch_size=arguments.group, max_completion_length=arguments.tokens,
        beta=arguments.beta, learning_rate=arguments.rate, lr_scheduler_type="constant", gradient_checkpointing=False,
        logging_steps=1, save_strategy="no", report_to=[], seed=0, disable_tqdm=True,
    )  # fmt: skip
    turns = [prompt.turns[0] for prompt in read_prompts(arguments.prompts)[0]]
    asked = [[{"role": "user", "content": turn}] for turn in turns if len(turn.split()) <= WORDS]
    layers = range(model.config.num_hidden_layers // 2, model.config.num_hidden_layers)
    adapters = LoraConfig(
        r=16, lora_alpha=32, target_modules=["o_proj", "down_proj"], layers_to_transform=[*layers],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    trainer = GRPOTrainer(
        cast(PreTrainedModel, model), short_words, config, Dataset.from_dict({"prompt": asked}),
        processing_class=tokenizer, peft_config=adapters, callbacks=[each for each in (online, notes) if each],
    )  # fmt: skip
    policy = cast(PreTrainedModel, trainer.model)
    vars(policy)["generate"] = notes.noted(policy.generate)
    trainer.train()
    replace_file(written, json.dumps(notes.steps))
    return notes.steps


def accepted_along(drafter: SuffixDrafter, text: list[int], begun: int) -> list[int]:
    """Return the accepted drafts of each verification while a text is written whose first `begun` tokens are there."""
    reader, accepted = Reader(), list[int]()
    given = drafter.num_tokens, drafter.num_tokens, 1, drafter.factor, drafter.least
    drafter.table.read([reader], [text[:begun]])
    while begun < len(text):
        draft = [token for token, _ in drafter.table.draft(reader.tail, *given)[0]][: len(text) - begun]
        wrong = (index for index, token in enumerate(draft) if token != text[begun + index])
        accepted.append(next(wrong, len(draft)))
        drafter.table.read([reader], [text[begun : begun + accepted[-1] + 1]])
        begun += accepted[-1] + 1
    return accepted


def by_finished(steps: list[dict[str, Any]], keeps: bool, end: int) -> list[float]:
    """Return tokens per call of the next answer of a group, by how many of its answers have been read whole.

    Args:
        steps: Of a run, with prompts and answers.
        keeps: Whether earlier groups are remembered.
        end: The token that ends an answer.
    """
    kept = SuffixDrafter()
    found: list[list[int]] = [[] for _ in steps[0]["answers"]]
    for step in steps:
        texts = [answer[: answer.index(end) + 1] if end in answer else answer for answer in step["answers"]]
        drafter = kept if keeps else SuffixDrafter()
        for accepted, text in zip(found, texts):  # the first token is the prompt's forward's
            accepted += accepted_along(drafter, step["prompt"] + text, len(step["prompt"]) + 1)
    return [1 + statistics.mean(accepted) for accepted in found]


def report(runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what `grpo.json` holds, and print its tables."""
    given = vars(arguments).items()
    settings = {name: Path(value).name if isinstance(value, str | Path) else value for name, value in given}
    shown = {name: [{key: float(f"{value:.5g}") for key, value in step.items() if key not in TEXTS} for step in run]
             for name, run in runs.items()}  # fmt: skip
    shares, differing, finished, part = {}, {}, {}, max(1, arguments.steps // PARTS)
    cuts, rows = range(0, arguments.steps, part), []
    for key, name in itertools.product(("tokens_per_call", "kl", "reward"), shown):
        means = (statistics.mean(step[key] for step in shown[name][at : at + part]) for at in cuts)
        rows.append([f"{key}, {name}", *(f"{mean:.2f}" for mean in means)])
    print(markdown(["means over steps", *(f"{at + 1} to {min(at + part, arguments.steps)}" for at in cuts)], rows))
    for name, run in shown.items():
        differing[name] = statistics.mean(1 - step["frac_reward_zero_std"] for step in run)
        shares[name] = sum(step["learning_seconds"] for step in run) / sum(step["step_seconds"] for step in run)
        print(f"{name}: {differing[name]:.0%} of the groups differ, {shares[name]:.1%} of the time is learning")
    if "suffix" in runs:
        end = AutoTokenizer.from_pretrained(arguments.model).eos_token_id
        for name, keeps in (("of this group alone", False), ("and of earlier groups", True)):
            finished[name] = by_finished(runs["suffix"], keeps, end)
    found = {"settings": settings, "threads": torch.get_num_threads(), "groups_that_differ": differing}
    return found | {"share_of_learning": shares, "suffix_by_answers": finished, "steps": shown}


def main() -> None:
    """Run what is missing, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="as `tokenahead bench` reads them")
    parser.add_argument("--folder", type=Path, default=Path("grpo"))
    parser.add_argument("--drafters", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--rate", type=float, default=1e-3, help="of the policy")
    parser.add_argument("--beta", type=float, default=1e-3, help="of the divergence from the start in the loss")
    parser.add_argument("--drafter-rate", type=float, default=5e-4)
    parser.add_argument("--rows", type=int, default=4, help="sequences of an update of the drafter")
    parser.add_argument("--every", type=int, default=2, help="steps of the policy between two updates of the drafter")
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    runs = {name: train(name, arguments) for name in arguments.drafters}
    found = report(runs, arguments)
    replace_file(arguments.folder / "grpo.json", json.dumps(found).replace("}, {", "},\n{"))


if __name__ == "__main__":
    main()
