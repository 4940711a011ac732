"""What drafters cost and gain as they come, without any option: the table of costs, and speeds beside plain decoding.

    python benchmarks/defaults.py table --seconds 20      # adds this machine to generation/call/costs.py
    python benchmarks/defaults.py run --model HuggingFaceTB/SmolLM2-135M-Instruct --prompts question.jsonl \\
        --trained eagle=smollm2/eagle1/final hydra=smollm2/hydra/final --results defaults.json
    python benchmarks/defaults.py run --batch 8 --categories qa coding math --new 64 ...
    python benchmarks/defaults.py lookups                 # what reading and asking a suffix table costs

The table holds forwards of blocks of 1 to 96 positions, in those of one position, for random Llamas of three sizes in
float32 and bfloat16, after 200 tokens, by sequences and threads: medians of turns, within the seconds for each row.

In a run all ways take turns on each prompt, plain decoding first and last: its second time beside its first says what a
ratio is worth. Times are the processor's with one thread. `--dtype`, `--temperature`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import tracemalloc
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measuring import llama, markdown, now, resumed, show
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import tokenahead
from tokenahead import DrafterCascade, LookaheadDrafter, NgramDrafter, RecyclingDrafter, SuffixDrafter
from tokenahead.generation.backbone.target import weights_of
from tokenahead.generation.call import costs
from tokenahead.generation.call.costs import COSTS, POSITIONS
from tokenahead.generation.lookups.suffix_table import Reader, SuffixTable
from tokenahead.training.evaluation.prompts import read_prompts

SIZES = {  # width, layers, heads, heads of keys, inner width: as SmolLM2 135M and 360M, and Llama 3.2 1B
    "135M": (576, 30, 9, 3, 1536, 49152),
    "360M": (960, 32, 15, 5, 2560, 49152),
    "1B": (2048, 16, 32, 8, 8192, 128256),
}
CONTEXT = 200
LOOK_UPS = {
    "n-grams": NgramDrafter,
    "suffixes": SuffixDrafter,
    "recycling": RecyclingDrafter,
    "lookahead": LookaheadDrafter,
}


def model_of(size: str, dtype: torch.dtype) -> Any:
    """Return a Llama of random weights."""
    width, layers, heads, keys, inner, vocab = SIZES[size]
    sizes = {"num_attention_heads": heads, "num_key_value_heads": keys, "intermediate_size": inner}
    return llama(width, layers, vocab, **sizes, tie_word_embeddings=True).to(dtype)


@torch.no_grad()
def block_costs(model: Any, batch: int, budget: float) -> tuple[float, ...]:
    """Return what blocks of `POSITIONS` cost, in forwards on one position; rows that take too long go on straight."""
    cache, seconds = DynamicCache(config=model.config), dict[int, list[float]]()
    ids = torch.randint(9, 40_000, (batch, CONTEXT + max(POSITIONS)))
    model(ids[:, :CONTEXT], past_key_values=cache)
    started, turns = now(), 0
    while turns < 3 or now() - started < budget:
        for width in POSITIONS:
            begun = now()
            model(ids[:, :width], past_key_values=cache)
            seconds.setdefault(width, []).append(now() - begun)
            cache.crop(-width)
        turns += 1
        if turns > 200:
            break
    medians = [statistics.median(seconds[width][1:]) for width in POSITIONS]
    return tuple(round(median / medians[0], 2) for median in medians)


def table(options: argparse.Namespace) -> None:
    """Measure this machine, and write the table with what it held of others."""
    for size in options.sizes:
        for name in options.dtypes:
            model = model_of(size, getattr(torch, name))
            for threads in options.threads:
                torch.set_num_threads(threads)
                kind = costs.kind_of(getattr(torch, name))
                entry = COSTS.setdefault(kind, {}).setdefault((threads, weights_of([model])), {})
                for batch in options.batches:
                    entry[batch] = block_costs(model, batch, options.seconds)
                    print(kind, size, threads, batch, entry[batch], flush=True)
                    _write()


def _write() -> None:
    path, lines = Path(costs.__file__), list[str]()
    for kind, sizes in sorted(COSTS.items()):
        lines.append(f"    {json.dumps(kind)}: {{")
        for size, batches in sorted(sizes.items()):
            lines += [
                f"        {size}: {{",
                *(f"            {n}: {row}," for n, row in sorted(batches.items())),
                "        },",
            ]
        lines.append("    },")
    text = path.read_text(encoding="utf-8")
    begin, end = text.index("= {\n") + 4, text.index("\n}\n") + 1
    path.write_text(text[:begin] + "\n".join(lines) + "\n" + text[end:], encoding="utf-8")


def ways_of(model: Any, trained: list[str]) -> dict[str, Any]:
    """Return the drafters as they come, by name; a cascade of suffixes and the first trained one among them."""
    ways = {name: kind() for name, kind in LOOK_UPS.items()}
    for word in trained:
        name, _, folder = word.partition("=")
        kind = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["architectures"][0]
        ways[name] = getattr(tokenahead, kind).from_pretrained(folder, dtype=model.dtype)
    if trained:
        first = next(way for name, way in ways.items() if name not in LOOK_UPS)
        ways["cascade"] = DrafterCascade([SuffixDrafter(), first])
    return ways


def measured(model: Any, ways: dict[str, Any], batch: dict[str, torch.Tensor], how: dict[str, Any]) -> dict[str, Any]:
    """Return seconds of each way on a batch, tokens per call and lengths, and whether texts are plain decoding's."""
    calls = {"plain": partial(model.generate, **batch, **how)}
    calls["look-up of transformers"] = partial(model.generate, **batch, **how, prompt_lookup_num_tokens=10)
    if len(batch["input_ids"]) > 1:
        del calls["look-up of transformers"]  # it takes one sequence
    row, plain = dict[str, Any](), None
    for name, drafter in ways.items():
        drafter.attach(model)
        calls[name] = partial(model.generate, **batch, **how, assistant_model=drafter, return_dict_in_generate=True)
    for name, call in [*calls.items(), ("plain again", calls["plain"])]:
        torch.manual_seed(0)
        begun = now()
        out = call()
        row[name] = {"seconds": now() - begun}
        if (stats := getattr(out, "speculation", None)) is not None:
            row[name] |= {"tokens_per_call": stats.tokens_per_call, "lengths": stats.lengths}
            row[name]["equal"] = torch.equal(out.sequences, plain)
        elif plain is None:
            plain = out
    for drafter in ways.values():
        drafter.detach()
    return row


