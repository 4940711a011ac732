"""GRPO whose rollouts are drafted by a head that learns beside the policy, with rewards that differ from the start.

python examples/grpo.py HuggingFaceTB/SmolLM2-135M-Instruct model_cards/smollm2/eagle1 sums
"""

import random
import re
import sys
from collections.abc import Callable

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tokenahead import EagleHead
from tokenahead.training import OnlineDrafterTraining

THINGS = ("rivers", "trees", "tools", "fruits", "cities", "games", "colours", "animals")
NUMBER, ITEM = re.compile(r"-?\d+"), re.compile(r"(-|\*|\d+\.) ")

Reward = Callable[..., list[float]]


def near_200_characters(completions: list, **_: object) -> list[float]:
    """Return the share by which each answer misses 200 characters, as a negative number."""
    return [-abs(len(message["content"]) - 200) / 200 for (message,) in completions]


def is_list(completions: list, **_: object) -> list[float]:
    """Return the share of the lines of each answer that are items of a list."""
    answers = ([line for line in message["content"].splitlines() if line.strip()] for (message,) in completions)
    return [sum(bool(ITEM.match(line)) for line in lines) / max(1, len(lines)) for lines in answers]


def near_the_sum(completions: list, answer: list[str], **_: object) -> list[float]:
    """Return how close the last number of each answer is to the right one: 1 there, and 0 without a number."""
    last = (NUMBER.findall(message["content"])[-1:] for (message,) in completions)
    return [1 / (1 + abs(int(found[0]) - int(right))) if found else 0.0 for found, right in zip(last, answer)]


def prompts(task: str) -> tuple[Dataset, Reward]:
    """Return what is asked, and the reward of answers.

    Args:
        task: "length" or "list", about a few things; "sums": of two numbers of two digits.

    Raises:
        ValueError: Another task.
    """
    answers: dict[str, list[str]] = {}
    if task == "sums":
        numbers, reward = random.Random(0), near_the_sum
        pairs = [(numbers.randint(10, 99), numbers.randint(10, 99)) for _ in range(512)]
        asked = [
            f"State the final answer to the following arithmetic problem: {one} + {other} =" for one, other in pairs
        ]
        answers = {"answer": [str(one + other) for one, other in pairs]}
    elif task in ("length", "list"):
        wanted, reward = ("a few sentences", near_200_characters) if task == "length" else ("a list of facts", is_list)
        asked = [f"Write {wanted} about {thing}." for thing in THINGS]
    else:
        raise ValueError(f"task={task!r}: 'length', 'list' or 'sums'")
    messages = [[{"role": "user", "content": question}] for question in asked]
    return Dataset.from_dict({"prompt": messages} | answers), reward


def main(model_name: str, head_name: str, task: str = "length", folder: str = "policy") -> None:
    """Train adapters of the policy, and the head beside it, and leave both in a directory."""
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.bfloat16)
    head = EagleHead.from_pretrained(head_name).attach(model, default=True)
    data, reward = prompts(task)
    # one token is drafted at a time: in a batch every drafted position is paid for eight times
    config = GRPOConfig(
        folder, num_generations=8, per_device_train_batch_size=8, max_completion_length=64, learning_rate=1e-4,
        gradient_checkpointing=False, generation_kwargs={"num_assistant_tokens": 1},
        bf16=torch.accelerator.is_available(),
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward, config, train_dataset=data, peft_config=LoraConfig(task_type="CAUSAL_LM"),
        callbacks=[OnlineDrafterTraining(head, learning_rate=1e-4, every_steps=4)],
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    head.save_pretrained(f"{folder}/head")


if __name__ == "__main__":
    main(*sys.argv[1:])
