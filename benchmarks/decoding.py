"""Plain and speculative decoding side by side, and what a cycle costs beyond the backbone's own forward.

    python benchmarks/decoding.py                         # a random model of the demo's size
    python benchmarks/decoding.py --model tokenahead-demo/model --prompt "def main("
    python benchmarks/decoding.py --batch 1 4 16          # batches of prompts of different lengths
    python benchmarks/decoding.py --batch 16 --processors history --drafter ngram     # a Llama, or any --model
    python benchmarks/decoding.py --batch 16 --processors history --model demo-llama --drafter demo-eagle1

*Cycle overhead* is the time of a whole speculative cycle divided by the time of the bare forward of its n tokens (with
the same cache length and the next-token head), medians of the same run. The cycles are what a call does behind its
first token: `generate` of one token, with the prompt's forward in it, is timed as well and subtracted. On random
weights hardly any greedy draft is accepted. The overhead can still be measured there, and the speed-up with the
adaptive length, which must not fall far below 1; tokens per call and the other speed-ups mean something for trained
models only.

With `--batch`, calls alternate (plain, constant, adaptive), with and without processors that look at the text.
*Forward* is the cost of one backbone call of all drafted tokens relative to one of a single token, at the same batch
and cache: speculation wins where it keeps more tokens per call than that, and the rest of a cycle is small.

With one thread (which `--batch` always has), times are those of the processor, so that other work on the machine
disturbs them less; with more, of the wall clock.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from measuring import by_turns, llama, now, seconds_of, show
from transformers import AutoModelForCausalLM

from tokenahead import EagleHead, EvaByteConfig, EvaByteForMTPC, EvaByteTokenizer, MTPHeads, NgramDrafter
from tokenahead.configuration.cache_names import CACHE, cache_of
from tokenahead.generation import loop

SIZES = {
    "demo": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6},
    "85m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
}
SHARED = {"window_size": 256, "chunk_size": 16, "num_pred_heads": 8, "max_position_embeddings": 32768}
DRAWN: dict[str, Any] = {"do_sample": True, "top_k": 0}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, adaptive": {"do_sample": False, "num_assistant_tokens_schedule": "adaptive"},
    "sampled, block": DRAWN,
    "sampled, token": DRAWN | {"verification": "token"},
    "top-p 0.9": DRAWN | {"top_p": 0.9},
}
OURS = ("verification", "num_assistant_tokens_schedule")
"""Options that plain decoding does not have."""
PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {"do_sample": False},
    "history": {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "sampled": DRAWN,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {"use_mtp": False},
    "constant": {},
    "adaptive": {"num_assistant_tokens_schedule": "adaptive"},
}


COLUMNS = (
    "mode", "plain bytes/s", "speculative bytes/s", "speed-up", "bytes per call", "bare forward ms", "cycle ms",
    "cycle overhead",
)  # fmt: skip


def evabyte(folder: str | None, size: str) -> EvaByteForMTPC:
    """A checkpoint, or random weights of a named size."""
    torch.manual_seed(0)
    config = EvaByteConfig(**SHARED, **SIZES[size])
    model = EvaByteForMTPC.from_pretrained(folder) if folder else EvaByteForMTPC(config)
    model.generation_config.eos_token_id = None
    return model.eval()


def with_drafter(arguments: argparse.Namespace) -> Any:
    """The model asked for, or a random Llama, and the named drafter attached to it."""
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    else:
        model = llama(256, 4, num_key_value_heads=4)
    makers: dict[str, Callable[[], Any]] = {
        "ngram": lambda: NgramDrafter(num_tokens=4),
        "heads": lambda: MTPHeads.from_backbone(model, window=5),
    }
    make = makers.get(arguments.drafter, lambda: EagleHead.from_pretrained(arguments.drafter).eval())
    make().attach(model, default=True)
    return model


@torch.no_grad()
def forward(model: Any, inputs: dict[str, torch.Tensor], length: int) -> Callable[[], None]:
    """Return a forward of some tokens per row behind prompts, which is rolled back each time."""
    cache = cache_of(model(**inputs))
    block = inputs["input_ids"][:, :length].clone()

    @torch.no_grad()
    def call() -> None:
        model(block, **{CACHE: cache}, use_cache=True)
        cache.crop(-length)

    return call


def decode(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[float, Any]:
    """Seconds and output of one `generate`."""
    torch.manual_seed(0)
    start = now()
    out = model.generate(**inputs, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None, **options)
    return now() - start, out


def measure(model: Any, prompt: torch.Tensor, new_tokens: int, rounds: int) -> list[list[str]]:
    """One row per mode; plain and speculative runs alternate, so that a change of load meets both."""
    rows, inputs = [], {"input_ids": prompt}
    for name, options in MODES.items():
        runs = []
        for _ in range(rounds):
            target = {key: value for key, value in options.items() if key not in OURS}
            plain, _ = decode(model, inputs, max_new_tokens=new_tokens, use_mtp=False, **target)
            ours, out = decode(model, inputs, max_new_tokens=new_tokens, **options)
            first = statistics.median(decode(model, inputs, max_new_tokens=1, **options)[0] for _ in range(3))
            half = {"input_ids": out.sequences[:, : prompt.shape[1] + new_tokens // 2]}
            bare = seconds_of(forward(model, half, model.window), 30, warm_up=10)
            stats = out.speculation
            cycle = (ours - first) / (stats.backbone_calls - 1)
            runs.append((plain, ours, bare, cycle, cycle / bare, stats.tokens_per_call))
        plain, ours, bare, cycle, overhead, per_call = (statistics.median(column) for column in zip(*runs))
        cells = (f"{new_tokens / plain:.0f}", f"{new_tokens / ours:.0f}", f"{plain / ours:.2f}", f"{per_call:.2f}")
        rows.append([name, *cells, f"{bare * 1e3:.2f}", f"{cycle * 1e3:.2f}", f"{overhead:.2f}"])
    return rows


def ragged_prompts(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Excerpts of different lengths of a source file, padded on the left."""
    ids = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long() + 64
    starts = torch.linspace(0, max(len(ids) - length, 1) - 1, batch).long().tolist()
    lengths = [length - (7 * row) % (length // 2) for row in range(batch)]
    rows = [ids[start : start + own] for start, own in zip(starts, lengths)]
    padded = torch.stack([torch.nn.functional.pad(row, (length - len(row), 0)) for row in rows])
    mask = torch.tensor([[0] * (length - own) + [1] * own for own in lengths])
    return {"input_ids": padded, "attention_mask": mask}


def measure_batches(model: Any, arguments: argparse.Namespace) -> list[list[str]]:
    """Rows of plain decoding and of both schedules, by turns, for every batch size and kind of processors."""
    rows = []
    for batch in arguments.batch:
        inputs = ragged_prompts(batch, arguments.prompt_length)
        window = model.window if isinstance(model, EvaByteForMTPC) else 5
        costs = by_turns({str(length): forward(model, inputs, length) for length in (1, window)}, 40)
        for kind in arguments.processors:
            options = {"max_new_tokens": arguments.new_tokens} | PROCESSORS[kind]
            ways = {name: partial(decode, model, inputs, **options, **own) for name, own in SCHEDULES.items()}
            stats = {name: getattr(run()[1], "speculation", None) for name, run in ways.items()}
            seconds = by_turns(ways, arguments.rounds)
            for name, own in stats.items():
                rate = 1.0 if own is None else own.tokens_per_call
                gain = seconds["plain"] / seconds[name]
                ratio = costs[str(window)] / costs["1"]
                rows.append([str(batch), kind, f"{ratio:.2f}", name, f"{rate:.2f}", f"{gain:.2f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of a checkpoint; random weights of --size otherwise")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--prompt", default='"""Utilities for reading and writing files."""\n\nimport os\n\n\ndef ')
    parser.add_argument("--new-tokens", type=int, help="200; with --batch 96")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", help="measure batches of so many prompts")
    parser.add_argument("--processors", choices=PROCESSORS, nargs="+", default=list(PROCESSORS), help="of --batch")
    parser.add_argument("--prompt-length", type=int, default=48, help="of --batch: bytes of the longest prompt")
    parser.add_argument("--drafter", help="of --batch: ngram, heads, or an EAGLE head's folder, on any --model")
    parser.add_argument("--dtype", default="float32", help="of --model with --drafter")
    arguments = parser.parse_args()
    if arguments.drafter and not arguments.batch:
        parser.error("--drafter is measured in batches: add --batch 1")
    arguments.new_tokens = arguments.new_tokens or (96 if arguments.batch else 200)
    torch.set_num_threads(1 if arguments.batch else arguments.threads)
    model = with_drafter(arguments) if arguments.drafter else evabyte(arguments.model, arguments.size)
    inputs = {"input_ids": EvaByteTokenizer()(arguments.prompt, return_tensors="pt")["input_ids"]}
    if arguments.batch:
        loop.time = SimpleNamespace(perf_counter=now)  # the adaptive length must not see the load either
        columns = ("batch", "processors", "forward", "mode", "tokens per call", "tokens/s over plain")
        show(columns, measure_batches(model, arguments))
    else:
        decode(model, inputs, max_new_tokens=20, do_sample=True)
        rows = measure(model, inputs["input_ids"], arguments.new_tokens, arguments.rounds)
        size = sum(parameter.numel() for parameter in model.parameters())
        title = f"{size / 1e6:.1f} M parameters, window {model.window}, {arguments.threads} threads, {model.dtype}"
        show(COLUMNS, rows, title, 160)


if __name__ == "__main__":
    main()
