"""Parallel token prediction on Python source: distilled from a small backbone, then decoded with and without drafts.

    python benchmarks/ptp_text.py                         # 4 minutes for the backbone, 10 for each student
    python benchmarks/ptp_text.py --backbone demo-llama --minutes 0 1.5 --slots 4 16 --seeds 0 1 2 --acceptance

A byte-level Llama of 1 million parameters (or one of benchmarks/byte_llama.py) learns the Python standard library's
source, and continues beginnings of it at the temperature of decoding (`--texts 0`: students learn from the source
itself). Students are distilled from it with `PTPTrainer`, in so many minutes of *processor* time each: O-PTP
(`one_hot`), verified with the uniforms that it drafts from, C-PTP (`categorical`) and independent prediction, which is
O-PTP whose uniforms say nothing, verified so and by block. With `--small FOLDER`, C-PTP of a smaller backbone learns
from the same teacher, and drafts for it (`separate`). They complete held-out code by turns with transformers' own
decoding of the same model. `--acceptance` counts tokens per verification in one batch, and measures no times: a busy
machine can tell no more. A stopped run continues: what `results.json` of the output directory holds is not measured
again, and students in it are not trained again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from byte_llama import config_of, optimizer_of
from corpus import ByteWindows, Corpus, load_corpus
from measuring import resumed, show
from studies import LENGTH, benched, train
from transformers import LlamaForCausalLM, Trainer

from tokenahead import EvaByteTokenizer, PTPForCausalLM
from tokenahead.training import regenerate
from tokenahead.training.box import code_prompts
from tokenahead.training.evaluation import DecodingMode, repeated_share, sampled
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
    """Return tokens per verification, over all texts that do not repeat themselves."""
    torch.manual_seed(0)
    inputs = EvaByteTokenizer()(prompts, return_tensors="pt", padding=True).to(model.device)
    how = mode.options | drafter | {"max_new_tokens": new_tokens, "return_dict_in_generate": True}
    out = model.generate(**inputs, **how)
    texts = zip(out.sequences[:, inputs.input_ids.shape[1] :].tolist(), out.speculation.rows_accepted)
    return 1 + statistics.fmean(n for ids, accepted in texts if repeated_share(ids) <= 0.5 for n in accepted)


def modes(kind: str, temperature: float) -> list[DecodingMode]:
    """Ways of decoding to compare."""
    drawn = sampled(temperature).options
    coupled = DecodingMode("coupled", drawn | {"verification": "coupled"})
    if kind == "one_hot":
        return [coupled, DecodingMode("best of 2", coupled.options | {"best_of": 2})]
    return [coupled, DecodingMode("block", drawn | {"verification": "block"})]


def answer(arguments: argparse.Namespace, corpus: Corpus, kind: str, slots: int, seed: int) -> dict[str, list[float]]:
    """Return tokens per call of every way to verify a student's drafts, and the speed-up unless calls alone count."""
    backbone = arguments.backbone or arguments.output / "backbone"
    folder = arguments.output / f"{kind}-{slots}-{seed}"
    if not folder.is_dir():
        distil(arguments, kind, slots, seed, texts(arguments, backbone, corpus), folder)
    model, drafter = reader(kind, folder, backbone, arguments.device)
    prompts = code_prompts(corpus.held_out.contents(), arguments.prompts, length=PROMPT)
    ways = modes(kind, arguments.temperature)
    if arguments.acceptance:
        return {mode.name: [acceptance(model, drafter, prompts, mode, arguments.new_tokens)] for mode in ways}
    rows = results_of(benched(model, drafter.get("assistant_model"), prompts, ways, arguments.new_tokens))
    return {row.decoding: [row.tokens_per_call, row.speed_up or math.nan] for row in rows if row.method == "drafts"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, nargs=2, default=[4, 10], help="for the backbone, and per student")
    parser.add_argument("--slots", type=int, nargs="+", default=[4], help="N")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="how students start")
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
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="that decodes; students learn on a GPU where there is one")
    parser.add_argument("--acceptance", action="store_true", help="count tokens per call, and measure no times")
    parser.add_argument("--output", type=Path, default=Path("tokenahead-ptp"))
    arguments = parser.parse_args()
    if "separate" in arguments.kinds and arguments.small is None:
        parser.error("--kinds separate drafts with a smaller backbone; name its directory, --small FOLDER")
    torch.set_num_threads(arguments.threads)
    corpus = load_corpus(seed=0)
    if arguments.backbone is None and not (arguments.output / "backbone").is_dir():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config_of(128, 4))
        fit(Trainer, model, ByteWindows(corpus.train, LENGTH), arguments.minutes[0], (0.03, 1e-2))
        model.save_pretrained(arguments.output / "backbone")
    arguments.output.mkdir(parents=True, exist_ok=True)
    asked = {
        f"{kind}, N={slots}, seed {seed}, {arguments.minutes[1]:g} minutes": (kind, slots, seed)
        for seed, slots, kind in product(arguments.seeds, arguments.slots, arguments.kinds)
    }
    found = resumed(arguments.output / "results.json", asked, lambda name: answer(arguments, corpus, *asked[name]))
    rows = [[name, mode, *(f"{v:.3f}" for v in values)] for name in asked for mode, values in found[name].items()]
    show(("student", "verification", "tokens/call", *["speed-up"] * (not arguments.acceptance)), rows)


def texts(arguments: argparse.Namespace, backbone: Path, corpus: Corpus) -> Any:
    """What students learn from: texts of the backbone, written once, or pieces of the source."""
    windows = ByteWindows(corpus.train, LENGTH)
    if not arguments.texts:
        return windows
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))[: arguments.texts].tolist()
    prompts = [windows[index]["input_ids"][: LENGTH // 8].tolist() for index in order]
    teacher: Any = LlamaForCausalLM.from_pretrained(backbone).eval()
    how: dict[str, Any] = dict(batch_size=64, do_sample=True, temperature=arguments.temperature, top_k=0)
    return regenerate(teacher.to(arguments.device), prompts, arguments.output / "texts", LENGTH - LENGTH // 8, **how)


def distil(arguments: argparse.Namespace, kind: str, slots: int, seed: int, data: Any, folder: Path) -> None:
    """Trains a student of the backbone, and saves it."""
    backbone = arguments.backbone or arguments.output / "backbone"
    torch.manual_seed(seed)
    model = PTPForCausalLM.from_backbone(
        arguments.small if kind == "separate" else backbone, num_slots=slots, lora_rank=arguments.rank,
        sampling={"temperature": arguments.temperature}, **KINDS[kind],
    )  # fmt: skip
    loss = "ce" if model.config.predicts_tokens else "kl"
    options = PTPOptions(loss=loss, completions=32)
    teacher = LlamaForCausalLM.from_pretrained(backbone) if kind == "separate" else None
    make = partial(PTPTrainer, options=options, teacher=teacher)
    fit(make, model, data, arguments.minutes[1], (0.03, 1.5e-2))
    model.save_pretrained(folder)
    EvaByteTokenizer().save_pretrained(folder)


def reader(kind: str, folder: Path, backbone: Path, device: str) -> tuple[Any, dict[str, Any]]:
    """What decodes with a student, and the options that say so: itself, or the backbone that it drafts for."""
    student: Any = PTPForCausalLM.from_pretrained(folder).eval().to(device)
    if kind != "separate":
        return student, {}
    model: Any = LlamaForCausalLM.from_pretrained(backbone).eval()
    student.attach(model.to(device))
    return model, {"assistant_model": student}


if __name__ == "__main__":
    main()
