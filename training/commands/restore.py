"""`tokenahead restore-modules`: a fine-tune gets the modules of its base back, and what they accept is measured."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from ...generation.tensors.tensor_files import read_tensors, weight_files
from ...modeling import DeepSeekMTP
from ...modeling.deepseek.conversion import SCALES, in_full
from ..demo import requests
from ..doctor.report import answers
from ..evaluation.decoding import drafting_method
from ..evaluation.drafts import GREEDY_RULE, DraftMeasures
from ..evaluation.prompts import PromptEncoder, read_prompts
from ..loading import load_model
from ..requests import RestoreRequest


def main(request: RestoreRequest) -> int:
    """Write the restored model; show how far its backbone has moved, and what its modules accept. Return 0."""
    logging.disable_progress_bar()
    output, trained = request.output, request.output / "trained"
    if output.resolve() in (Path(request.model).resolve(), Path(request.modules).resolve()):
        raise ValueError(f"--output {output} would be written over a model that is read: choose another directory")
    DeepSeekMTP.from_pretrained(request.model, modules=request.modules, dtype=request.dtype).save_pretrained(output)
    AutoTokenizer.from_pretrained(request.model).save_pretrained(output)
    moved = distances(request.model, request.modules)
    mean, (largest, name) = fmean(moved.values()), max((value, name) for name, value in moved.items())
    print(f"|tuned - base| / |base| of {len(moved)} shared tensors: mean {mean:.2%}, largest {largest:.2%} ({name})")
    print(f"restored: {_accepted(output, request)}")
    if request.train:
        from .train import read_settings, train

        values = {"model_name_or_path": output, "output_dir": trained, "dtype": request.dtype, "save_strategy": "no"}
        values |= {"dataset_name": request.train, "max_steps": request.steps, "use_cpu": request.device == "cpu"}
        train(read_settings([f"--{name}={value}" for name, value in values.items()]))
        print(f"after {request.steps} steps: {_accepted(trained, request)}")
    return 0


def distances(tuned: str, base: str) -> dict[str, float]:
    """Return |tuned - base| / |base| (Frobenius) by name of tensors in both checkpoints, but for scales and zeros."""
    # mapped from the disk, and read one by one below
    stored = [(read_tensors(weight_files(name)), AutoConfig.from_pretrained(name)) for name in (tuned, base)]
    found, shared = dict[str, float](), stored[0][0].keys() & stored[1][0].keys()
    for key in (key for key in shared if not key.endswith(("scale", "scale_inv"))):
        names = [key, *(key.removesuffix("weight") + scale for scale in SCALES)]
        new, old = (in_full({name: own[name] for name in names if name in own}, config)[key] for own, config in stored)
        if old.any():
            found[key] = float((new.float() - old.float()).norm() / old.float().norm())
    return found


def _accepted(folder: Path, request: RestoreRequest) -> str:
    """Return, in words, what a model's own drafts save along its greedy answers, which drafts do not change."""
    model, tokenizer = load_model(str(folder), request.dtype, request.device)
    prompts = read_prompts(request.prompts)[0] if request.prompts else requests(further=True)
    measures = DraftMeasures(temperature=0.0)
    for text in answers(drafting_method("own", model), PromptEncoder(tokenizer), prompts, request.new_tokens)[0]:
        measures.add(model, text)
    calls = measures.calls[GREEDY_RULE[0]]
    shares = ", ".join(f"{share:.0%}" for share in calls.by_position)
    return f"{calls.tokens_per_call:.2f} tokens per call, drafts accepted: {shares} ({len(calls.tokens)} answers)"
