"""Parallel token prediction on Python source: distilled from a small backbone, then decoded with and without drafts.

    python benchmarks/ptp_text.py                         # 4 minutes for the backbone, 10 for each student
    python benchmarks/ptp_text.py --minutes 1 1 --slots 4
    python benchmarks/ptp_text.py --backbone demo-llama --minutes 0 2 --acceptance    # of benchmarks/byte_llama.py

A byte-level Llama of 1 million parameters learns the Python standard library's source, and continues beginnings of it
at the temperature of decoding (`--texts 0`: students learn from the source itself). Students are distilled from it with
`PTPTrainer`, in so many minutes of *processor* time each: O-PTP (`one_hot`), verified with the uniforms that it drafts
from, C-PTP (`categorical`), verified by block, and independent prediction, which is O-PTP whose uniforms say nothing.
With `--small FOLDER`, C-PTP of a smaller backbone learns from the same teacher, and drafts for it (`separate`). They
complete held-out code by turns with transformers' own decoding of the same model. `--acceptance` counts tokens per
call, and measures no times: that is all that a busy machine can tell.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from byte_llama import config_of, optimizer_of
from corpus import ByteWindows, Corpus, load_corpus
from measuring import show
from studies import LENGTH, benched, train
from transformers import LlamaForCausalLM, Trainer

from tokenahead import EvaByteTokenizer, PTPForCausalLM
from tokenahead.training import regenerate
from tokenahead.training.box import code_prompts
from tokenahead.training.evaluation import GREEDY, DecodingMode, sampled
from tokenahead.training.evaluation.summary import results_of
from tokenahead.training.ptp.losses import PTPOptions
from tokenahead.training.ptp.trainer import PTPTrainer

PROMPT = 96
"""Bytes of a prompt that is decoded from."""
KINDS = {
    "one_hot": {"variant": "one_hot"},
    "categorical": {"variant": "categorical"},
    "independent": {"variant": "one_hot", "informative": False},
    "separate": {"variant": "categorical"},
}


def fit(make: Callable[..., Trainer], model: Any, data: Any, minutes: float, rates: tuple[float, float]) -> None:
    """Train for so many minutes of processor time, with Muon and AdamW."""
    trainer = train(model, make, data, 60 * minutes, optimizer=optimizer_of(model, *rates), prints=True)
    print(f"{trainer.state.global_step} steps", flush=True)


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
    corpus = load_corpus(seed=0)
    backbone = arguments.backbone or arguments.output / "backbone"
    if not arguments.reuse and arguments.backbone is None:
        model = LlamaForCausalLM(config_of(128, 4))
        fit(Trainer, model, ByteWindows(corpus.train, LENGTH), arguments.minutes[0], (0.03, 1e-2))
        model.save_pretrained(backbone)
    prompts = code_prompts(corpus.held_out.contents(), arguments.prompts, length=PROMPT)
    rows: list[list[str]] = []
    for kind in arguments.kinds:
        folder = arguments.output / kind
        if not (arguments.reuse and folder.is_dir()):
            distil(arguments, kind, backbone, texts(arguments, backbone, corpus), folder)
        model, drafter = reader(kind, folder, backbone)
        ways = modes(kind, arguments.temperature)
        if arguments.acceptance:
            found = [acceptance(model, drafter, prompts, mode, arguments.new_tokens) for mode in ways]
            rows += [[kind, mode.name, f"{value:.3f}", "-", "-"] for mode, value in zip(ways, found)]
            continue
        bench = benched(model, drafter.get("assistant_model"), prompts, ways, arguments.new_tokens)
        for row in (row for row in results_of(bench) if row.method == "drafts"):
            figures = f"{row.tokens_per_call:.2f}", f"{row.speed_up or math.nan:.2f}", str(row.identical)
            rows.append([kind, row.name, *figures])
    show(("student", "decoding", "tokens/call", "speed-up", "identical"), rows)


def texts(arguments: argparse.Namespace, backbone: Path, corpus: Corpus) -> Any:
    """What students learn from: texts of the backbone, written once, or pieces of the source."""
    windows = ByteWindows(corpus.train, LENGTH)
    if not arguments.texts:
        return windows
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[: arguments.texts].tolist()
    prompts = [windows[index]["input_ids"][: LENGTH // 8].tolist() for index in order]
    teacher = LlamaForCausalLM.from_pretrained(backbone).eval()
    how = dict(batch_size=64, do_sample=True, temperature=arguments.temperature, top_k=0)
    return regenerate(teacher, prompts, arguments.output / "texts", LENGTH - LENGTH // 8, **how)


def distil(arguments: argparse.Namespace, kind: str, backbone: Path, data: Any, folder: Path) -> None:
    """Trains a student of the backbone, and saves it."""
    torch.manual_seed(1)
    model = PTPForCausalLM.from_backbone(
        arguments.small if kind == "separate" else backbone, num_slots=arguments.slots, lora_rank=arguments.rank,
        sampling={"temperature": arguments.temperature}, **KINDS[kind],
    )  # fmt: skip
    loss = "ce" if model.config.predicts_tokens else "kl"
    options = PTPOptions(loss=loss, completions=32)
    teacher = LlamaForCausalLM.from_pretrained(backbone) if kind == "separate" else None
    make = partial(PTPTrainer, options=options, teacher=teacher)
    fit(make, model, data, arguments.minutes[1], (0.03, 1.5e-2))
    model.save_pretrained(folder)
    EvaByteTokenizer().save_pretrained(folder)


def reader(kind: str, folder: Path, backbone: Path) -> tuple[Any, dict[str, Any]]:
    """What decodes with a student, and the options that say so: itself, or the backbone that it drafts for."""
    student = PTPForCausalLM.from_pretrained(folder).eval()
    if kind != "separate":
        return student, {}
    model = LlamaForCausalLM.from_pretrained(backbone).eval()
    student.attach(model)
    return model, {"assistant_model": student}


if __name__ == "__main__":
    main()
