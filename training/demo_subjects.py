"""What a demo shows: a model with plain decoding and its drafters, and the prompts that it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..generation.attach import MTPGenerationMixin
from ..generation.drafter import BaseDrafter
from ..modeling import EvaByteForMTPC
from .box import Box, excerpt_prompts, load_box
from .evaluation.decoding import MODES, DecodingMode, Method
from .evaluation.methods import drafting_method, named_method, plain_method
from .evaluation.prompts import Prompt, PromptEncoder, read_prompts
from .loading import load_model
from .utils import shown_word

_PREFIX = 320  # bytes of the held-out prefixes that the model in the box completes
_PREFIXES = 32
_REQUESTS = {
    "writing": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "coding": "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "mathematics": "A baker sells 3 rolls for 2 euros. How much do 12 rolls cost? Explain it step by step.",
    "extraction": "List the names and the years in this text, a line for each: Anna Berg founded the mill in 1891. Her "
    "nephew Olof Lind sold it in 1924 to Maria Santos, who had come from Porto in 1910.",
    "planning": "Plan a day in the mountains for a family with two small children, hour by hour.",
    "rewriting": "Correct the mistakes in this text: Yesterday we was walking to the lake, and their we seen two swan "
    "who was sleeping under a old tree.",
    "knowledge": "Why is the sky blue, and why is it red in the evening?",
    "translation": "Translate into French: The train to the coast leaves at nine, and the last one back at seven.",
}
"""By category, what a model is asked where no prompts are given."""
_FURTHER = {
    "writing": (
        "Write a letter from a grandmother to her grandson who is at sea.",
        "Write a poem about a town in the rain.",
    ),
    "coding": (
        "Write a Python class of a bank account.",
        "Write a SQL query that counts the orders of every customer.",
    ),
    "mathematics": (
        "A train goes 150 km in 2 hours. How far does it go in 5?",
        "What is 15 % of 240? Show every step.",
    ),
    "extraction": (
        "List the colours in: a red boat, two green nets, blue rope.",
        "List the verbs in: She sat, read and slept.",
    ),
    "planning": ("Plan a dinner for six people, course by course.", "Plan how to learn to swim in eight weeks."),
    "rewriting": (
        "Write this politely: Send me the money now.",
        "Shorten: The meeting that was planned for today is off.",
    ),
    "knowledge": ("How do bees make honey?", "Why do ships of steel float?"),
    "translation": ("Translate into German: Where is the station?", "Translate into Spanish: The soup is cold again."),
}
"""What the doctor asks besides."""


@dataclass(frozen=True)
class DemoModel:
    """A model, its methods and its prompts.

    Attributes:
        words: The model and its drafters, in a line.
        methods: The first decodes plainly.
        writer: Makes ids of prompts.
        prompts: From a seed to the prompts.
        dataset: Short name of the prompts.
        description: What they are.
        modes: Ways of decoding.
        arguments: Of `tokenahead demo`, which name the subject.
        facts: To show beside the results, by name.
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


def box_model(directory: str | Path | None = None, prompts: int = _PREFIXES, dtype: str = "auto") -> DemoModel:
    """Return the model in the box (None: the installed one) with each of its heads, and held-out code to complete.

    `dtype` is that of the weights; `"auto"`: float32.

    Raises:
        BoxDamagedError: There is no box, or a file of it is missing or has a wrong checksum; the message names it.
    """
    box = Box.load(directory, _dtype_of_box(dtype))
    first, *_ = box.models.values()
    names = {head: _name(head, model) for head, model in box.models.items()}
    sizes = {names[head]: _further_parameters(model, model) for head, model in box.models.items()}
    packages = sorted({excerpt.package for excerpt in box.excerpts})

    def beginnings(seed: int) -> list[Prompt]:
        texts = excerpt_prompts(box.excerpts, prompts, seed, _PREFIX)
        return [Prompt(str(number), (text,)) for number, text in enumerate(texts)]

    return DemoModel(
        words=f"The model in the box: EvaByte with {_backbone_parameters(first):,} parameters, {_shown_dtype(first)}; "
        f"heads over {first.window} bytes: {', '.join(f'{name} ({size:,})' for name, size in sizes.items())}",
        methods=[plain_method(first), *(drafting_method(names[head], model) for head, model in box.models.items())],
        writer=PromptEncoder(box.tokenizer, chats=False),
        prompts=beginnings,
        dataset="held-out Python packages",
        description=f"Source of {', '.join(packages)}, of which nothing was trained on, prompts of up to {_PREFIX} "
        "bytes",
        arguments=[] if dtype == "auto" else ["--dtype", dtype],
        facts={f"Parameters of {name}": size for name, size in sizes.items()},
    )


