"""Speed in vLLM and in this library, plain and with an EAGLE head's drafts; needs a quiet machine.

    python benchmarks/serving_speed.py --vllm vllm-env/bin/python --backbone HuggingFaceTB/SmolLM2-135M-Instruct \\
        --head model_cards/smollm2/eagle3 --prompts question.jsonl --json speed.json

Four engines answer the same prompts greedily, so many new tokens each, by turns: vLLM plain and drafting (each in a
separate process, model runner V1), and `generate` here, plain and drafting. The first turn warms up. Printed, and
written as JSON, of every batch size: medians of tokens per second, quartiles of the speed-up by turns, accepted drafts
by position of all drafts, and how many texts of each engine equal those of vLLM's plain decoding in the same turn (in
bfloat16 not all do: kernels and batch shapes that round otherwise decide near-ties otherwise; see `--dtype float32`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving_server import SETTINGS

Answer = tuple[float, list[list[int]], list[int], int]
"""Seconds, new tokens of every prompt, accepted drafts by position, drafts."""


class Engine:
    """vLLM in a separate process, which waits between its turns.

    Args:
        interpreter: Python of the environment that has vLLM.
        options: Of vLLM's `LLM`.
        threads: Of PyTorch.
        log: Where its messages go.
    """

    def __init__(self, interpreter: str, options: dict[str, Any], threads: int, log: Path) -> None:
        own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": str(threads)}
        environment = os.environ | SETTINGS | own
        environment.pop("PYTHONPATH", None)
        command = [interpreter, __file__, "--engine", json.dumps(options)]
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.log = log

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> Answer:
        """Return the answers to prompts of token ids, as one batch."""
        asked, answered = self.process.stdin, self.process.stdout
        assert asked is not None and answered is not None
        print(json.dumps([prompts, new_tokens]), file=asked, flush=True)
        for line in answered:
            if line.startswith("["):  # else something that a library prints
                seconds, texts, accepted, drafts = json.loads(line)
                return seconds, texts, accepted, drafts
        raise RuntimeError(f"vLLM ended: {self.log.read_text()[-2000:]}")

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()


def answer_requests(options: dict[str, Any]) -> None:
    """Answer requests from standard input; runs in vLLM's own interpreter."""
    from vllm import LLM, SamplingParams

    llm = LLM(**options, skip_tokenizer_init=True, disable_log_stats=False)
    before = _counts(llm)
    for line in sys.stdin:
        prompts, new_tokens = json.loads(line)
        wanted = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
        seconds = time.perf_counter() - began
        outputs.sort(key=lambda output: int(output.request_id))
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        after = _counts(llm)
        found = [new - old for new, old in zip(after, before)]
        before = after
        print(json.dumps([seconds, texts, found[1:], found[0]]), flush=True)


def _counts(llm: Any) -> list[int]:
    """Return vLLM's counts so far: drafts, and accepted drafts of every position; zero where there are none."""
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens_per_pos")
    found = {metric.name: metric for metric in llm.get_metrics() if metric.name in names}
    return [found[names[0]].value, *found[names[1]].values] if found else [0]


def own_engine(backbone: Any, **options: Any) -> Callable[[list[list[int]], int], Answer]:
    """Return a function like an `Engine`, of `generate` here."""
    import torch

    def answer(prompts: list[list[int]], new_tokens: int) -> Answer:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
        common = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        began = time.perf_counter()
        out = backbone.generate(ids, attention_mask=mask, **common, **options, return_dict_in_generate=True)
        seconds = time.perf_counter() - began
        texts = out.sequences[:, longest:].tolist()
        if "assistant_model" not in options:
            return seconds, texts, [], 0
        counts = [count for row in out.speculation.rows_accepted for count in row]
        by_position = [sum(count > position for count in counts) for position in range(options["num_assistant_tokens"])]
        return seconds, texts, by_position, len(counts)

    return answer


