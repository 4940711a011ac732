"""`tokenahead restore-modules`: a fine-tune gets the modules of its base back, and what they accept is measured."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from rich.console import Console
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.utils import logging

from ...generation.tensors.tensor_files import weight_files
from ...modeling import DeepSeekMTP
from ...modeling.deepseek.conversion import SCALES, in_full
from ..demo import requests
from ..doctor.report import answers
from ..evaluation.decoding import drafting_method
from ..evaluation.drafts import GREEDY_RULE, DraftMeasures
from ..evaluation.prompts import Prompt, PromptEncoder, read_prompts
from ..loading import load_model
from ..requests import RestoreRequest

TRAINED = "trained"
"""The folder, in that of the restored model, of the one whose modules have learned."""


def main(request: RestoreRequest) -> int:
    """Write the restored model; show how far its backbone has moved, and what its modules accept. Return 0."""
    console = Console(highlight=False, emoji=False, markup=False, soft_wrap=True)
    logging.disable_progress_bar()
    output, trained = request.output, request.output / TRAINED
    if output.resolve() in (Path(request.model).resolve(), Path(request.modules).resolve()):
        raise ValueError(f"--output {output} would be written over a model that is read: choose another directory")
    prompts = read_prompts(request.prompts)[0] if request.prompts else requests(further=True)
    tokenizer = AutoTokenizer.from_pretrained(request.model)
    DeepSeekMTP.from_pretrained(request.model, modules=request.modules, dtype=request.dtype).save_pretrained(output)
    tokenizer.save_pretrained(output)
    moved = distances(request.model, request.modules)
    name, largest = max(moved.items(), key=itemgetter(1))
    mean = f"|tuned - base| / |base| of {len(moved)} shared tensors is {fmean(moved.values()):.2%} in the mean"
    console.print(f"backbone: {mean}, {largest:.2%} at most ({name})")
    console.print(f"restored: {_accepted(output, request, prompts)}")
    if request.train:
        from .settings import read_settings
        from .train import train

        words = {"model_name_or_path": output, "output_dir": trained, "dtype": request.dtype, "save_strategy": "no"}
        words |= {"dataset_name": request.train, "max_steps": request.steps, "use_cpu": request.device == "cpu"}
        train(read_settings([word for name, value in words.items() for word in (f"--{name}", str(value))]))
        console.print(f"after {request.steps} steps: {_accepted(trained, request, prompts)}")
    return 0


def distances(tuned: str, base: str) -> dict[str, float]:
    """Return |tuned - base| / |base|, Frobenius norms, by the name of each tensor that both checkpoints have.

    Tensors are read one by one, those of float8 with their scales. Scales, and what is 0 in the base, have no distance.
    """
    with ExitStack() as stack:
        ours, theirs = _Weights(tuned, stack), _Weights(base, stack)
        found = dict[str, float]()
        for key in ours.files.keys() & theirs.files.keys():
            if not key.endswith(("scale", "scale_inv")) and (norm := float((old := theirs[key]).norm())):
                found[key] = float((ours[key] - old).norm()) / norm
    return found


class _Weights:
    """The weights of a checkpoint in float32, of which each is read when it is asked for."""

    def __init__(self, name: str, stack: ExitStack) -> None:
        self.config = AutoConfig.from_pretrained(name)
        opened = [stack.enter_context(safe_open(file, framework="pt")) for file in weight_files(name)]
        self.files = {key: file for file in opened for key in file.keys()}  # noqa: SIM118

    def __getitem__(self, key: str) -> Tensor:
        stem = key.removesuffix("weight")
        wanted = [each for each in (key, *(stem + scale for scale in SCALES)) if each in self.files]
        return in_full({each: self.files[each].get_tensor(each) for each in wanted}, self.config)[key].float()


def _accepted(folder: Path, request: RestoreRequest, prompts: Sequence[Prompt]) -> str:
    """Return, in words, what a model's own drafts save along its greedy answers, which drafts do not change."""
    model, tokenizer = load_model(str(folder), request.dtype, request.device)
    writer = PromptEncoder(tokenizer, not request.raw)
    writer.check(prompts)
    measures = DraftMeasures(temperature=0.0)
    for text in answers(drafting_method("own", model), writer, prompts, request.new_tokens)[0]:
        measures.add(model, text)
    calls = measures.calls[GREEDY_RULE[0]]
    shares = ", ".join(f"{share:.0%}" for share in calls.by_position)
    saved = f"{calls.tokens_per_call:.2f} tokens per call, drafts accepted: {shares}"
    return f"{saved} ({len(calls.tokens)} greedy answers)"