def _name(head: str, model: EvaByteForMTPC) -> str:
    """Return the family of a head, and its rank if it has one."""
    rank = model.config.mtp_head.rank
    return head if rank in (None, 1) else f"{head} {rank}"


def requests(further: bool = False) -> list[Prompt]:
    """Return a short request of each of eight kinds, or three, for models of which no prompts are given."""
    every = {name: (text, *(_FURTHER[name] if further else ())) for name, text in _REQUESTS.items()}
    numbered = [(name, *pair) for name, texts in every.items() for pair in enumerate(texts)]
    return [Prompt(f"{name} {number}" if number else name, (text,), name) for name, number, text in numbered]


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
        FileNotFoundError: No such directory or file.
        OSError: What the Hub cannot give.
        ValueError: No model, prompts that cannot be read, or a drafter that does not fit.
    """
    asked = read_prompts(prompts)[0] if prompts else requests()
    loaded, tokenizer, plain, drafting = load_methods(model, drafter, dtype)
    writer = PromptEncoder(tokenizer, chats=bool(model))
    given = {"model": model, "drafter": drafter, "prompts": prompts, "dtype": None if dtype == "auto" else dtype}
    return DemoModel(
        words=described(loaded, model, drafting),
        methods=[plain, drafting],
        writer=writer,
        prompts=lambda seed: asked,
        dataset=prompts.name if prompts else "short requests",
        description=f"{'Prompts' if prompts else 'Requests'} of "
        f"{', '.join(dict.fromkeys(prompt.category for prompt in asked))}",
        modes=(MODES[0], MODES[-1]),
        arguments=[word for name, value in given.items() if value for word in (f"--{name}", str(value))],
        facts={"Model": shown_word(model or "the model in the box"), "Chat template": writer.template},
    )


def load_methods(
    model: str | None, drafter: str | None, dtype: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, Method, Method]:
    """Return a model, its tokenizer, plain decoding, and the method of `tokenahead bench` that drafts.

    See `named_model`.
    """
    loaded, tokenizer = load_model(model, dtype) if model else load_box(dtype=_dtype_of_box(dtype))
    drafter = drafter or ("own" if isinstance(loaded, MTPGenerationMixin) else "ngram")
    return loaded, tokenizer, plain_method(loaded), named_method(drafter, loaded)


def described(model: PreTrainedModel, name: str | None, method: Method) -> str:
    """Return a model and what drafts for it, in a line, with the parameters of each."""
    about = f"{_backbone_parameters(model):,} parameters, {_shown_dtype(model)}"
    further = _further_parameters(method.drafter, model)
    drafts = f"{method.name}{f' ({further:,} further parameters)' if further else ''}"
    return f"{name or 'The model in the box'} ({about}), drafts: {drafts}"


def _dtype_of_box(dtype: str) -> str:
    return "float32" if dtype == "auto" else dtype


def _shown_dtype(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _backbone_parameters(model: PreTrainedModel) -> int:
    """Return the parameters of plain decoding, its unembedding among them: all but those that only draft."""
    return model.num_parameters() - (_further_parameters(model, model) if isinstance(model, BaseDrafter) else 0)


def _further_parameters(drafter: BaseDrafter, model: PreTrainedModel) -> int:
    """Return the parameters that a drafter adds to those of plain decoding; of a model, those that only draft."""
    parts = (part for part in drafter.parts().values() if part is not model.get_output_embeddings())
    return sum(each.numel() for part in parts for each in part.parameters())
