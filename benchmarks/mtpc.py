"""The throughput protocol of MtPC's authors, on a folder with their published heads.

    python benchmarks/mtpc.py checkpoints --backbone EvaByte/EvaByte-SFT --prompts prompts.jsonl --device cuda
    python benchmarks/mtpc.py checkpoints --backbone evabyte --prompts prompts.jsonl --count 2 --sets 1 --new-tokens 64

As theirs: one prompt at a time in the chat template, bfloat16, 250 prompts of each of three sets, 1,024 bytes that an
end of the text never cuts short, greedy and sampled at T = 1; the speed is bytes over seconds without the prompt's own
call, pooled. The prompts are theirs where the file has them: first turns of Tulu 3's validation part, in English.
Other than theirs, the output follows the backbone's own distribution: the byte that verification adds is kept. A row
also says the share of texts that repeat more than half of themselves, whose speed means nothing.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from measuring import show

from tokenahead import EvaByteForMTPC, EvaByteTokenizer
from tokenahead.training.evaluation.decoding import DecodingMode, Method, Run, decode
from tokenahead.training.evaluation.prompts import Prompt, PromptEncoder, read_prompts
from tokenahead.training.results import DEGENERATE_SHARE, environment
from tokenahead.training.utils import replace_file

PLAIN = "plain"
COLUMNS = ("heads", "decoding", "set", "bytes per call", "ms per call", "bytes/s", "with prompt", "x plain", "loops")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the directories below a folder that hold a published checkpoint."""
    found = sorted({file.parent for file in folder.rglob("model@*.pt")})
    if not found:
        raise SystemExit(f"{folder}: no model@N.pt in it; fetch a repository of agrv/evabyte-mtpc-* there")
    return found


def sets_of(prompts: list[Prompt], count: int, sets: int, seed: int) -> list[list[Prompt]]:
    """Return disjoint random sets of so many prompts."""
    if len(prompts) < count * sets:
        raise SystemExit(f"--prompts: {len(prompts)} prompts, and {sets} sets of {count} need {count * sets}")
    shuffled = random.Random(seed).sample(prompts, count * sets)
    return [shuffled[start : start + count] for start in range(0, count * sets, count)]


def row_of(runs: Iterable[Run]) -> dict[str, float]:
    """Return the figures of the runs of a set, as ratios of sums; calls and seconds without the prompts' own."""
    runs = list(runs)
    new, calls = sum(run.new_tokens for run in runs), sum(run.forwards for run in runs)
    seconds, prompt = sum(run.seconds for run in runs), sum(run.prompt_seconds for run in runs)
    return {
        "bytes_per_call": (new - len(runs)) / (calls - len(runs)),
        "ms_per_call": 1000 * (seconds - prompt) / (calls - len(runs)),
        "bytes_per_second": (new - len(runs)) / (seconds - prompt),
        "bytes_per_second_with_prompt": new / seconds,
        "looping_share": sum(run.repeated_share > DEGENERATE_SHARE for run in runs) / len(runs),
    }


def measure(
    model: EvaByteForMTPC, drafts: bool, encoder: PromptEncoder, prompts: list[Prompt], mode: str, new: int, seed: int
) -> dict[str, float]:
    """Decode a set of prompts with the model's heads, or without."""
    method, how = Method("", model, {"use_mtp": drafts, "min_new_tokens": new}), DecodingMode.named(mode)
    batches = [encoder.batch([prompt], [[]], torch.device(model.device)) for prompt in prompts]
    decode(method, batches[0], how, new, seed)  # to warm up
    return row_of(decode(method, batch, how, new, seed + index) for index, batch in enumerate(batches))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with directories of model@N.pt and config.yaml")
    parser.add_argument("--backbone", required=True, help="directory or name of the EvaByte that they were trained on")
    parser.add_argument("--prompts", type=Path, required=True, help="a file as tokenahead bench takes it")
    parser.add_argument("--count", type=int, default=250, help="prompts of a set")
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=1024)
    parser.add_argument("--decoding", nargs="+", default=["greedy", "T=1"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path, default=Path("mtpc.json"))
    arguments = parser.parse_args()
    folders = checkpoints_in(arguments.folder)
    encoder = PromptEncoder(EvaByteTokenizer.from_pretrained(arguments.backbone))
    sets = sets_of(read_prompts(arguments.prompts)[0], arguments.count, arguments.sets, arguments.seed)
    model = EvaByteForMTPC.from_pretrained(arguments.backbone, dtype=arguments.dtype).to(arguments.device)
    rows: list[dict[str, float | int | str]] = []
    for folder in (None, *folders):
        if folder is not None:
            EvaByteForMTPC.from_official(folder, model)
        for mode in arguments.decoding:
            for number, prompts in enumerate(sets):
                limits = arguments.new_tokens, arguments.seed
                figures = measure(model, folder is not None, encoder, prompts, mode, *limits)
                name = PLAIN if folder is None else folder.name
                rows.append({"heads": name, "decoding": mode, "set": number} | figures)
                replace_file(arguments.out, json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    plain = {(row["decoding"], row["set"]): row["bytes_per_second"] for row in rows if row["heads"] == PLAIN}
    for row in rows:
        row["speed_up"] = row["bytes_per_second"] / plain[row["decoding"], row["set"]]
    facts = {name: str(value) for name, value in vars(arguments).items()}
    text = json.dumps({"arguments": facts, "environment": environment(), "rows": rows}, indent=1)
    replace_file(arguments.out, text + "\n")
    shown = ("bytes_per_call", "ms_per_call", "bytes_per_second", "bytes_per_second_with_prompt", "speed_up")
    show(
        COLUMNS,
        [
            [row["heads"], row["decoding"], str(row["set"]), *(f"{row[key]:.2f}" for key in shown)]
            + [f"{row['looping_share']:.0%}"]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
