"""Parallel token prediction on Python source: distilled from a small backbone, then decoded with and without drafts.

    python benchmarks/ptp_text.py                         # 4 minutes for the backbone, 10 for each student
    python benchmarks/ptp_text.py --minutes 1 1 --slots 4
    python benchmarks/ptp_text.py --backbone demo-llama --minutes 0 2 --acceptance    # of benchmarks/byte_llama.py

A byte-level Llama of 1 million parameters learns the Python standard library's source, and goes on with beginnings of
it at the temperature of decoding (`--texts 0`: students learn from the source itself). Students are distilled from it
with `PTPTrainer`, in so many minutes of *processor* time each: O-PTP (`one_hot`), verified with the uniforms that it
drafts from, C-PTP (`categorical`), verified by block, and independent prediction, which is O-PTP whose uniforms say
nothing. With `--small FOLDER`, C-PTP of a smaller backbone learns from the same teacher, and drafts for it
(`separate`). They complete held-out code by turns with transformers' own decoding of the same model. Every student is
saved with its figures and its card. `--acceptance`
counts tokens per call, and measures no times: that is all that a busy machine can tell.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from byte_llama import optimizer_of
from corpus import ByteWindows, Corpus, load_corpus
from rich.console import Console
from rich.table import Table
from time_budget import TimeBudget, TimeBudgetCallback
from torch.optim.lr_scheduler import LambdaLR
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

from tokenahead import EvaByteTokenizer, PTPForCausalLM, __version__
from tokenahead.model_cards import DecodingResult, MeasuredResults, render_card, write_card
from tokenahead.training import regenerate
from tokenahead.training.box import code_prompts
from tokenahead.training.evaluation import GREEDY, Bench, DecodingMode, Protocol, sampled
from tokenahead.training.evaluation.methods import drafting_method, plain_method
from tokenahead.training.evaluation.prompts import Prompt, PromptEncoder
from tokenahead.training.evaluation.summary import results_of
from tokenahead.training.ptp.losses import PTPOptions
from tokenahead.training.ptp.trainer import PTPTrainer

CONFIG = dict(
    vocab_size=320, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
    max_position_embeddings=2048, initializer_range=0.04, bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
LENGTH, PROMPT = 256, 96
"""Positions that the backbone and its students have been trained at, and bytes of a prompt that is decoded from."""
KINDS = {
    "one_hot": {"variant": "one_hot"},
    "categorical": {"variant": "categorical"},
    "independent": {"variant": "one_hot", "informative": False},
    "separate": {"variant": "categorical"},
}


def fit(
    trainer_class: type[Trainer], model: PreTrainedModel, data: Any, title: str, minutes: float, rows: int,
    rates: tuple[float, float], console: Console, **options: object,
) -> int:  # fmt: skip
    """Trains for so many minutes on `rows` rows of 256 ids per step, and returns the number of steps."""
    optimizer, budget = optimizer_of(model, *rates), TimeBudget(60 * minutes, clock=time.process_time)
    console.print(f"{title}: {minutes:g} minutes")
    with tempfile.TemporaryDirectory() as scratch:
        arguments = TrainingArguments(
            scratch, max_steps=sys.maxsize, per_device_train_batch_size=rows, use_cpu=True, report_to="none",
            save_strategy="no", disable_tqdm=True, dataloader_drop_last=True, logging_steps=200,
            logging_nan_inf_filter=False,  # a loss that is no number is to be seen
        )  # fmt: skip
        trainer = trainer_class(
            model, arguments, train_dataset=data,
            optimizers=(optimizer, LambdaLR(optimizer, lambda step: budget.rate())),
            callbacks=[TimeBudgetCallback(budget)], **options,
        )  # fmt: skip
        trainer.train()
    model.eval()
    return trainer.state.global_step


def measure(
    model: Any, drafter: dict[str, Any], prompts: list[str], modes: list[DecodingMode], new_tokens: int
) -> list[DecodingResult]:
    """Complete prompts with drafts and without, by turns; results of every way of decoding."""
    methods = [plain_method(model), drafting_method("drafts", model, drafter.get("assistant_model"))]
    writer = PromptEncoder(EvaByteTokenizer(), chats=False)
    bench = Bench(methods, writer, Protocol(modes, new_tokens=new_tokens), control=False)
    bench.run([Prompt(str(number), (text,)) for number, text in enumerate(prompts)])
    return [row for row in results_of(bench) if row.method == "drafts"]


def acceptance(model: Any, drafter: dict[str, Any], prompts: list[str], mode: DecodingMode, new_tokens: int) -> float:
    """Tokens per call, over all prompts."""
    tokenizer, calls, tokens = EvaByteTokenizer(), 0, 0
    for index, prompt in enumerate(prompts):
        torch.manual_seed(index)
        inputs = tokenizer(prompt, return_tensors="pt")
        how = mode.options | drafter | {"max_new_tokens": new_tokens, "return_dict_in_generate": True}
        found = model.generate(**inputs, **how).speculation
        calls, tokens = calls + found.backbone_calls, tokens + found.new_tokens
    return tokens / calls


def modes(kind: str, temperature: float) -> list[DecodingMode]:
    """Ways of decoding to compare."""
    greedy, drawn = GREEDY, sampled(temperature).options
    coupled = DecodingMode("sampled, coupled", drawn | {"verification": "coupled"})
    block = DecodingMode("sampled, block", drawn | {"verification": "block"})
    if kind == "independent":
        return [greedy, block]
    if kind.startswith("one_hot"):
        return [greedy, coupled, DecodingMode("sampled, best of 2", coupled.options | {"best_of": 2})]
    return [greedy, coupled, block]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, nargs=2, default=[4, 10], help="for the backbone, and per student")
    parser.add_argument("--slots", type=int, default=4, help="N")
    parser.add_argument("--rank", type=int, default=64, help="of the adapters")
    parser.add_argument("--texts", type=int, default=2048, help="that the backbone writes; 0: learn from the source")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=LENGTH - PROMPT)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS)[:-1])
    parser.add_argument(
        "--small", type=Path, help="a directory of a smaller backbone, for students of the kind `separate`"
    )
    parser.add_argument("--backbone", type=Path, help="a directory of a trained one; no minutes are spent on it")
    parser.add_argument("--acceptance", action="store_true", help="count tokens per call, and measure no times")
    parser.add_argument("--reuse", action="store_true", help="measure the models of the output directory again")
    parser.add_argument("--output", type=Path, default=Path("tokenahead-ptp"))
    arguments = parser.parse_args()
    if "separate" in arguments.kinds and arguments.small is None:
        parser.error("--kinds separate drafts with a smaller backbone; name its directory, --small FOLDER")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    console, corpus = Console(width=120), load_corpus(seed=0)
    backbone = arguments.backbone or arguments.output / "backbone"
    if not arguments.reuse and arguments.backbone is None:
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        windows = ByteWindows(corpus.train, LENGTH)
        fit(Trainer, model, windows, "backbone", arguments.minutes[0], 4, (0.03, 1e-2), console)
        model.save_pretrained(backbone)
    prompts = code_prompts(corpus.held_out.contents(), arguments.prompts, length=PROMPT)
    table = Table("student", "decoding", "tokens/call", "speed-up", "identical")
    for kind in arguments.kinds:
        folder = arguments.output / kind.replace(", ", "_")
        if not (arguments.reuse and folder.is_dir()):
            distil(arguments, kind, backbone, texts(arguments, backbone, corpus), console, folder)
        if arguments.acceptance:
            model, drafter = reader(kind, folder, backbone)
            for mode in modes(kind, arguments.temperature):
                value = acceptance(model, drafter, prompts, mode, arguments.new_tokens)
                print(f"{kind} | {mode.name} | {value:.3f} tokens per call", flush=True)
                table.add_row(kind, mode.name, f"{value:.2f}")
            continue
        for row in run(arguments, kind, folder, backbone, prompts).results:
            figures = row.tokens_per_call, row.speed_up or math.nan
            table.add_row(kind, row.name, *(f"{figure:.2f}" for figure in figures), str(row.identical))
    console.print(table)


def texts(arguments: argparse.Namespace, backbone: Path, corpus: Corpus) -> Any:
    """What students learn from: texts of the backbone, written once, or pieces of the source."""
    windows = ByteWindows(corpus.train, LENGTH)
    if not arguments.texts:
        return windows
    places = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[: arguments.texts].tolist()
    prompts = [windows[place]["input_ids"][: LENGTH // 8].tolist() for place in places]
    teacher = LlamaForCausalLM.from_pretrained(backbone).eval()
    how = dict(batch_size=64, do_sample=True, temperature=arguments.temperature, top_k=0)
    return regenerate(teacher, prompts, arguments.output / "texts", LENGTH - LENGTH // 8, **how)


def distil(arguments: argparse.Namespace, kind: str, backbone: Path, data: Any, console: Console, folder: Path) -> None:
    """Trains a student of the backbone, and saves it."""
    torch.manual_seed(1)
    model = PTPForCausalLM.from_backbone(
        arguments.small if kind == "separate" else backbone, num_slots=arguments.slots, lora_rank=arguments.rank,
        sampling={"temperature": arguments.temperature}, **KINDS[kind],
    )  # fmt: skip
    loss = "ce" if model.config.predicts_tokens else "kl"
    options = PTPOptions(loss=loss, completions=32)
    teacher = LlamaForCausalLM.from_pretrained(backbone) if kind == "separate" else None
    how = dict(options=options, teacher=teacher)
    steps = fit(PTPTrainer, model, data, kind, arguments.minutes[1], 4, (0.03, 1.5e-2), console, **how)
    print(f"{kind}: {steps} steps", flush=True)
    model.save_pretrained(folder)
    EvaByteTokenizer().save_pretrained(folder)


def reader(kind: str, folder: Path, backbone: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    """What decodes with a student, and the options that say so: itself, or the backbone that it drafts for."""
    student = PTPForCausalLM.from_pretrained(folder).eval()
    if kind != "separate":
        return student, {}
    model = LlamaForCausalLM.from_pretrained(backbone).eval()
    student.attach(model)
    return model, {"assistant_model": student}


def run(arguments: argparse.Namespace, kind: str, folder: Path, backbone: Path, prompts: list[str]) -> MeasuredResults:
    """Reads a student, measures it, and writes its card."""
    model, drafter = reader(kind, folder, backbone)
    measured = measure(model, drafter, prompts, modes(kind, arguments.temperature), arguments.new_tokens)
    results = MeasuredResults(
        results=measured,
        dataset_name="Python standard library source",
        dataset_description=f"{len(prompts)} held-out prompts, each completed with {arguments.new_tokens} bytes at "
        f"temperature {arguments.temperature:g}.",
        hardware=f"{platform.machine()} processor, {arguments.threads} threads",
        dtype=str(model.dtype).removeprefix("torch."),
        command=f"python benchmarks/ptp_text.py --slots {arguments.slots} --minutes "
        + " ".join(f"{value:g}" for value in arguments.minutes),
        library_version=__version__,
        accepted_by_position=measured[0].accepted_by_position,
    )
    results.to_json(folder / "results.json")
    how = f"Distilled from its own backbone for {arguments.minutes[1]:g} minutes with `PTPTrainer`."
    student = drafter.get("assistant_model", model)
    write_card(folder, render_card(student, results, training_description=how))
    return results


if __name__ == "__main__":
    main()
