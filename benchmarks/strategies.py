"""Strategies of training on one small backbone, after equal processor time each: what is drafted, kept, and paid.

    python benchmarks/byte_llama.py --minutes 6 --output demo-llama
    python benchmarks/strategies.py demo-llama --seconds 20 --output strategies.json
    python benchmarks/strategies.py demo-llama --only "nll" "kl" --seed 0      # some of them; the file takes more
    python benchmarks/strategies.py demo-llama --only layer "layer, lora" "layer, weighted" --output layers.json

Losses against each other on kept features (likelihood, KL, TV, LK); heads alone against joint training; MtPC's two
stages with draft LoRA on the last k layers (Table 3 of the paper in small); and layer heads on a frozen backbone, with
LoRA, and on weighted states (Mehra et al. in small; benchmarks/marginal.py has their baseline). A seed decides how
heads start and the order of the data; seeds go by turns.

Tokens per call at T = 1 are expected ones under block verification, for drafts of window - 1 tokens, along texts that
the backbone itself has drawn (`tokenahead.training.evaluation.expected`). Those of greedy text are counted. Accuracies
are those on held-out text. Speed-ups are ratios of processor time to plain decoding by turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from corpus import ByteWindows, Corpus, SourceText, load_corpus
from time_budget import TimeBudget, TimeBudgetCallback
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaForCausalLM, PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from tokenahead import EvaByteTokenizer, MTPHeads
from tokenahead.training.box import code_prompts
from tokenahead.training.evaluation import DraftMeasures
from tokenahead.training.evaluation.drafts import text_of
from tokenahead.training.features import FeatureDataset, cache_features
from tokenahead.training.strategy import TrainingStrategy
from tokenahead.training.trainer import MTPTrainer
from tokenahead.training.utils import replace_file

LENGTH, ROWS = 256, 4
BEGUN = 32
"""Bytes of the beginnings that the backbone goes on with."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "nll": dict(kept=True),
    "kl": dict(kept=True, loss=dict(target="teacher", divergence="kl")),
    "kl + nll": dict(kept=True, loss=dict(target="teacher", divergence="kl", label_weight=0.5)),
    "reverse kl": dict(kept=True, loss=dict(target="teacher", divergence="reverse_kl")),
    "tv": dict(kept=True, loss=dict(target="teacher", divergence="tv")),
    "lk": dict(kept=True, loss=dict(target="teacher", divergence="lk")),
    "heads only": dict(),
    "joint": dict(train="all", drafter_lr_multiplier=4.0),
    "joint with lora": dict(train="lora", drafter_lr_multiplier=4.0),
    "stage 2, k = 0": dict(first="heads only"),
    "stage 2, k = 1": dict(first="heads only", draft_layers=1),
    "stage 2, k = 2": dict(first="heads only", draft_layers=2),
}
LAYERS: dict[str, dict[str, Any]] = {
    "layer": dict(),
    "layer, lora": dict(train="lora", drafter_lr_multiplier=4.0),
    "layer, weighted": dict(mix="weighted", mix_init="uniform"),
    "layer, weighted from the last": dict(mix="weighted", mix_init="last"),
    "layer, lora, weighted": dict(train="lora", drafter_lr_multiplier=4.0, mix="weighted", mix_init="uniform"),
}
"""With heads that are decoder layers, for depths 2 and 3."""


def train(
    model: torch.nn.Module,
    strategy: TrainingStrategy | Callable[..., Trainer],
    data: Any,
    seconds: float,
    rate: float,
    seed: int = 0,
    steps: int | None = None,
    bfloat16: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """Trains for so many seconds of processor time, or so many steps, with a rate that falls to 0; what is logged is
    printed where callbacks are given. In place of a strategy: what makes a trainer of model, arguments and data."""
    budget = TimeBudget(seconds, clock=time.process_time)
    if steps is not None:
        budget = TimeBudget(steps, clock=lambda: trainer.state.global_step)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=10**6, per_device_train_batch_size=ROWS, report_to="none", seed=seed,
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no", disable_tqdm=True, dataloader_drop_last=True, logging_steps=20, max_grad_norm=1.0,
            learning_rate=rate, weight_decay=0.0, bf16=bfloat16,
        )  # fmt: skip
        make = partial(MTPTrainer, strategy=strategy) if isinstance(strategy, TrainingStrategy) else strategy
        trainer = make(model, arguments, train_dataset=data)
        if isinstance(data, FeatureDataset):
            trainer.data_collator = data.collate
        optimizer = trainer.create_optimizer()
        trainer.lr_scheduler = LambdaLR(optimizer, lambda step: budget.rate())
        for callback in (TimeBudgetCallback(budget), *callbacks):
            trainer.add_callback(callback)
        if not callbacks:
            trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()
    return trainer