def measure(engines: dict[str, Any], prompts: list[list[int]], size: int, rounds: int, new_tokens: int) -> dict:
    """Return what came out of one batch size."""
    rates: dict[str, list[float]] = {name: [] for name in engines}
    accepted: dict[str, list[int]] = {}
    drafts, equal = dict.fromkeys(engines, 0), dict.fromkeys(engines, 0)
    for turn in range(-1, rounds):
        batch = [prompts[(max(turn, 0) * size + index) % len(prompts)] for index in range(size)]
        texts = {}
        for name in list(engines)[:: 1 if turn % 2 else -1]:
            seconds, texts[name], found, count = engines[name](batch, new_tokens)
            if turn >= 0:
                rates[name].append(size * new_tokens / seconds)
                accepted[name] = [a + b for a, b in zip(accepted.get(name, [0] * len(found)), found)]
                drafts[name] += count
        for name, found in texts.items() if turn >= 0 else ():
            equal[name] += sum(a == b for a, b in zip(found, texts["vLLM"]))
    results: dict[str, Any] = {}
    for name, found in rates.items():
        results[name] = {"tokens per second": round(statistics.median(found), 2), "equal texts": equal[name]}
        if drafts[name]:
            plain = rates[name.removesuffix(" with drafts")]
            ratios = [new / old for new, old in zip(found, plain)]
            results[name] |= {
                "speed-up": [round(value, 3) for value in statistics.quantiles(ratios, n=4)],
                "accepted by position": accepted[name],
                "drafts": drafts[name],
            }
    return results | {"texts": size * rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", required=True, help="vLLM's interpreter")
    parser.add_argument("--backbone", required=True, help="directory, or name on the Hub")
    parser.add_argument("--head", required=True, help="directory of an EAGLE-3 head")
    parser.add_argument("--prompts", type=Path, required=True, help="as of tokenahead bench")
    parser.add_argument("--drafted", type=int, default=3, help="tokens per draft")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--eager", action="store_true", help="vLLM compiles nothing, and starts minutes earlier")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tokenahead import EagleHead
    from tokenahead.model_cards.export import export
    from tokenahead.training.evaluation.prompts import read_prompts

    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.backbone)
    asked = [[{"role": "user", "content": prompt.turns[0]}] for prompt in read_prompts(arguments.prompts)[0]]
    prompts = [tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"] for turns in asked]
    prompts = [prompt for prompt in prompts if len(prompt) + arguments.new_tokens < 2000]
    step = max(len(prompts) // (max(arguments.batch_sizes) * arguments.rounds), 1)
    prompts = prompts[::step]  # of every category
    dtype = getattr(torch, arguments.dtype)
    backbone = AutoModelForCausalLM.from_pretrained(arguments.backbone, dtype=dtype).eval()
    head = EagleHead.from_pretrained(arguments.head, dtype=dtype).attach(backbone)
    results: dict[str, Any] = {
        "dtype": arguments.dtype,
        "threads": arguments.threads,
        "new tokens": arguments.new_tokens,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        export(head, folder / "head")
        drafter = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": arguments.drafted}
        common = {"model": arguments.backbone, "dtype": arguments.dtype, "max_model_len": 2048, "max_num_seqs": 8}
        common["enforce_eager"] = arguments.eager
        options = {"vLLM": common, "vLLM with drafts": common | {"speculative_config": drafter}}
        started = {
            name: Engine(arguments.vllm, found, arguments.threads, folder / f"{index}.log")
            for index, (name, found) in enumerate(options.items())
        }
        engines = started | {
            "here": own_engine(backbone),
            "here with drafts": own_engine(backbone, assistant_model=head, num_assistant_tokens=arguments.drafted),
        }
        try:
            for size in arguments.batch_sizes:
                if size > 8:
                    parser.error(f"--batch-sizes {size}: the engines take 8 at most")
                found = measure(engines, prompts, size, arguments.rounds, arguments.new_tokens)
                results[f"batch {size}"] = found
                print(json.dumps({size: found}, indent=1), flush=True)
        finally:
            for engine in started.values():
                engine.close()
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        answer_requests(json.loads(sys.argv[2]))
    else:
        main()
