"""Batches of ragged rows under processors that look at the text: speculation beside plain decoding.

    python benchmarks/batches.py --model FOLDER             # an EvaByte checkpoint; random weights otherwise
    python benchmarks/batches.py --batch 16 --processors history
    python benchmarks/batches.py --drafter ngram --batch 16 --processors history    # a Llama, or any --model
    python benchmarks/batches.py --model demo-llama --drafter demo-eagle1 --batch 16 --processors history
    python benchmarks/batches.py --profile

Calls alternate (plain, constant, adaptive, plain, ...), and times are those of the processor, so that other work on the
machine meets all of them alike. *Forward* is what one backbone call of all drafted tokens costs beside one of a single
token, at the same batch and cache: speculation wins where it keeps more tokens per call than that, and the rest of a
cycle is small.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tokenahead import EagleHead, EvaByteConfig, EvaByteForMTPC, MTPHeads, NgramDrafter
from tokenahead.configuration.cache_names import CACHE, cache_of
from tokenahead.generation import loop

PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "history": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
    "sampled": {"do_sample": True, "top_k": 0},
}
MODES: dict[str, dict[str, Any]] = {
    "plain": {"use_mtp": False},
    "constant": {},
    "adaptive": {"num_assistant_tokens_schedule": "adaptive"},
}


def load(arguments: argparse.Namespace) -> PreTrainedModel:
    """The checkpoint asked for, or random weights; with a drafter that is attached to it, where one is named."""
    torch.manual_seed(0)
    if arguments.drafter is None:
        if arguments.model:
            return EvaByteForMTPC.from_pretrained(arguments.model).eval()
        shape = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6)
        return EvaByteForMTPC(EvaByteConfig(**shape, window_size=256, chunk_size=16, num_pred_heads=8)).eval()
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    else:
        shape = dict(hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=320, num_key_value_heads=4, **shape)).eval()
    kinds = {
        "ngram": lambda: NgramDrafter(num_tokens=4),
        "heads": lambda: MTPHeads.from_backbone(model, window=5),
    }
    make = kinds.get(arguments.drafter, lambda: EagleHead.from_pretrained(arguments.drafter).eval())
    make().attach(model, default=True)
    return model


def ragged_prompts(batch: int, length: int, text: bytes) -> dict[str, torch.Tensor]:
    """Excerpts of different lengths, padded on the left."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() + 64
    starts = torch.linspace(0, max(len(ids) - length, 1) - 1, batch).long().tolist()
    lengths = [length - (7 * row) % (length // 2) for row in range(batch)]
    rows = [ids[start : start + own] for start, own in zip(starts, lengths)]
    padded = torch.stack([torch.nn.functional.pad(row, (length - len(row), 0)) for row in rows])
    mask = torch.tensor([[0] * (length - own) + [1] * own for own in lengths])
    return {"input_ids": padded, "attention_mask": mask}


def decode(model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[float, Any]:
    """Processor seconds and output of one `generate`; a dict that is asked for holds the cache of all sequences."""
    torch.manual_seed(0)
    started = time.process_time()
    out = model.generate(**inputs, eos_token_id=None, pad_token_id=0, **options)
    return time.process_time() - started, out


@torch.no_grad()
def forward_ratio(model: PreTrainedModel, inputs: dict[str, torch.Tensor], repeats: int = 40) -> float:
    """Seconds of a forward of a whole window per row over those of one token per row, medians."""
    cache = cache_of(model(**inputs))
    seconds: dict[int, list[float]] = {1: [], model.window if isinstance(model, EvaByteForMTPC) else 5: []}
    for _ in range(repeats):
        for length, times in seconds.items():
            block = inputs["input_ids"][:, -length:]
            started = time.process_time()
            model(block, **{CACHE: cache}, use_cache=True)
            times.append(time.process_time() - started)
            cache.crop(-length)
    plain, whole = (statistics.median(times) for times in seconds.values())
    return whole / plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of an EvaByte checkpoint, or of any model beside --drafter")
    parser.add_argument(
        "--drafter", help="attach a drafter to a model that has none: ngram, heads, or an EAGLE head's folder"
    )
    parser.add_argument("--dtype", default="float32", help="of --model beside --drafter")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--processors", choices=PROCESSORS, nargs="+", default=list(PROCESSORS))
    parser.add_argument("--prompt-length", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="where the time of the last mode goes, by function")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loop.time = SimpleNamespace(perf_counter=time.process_time)  # the adaptive length must not see the load either
    model, text = load(arguments), Path(torch.__file__).read_bytes()
    table = Table("batch", "processors", "forward", "mode", "tokens per call", "tokens/s over plain", title="batches")
    for batch in arguments.batch:
        inputs = ragged_prompts(batch, arguments.prompt_length, text)
        ratio = forward_ratio(model, inputs)
        for kind in arguments.processors:
            options = dict(max_new_tokens=arguments.new_tokens, **({"do_sample": False} | PROCESSORS[kind]))
            runs: dict[str, list[float]] = {mode: [] for mode in MODES}
            rate = {}
            for mode, own in MODES.items():
                stats = getattr(
                    decode(model, inputs, return_dict_in_generate=True, **options, **own)[1], "speculation", None
                )
                rate[mode] = 1.0 if stats is None else stats.tokens_per_call
            for _ in range(arguments.rounds + 1):
                for mode, own in MODES.items():
                    runs[mode].append(decode(model, inputs, **options, **own)[0])
            plain = statistics.median(runs["plain"][1:])
            for mode in MODES:
                gain = plain / statistics.median(runs[mode][1:])
                table.add_row(str(batch), kind, f"{ratio:.2f}", mode, f"{rate[mode]:.2f}", f"{gain:.2f}")
            if arguments.profile:
                profiler = cProfile.Profile()
                profiler.runcall(decode, model, inputs, **options)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(35)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
