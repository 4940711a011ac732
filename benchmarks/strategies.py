"""Strategies of training on one small backbone, after equal processor time each: what is drafted, kept, and paid.

    python benchmarks/byte_llama.py --minutes 6 --output demo-llama
    python benchmarks/strategies.py demo-llama --seconds 20 --output strategies.json
    python benchmarks/strategies.py demo-llama --only "nll" "kl"      # some of them; figures are added to the file

Losses against each other on kept features (likelihood, KL, TV, LK); heads alone against joint training; and MtPC's two
stages with draft LoRA on the last k layers (Table 3 of the paper in small). Tokens per call at T = 1 are expected ones,
exact along held-out text for block verification; those of greedy text are counted. Speed-ups are ratios of processor
time to plain decoding of the same backbone by turns.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaForCausalLM, PreTrainedModel, PrinterCallback, TrainingArguments

from tokenahead import EvaByteTokenizer, MTPHeads
from tokenahead.training.callbacks import TimeBudget, TimeBudgetCallback
from tokenahead.training.data import ByteWindows, code_prompts, load_corpus
from tokenahead.training.evaluation.expected import TeacherForced
from tokenahead.training.evaluation.modes import sampled
from tokenahead.training.features import FeatureDataset, cache_features
from tokenahead.training.files import replace_text
from tokenahead.training.strategy import TrainingStrategy
from tokenahead.training.trainer import MTPTrainer

LENGTH, ROWS = 256, 4
TAUGHT = dict(loss_target="teacher")
STRATEGIES: dict[str, dict[str, Any]] = {
    "nll": dict(kept=True),
    "kl": dict(kept=True, loss_divergence="kl", **TAUGHT),
    "kl + nll": dict(kept=True, loss_divergence="kl", loss_label_weight=0.5, **TAUGHT),
    "reverse kl": dict(kept=True, loss_divergence="reverse_kl", **TAUGHT),
    "tv": dict(kept=True, loss_divergence="tv", **TAUGHT),
    "lk": dict(kept=True, loss_divergence="lk", **TAUGHT),
    "lk of the 32 likeliest": dict(kept=True, loss_divergence="lk", loss_top_k=32, **TAUGHT),
    "heads only": dict(),
    "joint": dict(train="all", drafter_lr_multiplier=4.0),
    "joint with lora": dict(train="lora", drafter_lr_multiplier=4.0),
    "stage 2, k = 0": dict(first="heads only"),
    "stage 2, k = 1": dict(first="heads only", draft_layers=1),
    "stage 2, k = 2": dict(first="heads only", draft_layers=2),
}


def train(
    model: torch.nn.Module, strategy: TrainingStrategy, data: Any, seconds: float, rate: float, seed: int = 0
) -> MTPTrainer:
    """Trains for so many seconds of processor time, with a rate that falls to 0."""
    budget = TimeBudget(seconds, clock=time.process_time)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=10**6, per_device_train_batch_size=ROWS, use_cpu=True, report_to="none", seed=seed,
            save_strategy="no", disable_tqdm=True, dataloader_drop_last=True, logging_steps=20, max_grad_norm=1.0,
            learning_rate=rate, weight_decay=0.0,
        )  # fmt: skip
        trainer = MTPTrainer(model, arguments, train_dataset=data, strategy=strategy)
        if isinstance(data, FeatureDataset):
            trainer.data_collator = data.collate
        optimizer = trainer.create_optimizer()
        trainer.lr_scheduler = LambdaLR(optimizer, lambda step: budget.rate())
        trainer.add_callback(TimeBudgetCallback(budget))
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
def bits(backbone: PreTrainedModel, rows: list[dict[str, torch.Tensor]]) -> float:
    """Bits per byte of the backbone's own law."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return float(backbone(ids, labels=ids).loss) / 0.693147


