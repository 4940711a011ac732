"""Time of rollouts with drafts against plain ones: a group of 8 sampled answers to one prompt, at temperature 1.

    python benchmarks/rollout_time.py --model HuggingFaceTB/SmolLM2-135M-Instruct --head model_cards/smollm2/eagle3 \\
        --prompts gsm8k_train.jsonl

Plain decoding and all drafters answer every prompt by turns, in one process and in an order that changes, each with the
same number of tokens. `SuffixDrafter` reads on from prompt to prompt, as it does from step to step of a training.
Printed for each drafter: the median over prompts of the ratio of plain seconds to its seconds, with quartiles; a second
plain run of every prompt shows the spread of the machine itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measuring import accepted_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from tokenahead import DrafterCascade, EagleHead, SuffixDrafter
from tokenahead.generation.tensors.wrapped_models import untyped
from tokenahead.training.evaluation.prompts import read_prompts

WORDS = 24


def ways(arguments: argparse.Namespace, model: Any) -> dict[str, dict[str, Any]]:
    """Return the options of `generate` for every way to decode."""
    head, suffixes = EagleHead.from_pretrained(arguments.head), SuffixDrafter()
    drafters = {"eagle": head, "suffix": suffixes, "cascade": DrafterCascade([suffixes, head])}
    found: dict[str, dict[str, Any]] = {"plain": {}, "plain again": {}}
    for name, drafter in drafters.items():
        drafter.attach(model)
        found[name] = {"assistant_model": drafter}
    for name, count in (("eagle", 1), ("eagle", 2), ("suffix", 2), ("cascade", 2)):
        found[f"{name}, {count}"] = {"assistant_model": drafters[name], "num_assistant_tokens": count}
    return found | {"eagle, adaptive": {"assistant_model": head, "num_assistant_tokens_schedule": "adaptive"}}


def main() -> None:
    """Decode, and print ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="as `tokenahead bench` reads them")
    parser.add_argument("--count", type=int, default=4, help="of prompts")
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16).eval().to(device)
    model.generation_config.eos_token_id = None  # all answers have their whole length
    turns = [prompt.turns[0] for prompt in read_prompts(arguments.prompts)[0]]
    turns = [turn for turn in turns if len(turn.split()) <= WORDS][: arguments.count + 1]
    size, decoding = arguments.tokens, ways(arguments, model)
    common = dict(max_new_tokens=size, do_sample=True, top_k=0, return_dict_in_generate=True)
    seconds: dict[str, list[float]] = {name: [] for name in decoding}
    accepted: dict[str, list[int]] = {name: [] for name in decoding}
    for number, turn in enumerate(turns):
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": turn}]] * arguments.group, add_generation_prompt=True, return_tensors="pt",
            return_dict=True,
        ).to(device)  # fmt: skip
        order = [*decoding][number % len(decoding) :] + [*decoding][: number % len(decoding)]
        for name in order:
            torch.manual_seed(number)
            started = time.perf_counter()
            out = untyped(model).generate(**inputs, **common, **decoding[name])
            out.sequences[0, -1].item()
            if number:  # the first prompt warms up
                seconds[name].append(time.perf_counter() - started)
                accepted[name] += accepted_of(out)
    print(json.dumps({"threads": torch.get_num_threads(), "device": device, "prompts": len(turns) - 1}))
    for name, own in seconds.items():
        ratios = sorted(plain / mine for plain, mine in zip(seconds["plain"], own))
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        calls = 1 + statistics.mean(accepted[name] or [0])
        print(f"{name}: {middle:.2f} x plain ({low:.2f} to {high:.2f}), {calls:.2f} tokens per call and sequence")


if __name__ == "__main__":
    main()