def decode(backbone: PreTrainedModel, heads: MTPHeads, prompts: list[Any], new_tokens: int) -> dict[str, float]:
    """Tokens per call and processor time against plain decoding, prompt by prompt in turns."""
    figures = {}
    for name, how in {"sampled": dict(do_sample=True, top_k=0), "greedy": dict(do_sample=False)}.items():
        calls = tokens = 0
        seconds = {"plain": 0.0, "drafts": 0.0}
        for number, prompt in enumerate(prompts):
            options = dict(**prompt, **how, max_new_tokens=new_tokens, pad_token_id=0)
            for kind in seconds:
                torch.manual_seed(number)
                started = time.process_time()
                if kind == "plain":
                    backbone.generate(**options)
                else:
                    found = backbone.generate(**options, assistant_model=heads, return_dict_in_generate=True)
                    tokens += new_tokens
                    calls += found.speculation.backbone_calls
                seconds[kind] += time.process_time() - started
        figures[f"tokens per call, {name}"] = tokens / calls
        figures[f"speed-up, {name}"] = seconds["plain"] / seconds["drafts"]
    return figures


@torch.no_grad()
def bits(backbone: PreTrainedModel, ids: torch.Tensor) -> float:
    """Bits per byte of the backbone's own distribution."""
    return float(backbone(ids, labels=ids).loss) / 0.693147


def acceptance(heads: MTPHeads, ids: torch.Tensor) -> dict[str, Any]:
    """Expected calls at T = 1 under block verification, along texts that the backbone has drawn."""
    measures = DraftMeasures()
    for part in ids.split(ROWS):
        measures.add(heads, text_of(part[:, :BEGUN], part[:, BEGUN:]))
    found = measures.calls["block"]
    return {
        "accepted": found.by_position,
        "expected tokens per call": found.tokens_per_call,
        "standard error": found.standard_error,
    }


def accuracies(heads: MTPHeads, ids: torch.Tensor) -> list[float]:
    """How often the likeliest token is the text's, at depths 2, 3, ..."""
    measures = DraftMeasures()
    for part in ids.split(ROWS):
        measures.add(heads, text_of(part[:, :BEGUN], part[:, BEGUN:]))
    return measures.means()["top_1"]


def drawn_texts(backbone: PreTrainedModel, held_out: torch.Tensor) -> torch.Tensor:
    """Held-out beginnings that the backbone has gone on with, at T = 1."""
    torch.manual_seed(0)
    begun = held_out[:, :BEGUN]
    ones = torch.ones_like(begun)
    options = dict(attention_mask=ones, do_sample=True, top_k=0, pad_token_id=0)
    return backbone.generate(begun, **options, max_new_tokens=LENGTH - begun.shape[1])


def beginnings(corpus: Corpus, arguments: argparse.Namespace) -> list[str]:
    """Held-out code to complete, so short that new tokens stay at positions that the backbone has been trained at."""
    return code_prompts(corpus.held_out.contents(), arguments.prompts, length=LENGTH - arguments.new_tokens)


def folder_of(arguments: argparse.Namespace, name: str, seed: int) -> Path:
    """Where trained heads lie."""
    return arguments.scratch / f"{name.replace(' ', '-')}-{seed}"


def new_heads(backbone: PreTrainedModel, name: str, arguments: argparse.Namespace, **options: Any) -> MTPHeads:
    """Heads as a strategy begins with them."""
    if name in LAYERS:
        return MTPHeads.from_backbone(backbone, 3, head_type="layer", **options)
    return MTPHeads.from_backbone(backbone, arguments.window, head_type=arguments.head, rank=arguments.rank)


