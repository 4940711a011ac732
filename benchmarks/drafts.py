"""Drafts that need no training, beside transformers' own: tokens per call of the backbone, on Python code.

    python benchmarks/drafts.py
    python benchmarks/drafts.py --steps 2000 --prompts 64 --new-tokens 256

Two byte-level models are trained on the standard library of the Python that runs this: a backbone, and an assistant of
half its width and layers. Every way of drafting continues the same unseen code greedily, alone; ours do so in batches,
too. All must write the same text, and *tokens per call* counts forward passes of the backbone, prompts included.
transformers offers prompt lookup and assisted generation for batch 1 only.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead.generation.drafters.assistant import AssistantDrafter
from tokenahead.generation.drafters.ngram import NgramDrafter

LENGTH = 256
Run = Callable[..., torch.Tensor]


def code() -> torch.Tensor:
    """The bytes of the standard library, file by file, [N] int64."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"\0".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def model_of(width: int, layers: int) -> LlamaForCausalLM:
    """Random weights over bytes."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 32, max_position_embeddings=2048,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, text: torch.Tensor, steps: int, name: str) -> LlamaForCausalLM:
    """Learns the text with AdamW, a linear decay and batches of 16."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, steps)
    generator = torch.Generator().manual_seed(0)
    for _ in track(range(steps), description=f"training the {name}", transient=True):
        starts = torch.randint(0, len(text) - LENGTH, (16,), generator=generator).tolist()
        batch = torch.stack([text[start : start + LENGTH] for start in starts])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
    return model.eval()


class Counted:
    """Calls of a backbone.

    Args:
        model: The backbone.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model, self.calls = model, 0
        model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def tokens_per_call(self, batches: list[torch.Tensor], new: int, **options: Any) -> tuple[float, torch.Tensor]:
        """New tokens per row and call, and the texts of all rows [P, L + new]."""
        self.calls = 0
        common = dict(max_new_tokens=new, do_sample=False) | options
        texts = [self.model.generate(ids, attention_mask=torch.ones_like(ids), **common) for ids in batches]
        return new * len(batches) / self.calls, torch.cat(texts)


def measure(
    backbone: LlamaForCausalLM, assistant: LlamaForCausalLM, prompts: torch.Tensor, arguments: argparse.Namespace
) -> list[tuple[str, float, bool]]:
    """Name, tokens per call, and whether the texts are those of plain decoding, of every way to draft."""
    counted, new = Counted(backbone), arguments.new_tokens
    alone, together = prompts.split(1), prompts.split(arguments.batch)
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = arguments.assisted, "constant"
    settings.assistant_confidence_threshold = 0.0
    lookup = dict(prompt_lookup_num_tokens=arguments.lookup, max_matching_ngram_size=3)
    chain, tree = (NgramDrafter(3, arguments.lookup, branches).attach(backbone) for branches in (1, 3))
    smaller = AssistantDrafter(assistant, arguments.assisted).attach(backbone)
    many = f"batch {arguments.batch}"
    ways = [
        ("transformers: prompt lookup", alone, lookup),
        ("n-grams", alone, {"assistant_model": chain}),
        ("n-grams, 3 branches", alone, {"assistant_model": tree}),
        (f"n-grams, {many}", together, {"assistant_model": chain}),
        ("transformers: assisted", alone, {"assistant_model": assistant}),
        ("assistant", alone, {"assistant_model": smaller}),
        (f"assistant, {many}", together, {"assistant_model": smaller}),
    ]
    _, plain = counted.tokens_per_call(list(together), new)
    found = []
    for name, batches, options in track(ways, description="decoding", transient=True):
        rate, texts = counted.tokens_per_call(list(batches), new, **options)
        found.append((name, rate, torch.equal(texts, plain)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="training steps of both models")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--lookup", type=int, default=10, help="tokens of a looked-up draft")
    parser.add_argument("--assisted", type=int, default=5, help="tokens of an assistant's draft")
    parser.add_argument("--batch", type=int, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    text = code()
    unseen, seen = text[: len(text) // 10], text[len(text) // 10 :]
    backbone = train(model_of(arguments.width, arguments.layers), seen, arguments.steps, "backbone")
    assistant = train(model_of(arguments.width // 2, arguments.layers // 2), seen, arguments.steps, "assistant")
    starts = torch.linspace(0, len(unseen) - arguments.prompt_length, arguments.prompts).long()
    prompts = torch.stack([unseen[start : start + arguments.prompt_length] for start in starts.tolist()])
    table = Table("drafts", "tokens per call", "text of plain decoding", title="greedy, on Python's standard library")
    for name, rate, is_same in measure(backbone, assistant, prompts, arguments):
        table.add_row(name, f"{rate:.2f}", "yes" if is_same else "no")
    Console().print(table)


if __name__ == "__main__":
    main()
