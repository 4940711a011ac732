"""Parallel token prediction on Python source: distilled from a small backbone, then decoded with and without drafts.

    python benchmarks/ptp_text.py                         # 4 minutes for the backbone, 10 for each of two students
    python benchmarks/ptp_text.py --minutes 1 1 --slots 4

A byte-level Llama of 1 million parameters learns the Python standard library's source. Two students are distilled from
it with `PTPTrainer`: O-PTP (`one_hot`), verified with the uniforms that it drafts from, and C-PTP (`categorical`),
verified by block. They complete held-out code by turns with transformers' own decoding of the same model. Every student
is saved with its figures and its card.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PrinterCallback, Trainer, TrainingArguments

from tokenahead import EvaByteTokenizer, PTPForCausalLM, __version__
from tokenahead.model_cards import DecodingResult, MeasuredResults, render_card, write_card
from tokenahead.training.callbacks import ProgressCallback, TimeBudget, TimeBudgetCallback
from tokenahead.training.data import ByteWindows, Corpus, code_prompts, load_corpus
from tokenahead.training.evaluation import GREEDY, DecodingMode, compare_decoding, sampled
from tokenahead.training.muon import JointOptimizer, Muon
from tokenahead.training.ptp.options import PTPOptions
from tokenahead.training.ptp.trainer import PTPTrainer

CONFIG = dict(
    vocab_size=320, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=2048, initializer_range=0.04, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
VARIANTS = {"one_hot": "ce", "categorical": "kl"}


def fit(
    trainer_class: type[Trainer], model: PreTrainedModel, corpus: Corpus, title: str, minutes: float, rows: int,
    rates: tuple[float, float], console: Console, **options: object,
) -> int:  # fmt: skip
    """Trains for so many minutes on `rows` windows of 256 bytes per step, and returns the number of steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    embeddings = {
        id(p) for part in (model.get_input_embeddings(), model.get_output_embeddings()) for p in part.parameters()
    }
    matrices = [p for p in trained if p.dim() == 2 and id(p) not in embeddings]
    others = [p for p in trained if p.dim() != 2 or id(p) in embeddings]
    parts: list[torch.optim.Optimizer] = [Muon(matrices, lr=rates[0])]
    if others:
        parts.append(torch.optim.AdamW(others, lr=rates[1], betas=(0.9, 0.95), weight_decay=0.0))
    optimizer, budget = JointOptimizer(parts), TimeBudget(60 * minutes)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=sys.maxsize, per_device_train_batch_size=rows, use_cpu=True, report_to="none",
            save_strategy="no", disable_tqdm=True, dataloader_drop_last=True, logging_steps=20,
        )  # fmt: skip
        trainer = trainer_class(
            model, arguments, train_dataset=ByteWindows(corpus.train, 256),
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: budget.rate())),
            callbacks=[TimeBudgetCallback(budget), ProgressCallback(title, budget, rows * 256, console)], **options,
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    model.eval()
    return trainer.state.global_step


def measure(
    model: PTPForCausalLM, prompts: list[str], mode: DecodingMode, new_tokens: int
) -> tuple[DecodingResult, list[float]]:
    """Completes prompts with drafts and without, by turns; and the acceptance by position.

    Sampled runs that differ by their uniforms alone are compared with the same ones, untimed.
    """
    tokenizer = EvaByteTokenizer()
    found = compare_decoding(model, tokenizer, prompts, mode, new_tokens)
    result = found.result
    if mode.options.get("verification") == "coupled" and "best_of" not in mode.options:
        inputs = [tokenizer(prompt, return_tensors="pt") for prompt in prompts]
        how = mode.options | {"seed": 7, "max_new_tokens": new_tokens}
        texts = ([model.generate(**one, **how, use_mtp=drafts) for drafts in (True, False)] for one in inputs)
        result = replace(result, identical=all(torch.equal(*pair) for pair in texts))
    return result, found.accepted_by_position