@torch.no_grad()
def expected(heads: MTPHeads, rows: list[dict[str, torch.Tensor]]) -> list[float]:
    """Probability that drafts are accepted up to position 1, 2, ..., at T = 1, block verification."""
    ids = torch.stack([row["input_ids"] for row in rows])
    outputs = heads.backbone(ids, output_hidden_states=heads.hidden_layers, use_cache=False)
    features, places = heads.features(outputs.hidden_states), torch.arange(32, LENGTH - heads.window, 4)
    ahead = places[:, None] + torch.arange(1, heads.window + 1)
    at = TeacherForced(features[:, places], ids[:, ahead], outputs.logits[:, ahead[:, :-1]])
    return at.acceptance(SimpleNamespace(window_law=heads.law_of_features), sampled(1.0)).by_position


def run(arguments: argparse.Namespace, name: str, made: dict[str, Path], text: dict[str, Any]) -> dict[str, Any]:
    """Trains and measures one strategy."""
    fields = dict(STRATEGIES[name])
    kept, first = fields.pop("kept", False), fields.pop("first", None)
    backbone = LlamaForCausalLM.from_pretrained(arguments.backbone).eval()
    torch.manual_seed(0)
    heads = MTPHeads.from_backbone(backbone, arguments.window, head_type=arguments.head, rank=arguments.rank)
    if first is not None:
        heads.detach()
        heads = MTPHeads.from_pretrained(made[first]).attach(backbone)
    strategy, data = TrainingStrategy(**fields), text["train"]
    if kept:
        data = cache_features(heads, text["part"], arguments.features)
    joint = strategy.train != "drafter"
    started = time.process_time()
    trainer = train(heads, strategy, data, arguments.seconds, 2e-3 / (4 if joint else 1))
    spent = time.process_time() - started
    made[name] = arguments.scratch / name.replace(" ", "-")
    if not joint:
        heads.save_pretrained(made[name])
    steps = trainer.state.global_step
    figures = {"steps": steps, "seconds": spent, "ms per step": 1000 * spent / steps}
    figures["accepted up to"] = expected(heads, text["held_out"])
    figures["expected tokens per call"] = 1 + sum(figures["accepted up to"])
    figures["bits per byte of the backbone"] = bits(backbone, text["held_out"])
    return figures | decode(backbone, heads, text["prompts"], arguments.new_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backbone", type=Path)
    parser.add_argument("--seconds", type=float, default=20, help="of processor time, for each strategy")
    parser.add_argument("--only", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
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
    windows, held_out = ByteWindows(corpus.train, LENGTH), ByteWindows(corpus.held_out, LENGTH)
    chosen = torch.randperm(len(windows), generator=torch.Generator().manual_seed(1))[: arguments.rows].tolist()
    text = {
        "train": windows,
        "part": [windows[index] for index in chosen],
        "held_out": [held_out[index] for index in range(0, len(held_out), max(1, len(held_out) // 16))][:16],
        "prompts": [tokenizer(p, return_tensors="pt") for p in code_prompts(corpus.held_out, arguments.prompts)],
    }
    results = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    made = {name: arguments.scratch / name.replace(" ", "-") for name in results}
    for name in arguments.only:
        if name in results:
            continue
        results[name] = run(arguments, name, made, text)
        replace_text(arguments.output, json.dumps(results, indent=1))
        print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    table(results, print)


def table(results: dict[str, Any], say: Callable[[str], None]) -> None:
    """The figures as a table in Markdown."""
    say("| strategy | steps | accepted up to 1, 3, 5 | tokens per call, T = 1 / greedy | speed-up | bits per byte |")
    say("|---|---|---|---|---|---|")
    for name, row in results.items():
        shown = ", ".join(f"{row['accepted up to'][place]:.3f}" for place in (0, 2, 4))
        per_call = f"{row['expected tokens per call']:.3f} / {row['tokens per call, greedy']:.2f}"
        speed = f"{row['speed-up, sampled']:.2f} / {row['speed-up, greedy']:.2f}"
        say(
            f"| {name} | {row['steps']} | {shown} | {per_call} | {speed} | {row['bits per byte of the backbone']:.3f} |"
        )


if __name__ == "__main__":
    main()
