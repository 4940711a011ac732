"""What a demo shows: a model with plain decoding and its drafters, and the prompts that it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..generation.attach import MTPGenerationMixin
from ..generation.drafter import BaseDrafter
from .box import Box, excerpt_prompts, load_box
from .evaluation.decoding import MODES, DecodingMode, Method
from .evaluation.methods import drafting_method, named_method, plain_method
from .evaluation.prompts import Prompt, PromptEncoder, read_prompts
from .loading import load_model
from .utils import shown_word

_PREFIX = 320  # bytes of the held-out prefixes that the model in the box completes


@dataclass(frozen=True)
class DemoModel:
    """A model and its drafters, in words and as methods, of which the first decodes plainly, and what they answer.

    `prompts` makes prompts of a seed; `dataset` names them, and `description` says what they are. `arguments` of
    `tokenahead demo` name all this, and `facts` are shown beside the results.
    """

    words: str
    methods: Sequence[Method]
    writer: PromptEncoder
    prompts: Callable[[int], list[Prompt]]
    dataset: str
    description: str
    modes: Sequence[DecodingMode] = MODES
    arguments: Sequence[str] = ()
    facts: dict[str, str | int | float] = field(default_factory=dict)


def box_model(directory: str | Path | None = None, prompts: int = 32, dtype: str = "auto") -> DemoModel:
    """Return the model in the box (None: the installed one) with each of its heads, and held-out code to complete.

    `dtype` is that of the weights; `"auto"`: float32.

    Raises:
        BoxDamagedError: There is no box, or a file of it is missing or has a wrong checksum; the message names it.
    """
    box = Box.load(directory, "float32" if dtype == "auto" else dtype)
    first, *_ = box.models.values()
    ranks = {head: model.config.mtp_head.rank for head, model in box.models.items()}
    models = {head if ranks[head] in (None, 1) else f"{head} {ranks[head]}": box.models[head] for head in ranks}
    sizes = {name: _further_parameters(model, model) for name, model in models.items()}
    packages = ", ".join(sorted({excerpt.package for excerpt in box.excerpts}))

    def completed(seed: int) -> list[Prompt]:
        texts = excerpt_prompts(box.excerpts, prompts, seed, _PREFIX)
        return [Prompt(str(number), (text,)) for number, text in enumerate(texts)]

    return DemoModel(
        f"The model in the box: EvaByte with {_backbone_parameters(first):,} parameters, {str(first.dtype)[6:]}; "
        f"heads over {first.window} bytes: {', '.join(f'{name} ({size:,})' for name, size in sizes.items())}",
        [plain_method(first), *(drafting_method(name, model) for name, model in models.items())],
        PromptEncoder(box.tokenizer, chats=False),
        completed,
        "held-out Python packages",
        f"Source of {packages}, of which nothing was trained on, prompts of up to {_PREFIX} bytes",
        arguments=[] if dtype == "auto" else ["--dtype", dtype],
        facts={f"Parameters of {name}": size for name, size in sizes.items()},
    )


def requests(further: bool = False) -> list[Prompt]:
    """Return a short request of each of eight kinds, or three, for models of which no prompts are given."""
    return read_prompts(Path(__file__).with_name("requests.jsonl"))[0][: None if further else 8]


def named_model(
    model: str | None, drafter: str | None = None, prompts: Path | None = None, dtype: str = "auto"
) -> DemoModel:
    """Return a model, what drafts for it, and prompts.

    Args:
        model: Directory, or name on the Hub; None: the model in the box.
        drafter: A method of `tokenahead bench`; None: the model's own drafts, or n-grams.
        prompts: A file of prompts, as `read_prompts` takes it; None: a short request of each of eight kinds.
        dtype: Of the weights; `"auto"`: the checkpoint's, float32 of the model in the box.

    Raises:
        OSError: No such directory or file, or what the Hub cannot give.
        ValueError: No model, prompts that cannot be read, or a drafter that does not fit.
    """
    asked = read_prompts(prompts)[0] if prompts else requests()
    loaded, tokenizer, plain, drafting = load_methods(model, drafter, dtype)
    writer, kinds = PromptEncoder(tokenizer, chats=bool(model)), dict.fromkeys(prompt.category for prompt in asked)
    given = {"model": model, "drafter": drafter, "prompts": prompts, "dtype": None if dtype == "auto" else dtype}
    return DemoModel(
        described(loaded, model, drafting),
        [plain, drafting],
        writer,
        lambda seed: asked,
        prompts.name if prompts else "short requests",
        f"{'Prompts' if prompts else 'Requests'} of {', '.join(kinds)}",
        modes=(MODES[0], MODES[-1]),
        arguments=[word for name, value in given.items() if value for word in (f"--{name}", str(value))],
        facts={"Model": shown_word(model or "the model in the box"), "Chat template": writer.template},
    )


def load_methods(
    model: str | None, drafter: str | None, dtype: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Method, Method]:
    """Return a model, its tokenizer, plain decoding, and the method of `tokenahead bench` that drafts."""
    loaded, tokenizer = load_model(model, dtype) if model else load_box(dtype="float32" if dtype == "auto" else dtype)
    drafter = drafter or ("own" if isinstance(loaded, MTPGenerationMixin) else "ngram")
    return loaded, tokenizer, plain_method(loaded), named_method(drafter, loaded)


def described(model: PreTrainedModel, name: str | None, method: Method) -> str:
    """Return a model and what drafts for it, in a line, with the parameters of each."""
    about = f"{_backbone_parameters(model):,} parameters, {str(model.dtype)[6:]}"
    further = _further_parameters(method.drafter, model)
    drafts = f"{method.name}{f' ({further:,} further parameters)' if further else ''}"
    return f"{name or 'The model in the box'} ({about}), drafts: {drafts}"


def _backbone_parameters(model: PreTrainedModel) -> int:
    """Return the parameters of plain decoding, its unembedding among them: all but those that only draft."""
    return model.num_parameters() - (_further_parameters(model, model) if isinstance(model, BaseDrafter) else 0)


def _further_parameters(drafter: BaseDrafter, model: PreTrainedModel) -> int:
    """Return the parameters that a drafter adds to those of plain decoding; of a model, those that only draft."""
    parts = (part for part in drafter.parts().values() if part is not model.get_output_embeddings())
    return sum(each.numel() for part in parts for each in part.parameters())


def spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], flags: Sequence[bool]) -> Iterator[tuple[str, bool]]:
    """Yield pieces of the text of ids, and whether they were drafted, as `flags` say.

    An incomplete character belongs to the token that completes it.
    """
    end, done = 0, ""
    for is_drafted, run in groupby(flags):
        end += len([*run])
        whole = str(tokenizer.decode(list(ids[:end])))
        whole = whole if end == len(flags) else whole.rstrip("\ufffd")
        if whole != done:
            yield whole[len(done) :], is_drafted
        done = whole