def modes(variant: str, temperature: float) -> list[DecodingMode]:
    """Ways of decoding to compare."""
    drawn = sampled(temperature).options
    coupled = drawn | {"verification": "coupled"}
    found = [GREEDY, DecodingMode("sampled, coupled", coupled)]
    if variant == "one_hot":
        return [*found, DecodingMode("sampled, best of 2", coupled | {"best_of": 2})]
    return [*found, DecodingMode("sampled, block", drawn | {"verification": "block"})]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, nargs=2, default=[4, 10], help="for the backbone, and per student")
    parser.add_argument("--slots", type=int, default=4, help="N")
    parser.add_argument("--rank", type=int, default=64, help="of the adapters")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--reuse", action="store_true", help="measure the models of the output folder again")
    parser.add_argument("--output", type=Path, default=Path("tokenahead-ptp"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    console, corpus = Console(width=120), load_corpus(seed=0)
    backbone = arguments.output / "backbone"
    if not arguments.reuse:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        fit(Trainer, model, corpus, "backbone", arguments.minutes[0], 4, (0.03, 1e-2), console)
        model.save_pretrained(backbone)
    prompts = code_prompts(corpus.held_out, arguments.prompts)
    table = Table("variant", "decoding", "tokens/call", "tokens/s", "plain tokens/s", "speed-up", "identical")
    for variant in arguments.variants:
        results = run(arguments, variant, backbone, corpus, prompts, console)
        for row in results.results:
            figures = row.tokens_per_call, row.tokens_per_second, row.plain_tokens_per_second, row.speed_up
            table.add_row(variant, row.name, *(f"{figure:.2f}" for figure in figures), str(row.identical))
    console.print(table)


def distil(
    arguments: argparse.Namespace, variant: str, backbone: Path, corpus: Corpus, console: Console, folder: Path
) -> None:
    """Trains a student of the backbone, and saves it."""
    model = PTPForCausalLM.from_backbone(
        backbone, variant, num_slots=arguments.slots, features="arithmetic", projection="mlp",
        lora_rank=arguments.rank, lora_alpha=arguments.rank, sampling={"temperature": arguments.temperature},
    )  # fmt: skip
    options = PTPOptions(loss=VARIANTS[variant], completions=64)
    fit(PTPTrainer, model, corpus, variant, arguments.minutes[1], 4, (0.02, 1e-2), console, options=options)
    model.save_pretrained(folder)
    EvaByteTokenizer().save_pretrained(folder)


def run(
    arguments: argparse.Namespace, variant: str, backbone: Path, corpus: Corpus, prompts: list[str],
    console: Console,
) -> MeasuredResults:  # fmt: skip
    """Distils a student, saves it, reads it again, measures it, and writes its card."""
    folder = arguments.output / variant
    if not arguments.reuse:
        distil(arguments, variant, backbone, corpus, console, folder)
    model = PTPForCausalLM.from_pretrained(folder).eval()
    measured = [measure(model, prompts, mode, arguments.new_tokens) for mode in modes(variant, arguments.temperature)]
    results = MeasuredResults(
        results=[result for result, _ in measured],
        dataset_name="Python standard library source",
        dataset_description=f"{len(prompts)} held-out prompts, each completed with {arguments.new_tokens} bytes at "
        f"temperature {arguments.temperature:g}.",
        hardware=f"{platform.machine()} processor, {arguments.threads} threads",
        dtype=str(model.dtype).removeprefix("torch."),
        command=f"python benchmarks/ptp_text.py --slots {arguments.slots} --minutes "
        + " ".join(f"{value:g}" for value in arguments.minutes),
        library_version=__version__,
        accepted_by_position=measured[0][1],
    )
    results.to_json(folder / "results.json")
    how = f"Distilled from its own backbone for {arguments.minutes[1]:g} minutes with `PTPTrainer`."
    write_card(folder, render_card(model, results, training_description=how))
    return results


if __name__ == "__main__":
    main()