def run(arguments: argparse.Namespace, name: str, seed: int, text: dict[str, Any]) -> dict[str, Any]:
    """Trains and measures one strategy."""
    fields = dict((STRATEGIES | LAYERS)[name])
    kept, first = fields.pop("kept", False), fields.pop("first", None)
    options = {option: fields.pop(option) for option in ("mix", "mix_init") if option in fields}
    backbone = LlamaForCausalLM.from_pretrained(arguments.backbone).eval()
    torch.manual_seed(seed)
    if first is None:
        heads = new_heads(backbone, name, arguments, **options)
    else:
        heads = MTPHeads.from_pretrained(folder_of(arguments, first, seed)).attach(backbone)
    strategy, data = TrainingStrategy(**fields), text["train"]
    if kept:
        data = cache_features(heads, text["part"], arguments.features)
    joint = strategy.train != "drafter"
    started = time.process_time()
    trainer = train(heads, strategy, data, arguments.seconds, 2e-3 / (4 if joint else 1), seed)
    spent = time.process_time() - started
    if not joint:
        heads.save_pretrained(folder_of(arguments, name, seed))
    steps = trainer.state.global_step
    figures = {"steps": steps, "seconds": spent, "ms per step": 1000 * spent / steps}
    drawn = drawn_texts(backbone, text["held_out"]) if joint else text["drawn"]
    figures |= acceptance(heads, drawn) | {"right": accuracies(heads, text["held_out"])}
    figures["bits per byte of the backbone"] = bits(backbone, text["held_out"])
    return figures | decode(backbone, heads, text["prompts"], arguments.new_tokens)


def held_out_rows(text: SourceText, count: int = 32) -> torch.Tensor:
    """Windows from all over held-out text."""
    windows = ByteWindows(text, LENGTH)
    every = max(1, len(windows) // count)
    return torch.stack([windows[index]["input_ids"] for index in range(0, len(windows), every)][:count])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbone", type=Path)
    parser.add_argument("--seconds", type=float, default=20, help="of processor time, for each strategy")
    parser.add_argument("--only", nargs="+", choices=[*STRATEGIES, *LAYERS], default=list(STRATEGIES))
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--head", default="ff")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--window", type=int, default=6)
    parser.add_argument("--rows", type=int, default=400, help="windows whose features are kept")
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("strategies.json"))
    arguments = parser.parse_args()
    arguments.scratch = arguments.output.with_suffix("")
    arguments.features = arguments.scratch / "features"
    torch.set_num_threads(1)
    corpus, tokenizer = load_corpus(seed=0), EvaByteTokenizer()
    windows, held_out = ByteWindows(corpus.train, LENGTH), held_out_rows(corpus.held_out)
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))[: arguments.rows].tolist()
    text = {
        "train": windows,
        "part": [windows[index] for index in chosen],
        "held_out": held_out,
        "drawn": drawn_texts(LlamaForCausalLM.from_pretrained(arguments.backbone).eval(), held_out),
        "prompts": [tokenizer(prompt, return_tensors="pt") for prompt in beginnings(corpus, arguments)],
    }
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    for seed, name in product(arguments.seed, arguments.only):
        found = results.setdefault(name, {})
        if str(seed) in found:
            continue
        found[str(seed)] = run(arguments, name, seed, text)
        replace_file(arguments.output, json.dumps(results, indent=1))
        print(name, seed, json.dumps(found[str(seed)]), file=sys.stderr, flush=True)
    table(results, print)


def table(results: dict[str, Any], say: Callable[[str], None]) -> None:
    """The figures as a table in Markdown: means over seeds, and behind them the largest less the smallest."""
    columns = {
        "steps": lambda row: (row["steps"],),
        "accepted 1, 3, 5": lambda row: row["accepted"][::2],
        "right at depths 2, 3": lambda row: row["right"][:2],
        "tokens per call, T = 1": lambda row: (row["expected tokens per call"],),
        "greedy": lambda row: (row["tokens per call, greedy"],),
        "speed-up, T = 1 / greedy": lambda row: (row["speed-up, sampled"], row["speed-up, greedy"]),
        "bits per byte": lambda row: (row["bits per byte of the backbone"],),
    }
    say("| " + " | ".join(("strategy", "seeds", *columns)) + " |")
    say("|---" * (len(columns) + 2) + "|")
    for name, by_seed in results.items():
        cells = (mean_and_spread(map(read, by_seed.values())) for read in columns.values())
        say(f"| {name} | {len(by_seed)} | " + " | ".join(cells) + " |")


def mean_and_spread(rows: Iterable[Iterable[float]]) -> str:
    """Means of columns, each with its spread in brackets."""
    cells = []
    for column in zip(*rows):
        digits = 0 if all(isinstance(value, int) for value in column) else 2 if max(column) > 9 else 3
        cells.append(f"{sum(column) / len(column):.{digits}f} ({max(column) - min(column):.{digits}f})")
    return ", ".join(cells)


if __name__ == "__main__":
    main()
