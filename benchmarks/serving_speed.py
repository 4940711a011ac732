"""Speed in vLLM itself, plain and with drafts, in vLLM's own interpreter; needs a quiet machine, and nothing of this
library.

    python -c "
    from transformers import AutoModelForCausalLM as Auto
    from tokenahead import EagleHead
    from tokenahead.model_cards.export import export
    backbone = Auto.from_pretrained('BACKBONE', dtype='bfloat16')
    export(EagleHead.from_pretrained('model_cards/smollm2/eagle3').attach(backbone), 'served')"
    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
    vllm-env/bin/python benchmarks/serving_speed.py BACKBONE \\
        --speculative '{"method": "eagle3", "model": "served", "num_speculative_tokens": 3}' \\
        --prompts questions.jsonl --batch-sizes 1 8 --json served/speed.json

Prompts are lines of JSON with a `prompt`, answered greedily through the chat template. A plain and a drafting engine
live in one process and take turns; a speed-up is given as the quartiles of ratios by turns. `tokenahead bench` on the
same prompts, with as many threads, is this library's own figure.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any


def speed(llm: Any, conversations: list[Any], new_tokens: int) -> float:
    """Return tokens per second of one batch."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.chat(conversations, wanted, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def accepted(llm: Any) -> dict[str, Any]:
    """Return vLLM's own counts of drafts."""
    counts = {metric.name: metric for metric in llm.get_metrics() if metric.name.startswith("vllm:spec_decode_num_")}
    return {name: getattr(metric, "values", None) or metric.value for name, metric in counts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backbone")
    parser.add_argument("--speculative", type=json.loads, required=True, help="as --speculative-config of vllm serve")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    from vllm import LLM

    texts = [json.loads(line)["prompt"] for line in arguments.prompts.read_text().splitlines()]
    common = dict(model=arguments.backbone, dtype=arguments.dtype, max_model_len=2048, disable_log_stats=False)
    engines = {"plain": LLM(**common), "drafts": LLM(**common, speculative_config=arguments.speculative)}
    results: dict[str, Any] = {"dtype": arguments.dtype, "speculative": arguments.speculative}
    for size in arguments.batch_sizes:
        rates: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(-1, arguments.rounds):  # the first one warms up
            asked = [texts[(max(turn, 0) * size + i) % len(texts)] for i in range(size)]
            conversations = [[{"role": "user", "content": text}] for text in asked]
            for name in list(engines)[:: 1 if turn % 2 else -1]:
                rate = speed(engines[name], conversations, arguments.new_tokens)
                if turn >= 0:
                    rates[name].append(rate)
        ratios = [drafts / plain for drafts, plain in zip(rates["drafts"], rates["plain"])]
        medians = {name: statistics.median(found) for name, found in rates.items()}
        results[f"batch {size}"] = medians | {"speed-up": statistics.quantiles(ratios, n=4)}
    results["counts"] = accepted(engines["drafts"])
    print(json.dumps(results, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