def run(options: argparse.Namespace) -> None:
    """Measure all ways on prompts of every category, and print medians beside plain decoding."""
    torch.set_num_threads(options.threads[0])
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtypes[0])).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    how: dict[str, Any] = {"max_new_tokens": options.new, "min_new_tokens": options.new, "do_sample": False}
    if options.temperature:
        how |= {"do_sample": True, "temperature": options.temperature, "top_k": 0}
    ways, groups = ways_of(model, options.trained), dict[str, dict[str, torch.Tensor]]()
    prompts, _ = read_prompts(options.prompts)
    categories = options.categories or list(dict.fromkeys(prompt.category for prompt in prompts))

    def ids_of(texts: list[str]) -> dict[str, torch.Tensor]:
        dialogues = [[{"role": "user", "content": text}] for text in texts]
        read = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt", "padding": True}
        return tokenizer.apply_chat_template(dialogues, **read)

    for number, category in product(range(options.per_category), categories):  # so that a run that is cut has all
        own = [prompt.turns[0] for prompt in prompts if prompt.category == category]
        if texts := own[number * options.batch : (number + 1) * options.batch]:
            groups[f"{category} {number}"] = ids_of(texts)
    measured(model, ways, ids_of(["Hello!"] * options.batch), how)  # what a first call sets up
    rows = resumed(options.results, groups, lambda name: measured(model, ways, groups[name], how))
    columns = ["way", "categories, mean of medians", "lowest median", "lowest turn", "tokens per call"]
    print(markdown(columns, summary(rows)))


def summary(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return speeds beside the mean of both plain runs of a group, by way."""
    found = dict[str, dict[str, list[float]]]()
    for group, row in rows.items():
        base = (row["plain"]["seconds"] + row["plain again"]["seconds"]) / 2
        for name in row.keys() - {"plain again"}:
            of_category = found.setdefault(name, {}).setdefault(group.rsplit(" ", 1)[0], [])
            of_category.append(base / row[name]["seconds"])
    lines = []
    for name in next(iter(rows.values())).keys() & found.keys():
        medians, per_call = (
            [statistics.median(each) for each in found[name].values()],
            [row[name]["tokens_per_call"] for row in rows.values() if "tokens_per_call" in row[name]],
        )
        shown = statistics.mean(medians), min(medians), min(min(each) for each in found[name].values())
        tokens = f"{statistics.mean(per_call):.2f}" if per_call else ""
        lines.append([name, *(f"{number:.2f}" for number in shown), tokens])
    return sorted(lines, key=lambda line: -float(line[1]))


def lookups(options: argparse.Namespace) -> None:
    """Print what a suffix table costs: a corpus, a long prompt, a query, a cycle's tokens."""
    source = random.Random(0)
    words = [[source.randrange(49152) for _ in range(source.randint(2, 9))] for _ in range(3000)]
    corpus = [token for _ in range(250_000) for token in source.choice(words)][:1_000_000]
    rows = []
    for name, text in (("corpus of a million", corpus), ("prompt of 16,000", corpus[:16_000])):
        store, reader = SuffixTable(24, 1 << 20), Reader()
        begun = now()
        store.read([reader], [text])
        seconds = now() - begun
        tracemalloc.start()
        SuffixTable(24, 1 << 20).read([Reader()], [text])
        rows.append([name, f"{1e3 * seconds:.1f} ms", f"{tracemalloc.get_traced_memory()[1] / 1e6:.1f} MB at the peak"])
        tracemalloc.stop()
    times = {"a query": list[float](), "reading 2 tokens": list[float]()}
    for start in range(0, 4000, 2):
        begun = now()
        store.draft(reader.tail, 16, 16, 1, 1.0, 0.1)
        times["a query"].append(now() - begun)
        begun = now()
        store.read([reader], [corpus[start : start + 2]])
        times["reading 2 tokens"].append(now() - begun)
    rows += [[name, f"{1e6 * statistics.mean(each):.0f} us", ""] for name, each in times.items()]
    show(["suffix table", "processor", "memory"], rows)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("what", choices=["table", "run", "lookups"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--dtypes", "--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", default="question.jsonl")
    parser.add_argument("--trained", nargs="*", default=[], help="NAME=FOLDER of drafters")
    parser.add_argument("--categories", nargs="*", default=[])
    parser.add_argument("--per-category", type=int, default=3)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--results", type=Path, default=Path("defaults.json"))
    options = parser.parse_args()
    {"table": table, "run": run, "lookups": lookups}[options.what](options)


if __name__ == "__main__":
    main()
