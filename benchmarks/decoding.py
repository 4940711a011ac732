"""Plain and speculative decoding side by side, and what a cycle costs beyond the backbone's own forward.

    python benchmarks/decoding.py                         # a random model of the demo's size
    python benchmarks/decoding.py --model tokenahead-demo/model --prompt "def main("
    python benchmarks/decoding.py --size 85m --profile
    python benchmarks/decoding.py --compile               # torch.compile with its default backend: needs a C++ compiler

*Cycle overhead* is the time of a whole speculative cycle divided by the time of the bare forward of its n tokens (with
the same cache length and the next-token head), medians of the same run. The cycles are what a call does behind its
first token: `generate` of one token, with the prompt's forward in it, is timed beside and taken off. On random weights
hardly any greedy draft is accepted. The overhead can still be measured there, and the speed-up with the adaptive
length, which must not fall far below 1; tokens per call and the other speed-ups mean something for trained models only.

With one thread, times are those of the processor, so that other work on the machine meets them less; with more, of the
clock on the wall.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tokenahead import EvaByteConfig, EvaByteForMTPC, EvaByteTokenizer
from tokenahead.configuration.cache_names import CACHE, cache_of

SIZES = {
    "demo": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6},
    "85m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
}
SHARED = {"window_size": 256, "chunk_size": 16, "num_pred_heads": 8, "max_position_embeddings": 32768}


def load(arguments: argparse.Namespace) -> EvaByteForMTPC:
    """The checkpoint asked for, or random weights of a named size."""
    if arguments.model:
        model = EvaByteForMTPC.from_pretrained(arguments.model)
    else:
        torch.manual_seed(0)
        model = EvaByteForMTPC(EvaByteConfig(**SHARED, **SIZES[arguments.size]))
    model.generation_config.eos_token_id = None
    return model.eval()


def now() -> float:
    """Seconds: the processor's where one thread works, else the wall's."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds_of(call: Callable[[], None], repeats: int) -> float:
    """Median seconds of `call`."""
    times = []
    for _ in range(repeats):
        start = now()
        call()
        times.append(now() - start)
    return statistics.median(times)


@torch.no_grad()
def bare_forward(model: EvaByteForMTPC, prompt: torch.Tensor, repeats: int) -> float:
    """Median seconds of a forward of n tokens behind the prompt, rolled back each time."""
    cache = cache_of(model(prompt))
    block = prompt[:, : model.window].clone()

    def call() -> None:
        model(block, **{CACHE: cache}, use_cache=True)
        cache.crop(-block.shape[1])

    seconds_of(call, 10)
    return seconds_of(call, repeats)


def decode(model: EvaByteForMTPC, prompt: torch.Tensor, **options: Any) -> tuple[float, object]:
    """Seconds and output of one `generate`."""
    torch.manual_seed(0)
    start = now()
    out = model.generate(prompt, return_dict_in_generate=True, pad_token_id=0, **options)
    return now() - start, out


def measure(model: EvaByteForMTPC, prompt: torch.Tensor, new_tokens: int, rounds: int) -> list[dict[str, object]]:
    """One row per mode; plain and speculative runs alternate, so that a change of load meets both."""
    modes = {
        "greedy": {"do_sample": False},
        "greedy, adaptive": {"do_sample": False, "num_assistant_tokens_schedule": "adaptive"},
        "sampled, block": {"do_sample": True, "top_k": 0},
        "sampled, token": {"do_sample": True, "top_k": 0, "verification": "token"},
        "top-p 0.9": {"do_sample": True, "top_k": 0, "top_p": 0.9},
    }
    rows = []
    for name, options in modes.items():
        runs = []
        for _ in range(rounds):
            only_ours = ("verification", "num_assistant_tokens_schedule")
            target = {name: value for name, value in options.items() if name not in only_ours}
            plain, _ = decode(model, prompt, max_new_tokens=new_tokens, use_mtp=False, **target)
            ours, out = decode(model, prompt, max_new_tokens=new_tokens, **options)
            first = statistics.median(decode(model, prompt, max_new_tokens=1, **options)[0] for _ in range(3))
            forward = bare_forward(model, out.sequences[:, : prompt.shape[1] + new_tokens // 2], 30)
            stats = out.speculation
            cycle = (ours - first) / (stats.backbone_calls - 1)
            runs.append((plain, ours, forward, cycle, cycle / forward, stats.tokens_per_call))
        plain, ours, forward, cycle, overhead, per_call = (statistics.median(column) for column in zip(*runs))
        rows.append(
            {
                "mode": name,
                "plain bytes/s": f"{new_tokens / plain:.0f}",
                "speculative bytes/s": f"{new_tokens / ours:.0f}",
                "speed-up": f"{plain / ours:.2f}",
                "bytes per call": f"{per_call:.2f}",
                "bare forward ms": f"{forward * 1e3:.2f}",
                "cycle ms": f"{cycle * 1e3:.2f}",
                "cycle overhead": f"{overhead:.2f}",
            }
        )
    return rows


def profile(model: EvaByteForMTPC, prompt: torch.Tensor, new_tokens: int) -> None:
    """Where the time of a greedy and of a sampled run goes, by function."""
    for options in ({"do_sample": False}, {"do_sample": True, "top_k": 0}):
        profiler = cProfile.Profile()
        profiler.runcall(decode, model, prompt, max_new_tokens=new_tokens, **options)
        print(options)
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of a checkpoint; random weights of --size otherwise")
    parser.add_argument("--size", choices=SIZES, default="demo")
    parser.add_argument("--prompt", default='"""Utilities for reading and writing files."""\n\nimport os\n\n\ndef ')
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", action="store_true", help="also print where the time goes")
    parser.add_argument("--compile", action="store_true", help="model.forward = torch.compile(model.forward) first")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = load(arguments)
    prompt = EvaByteTokenizer()(arguments.prompt, return_tensors="pt")["input_ids"]
    if arguments.compile:
        model.forward = torch.compile(model.forward)
        measure(model, prompt, arguments.new_tokens, 1)  # compiles for every shape
    decode(model, prompt, max_new_tokens=20, do_sample=True)
    rows = measure(model, prompt, arguments.new_tokens, arguments.rounds)
    size = sum(parameter.numel() for parameter in model.parameters())
    table = Table(
        title=f"{size / 1e6:.1f} M parameters, window {model.window}, {arguments.threads} threads, {model.dtype}"
    )
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=160).print(table)
    if arguments.profile:
        profile(model, prompt, arguments.new_tokens)


if __name__ == "__main__":
    main()
