"""Prompts of files and data sets: dialogues of Spec-Bench and SPEED-Bench, questions of GSM8K, plain prompts, text."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from ...generation.backbone.wrapped_models import Kwargs
from ..columns import PROMPTS, check_columns, template_options
from ..utils import needs_extra

_THINKING = "enable_thinking"


@dataclass(frozen=True)
class Prompt:
    """The turns of a user; the answers between the turns are the model's own."""

    name: str  # the file's `question_id`, or the number of the line
    turns: tuple[str, ...]  # the user's messages
    category: str = "prompts"  # the file's
    before: tuple[Kwargs, ...] = ()  # messages before the first turn, such as that of the system
    references: tuple[str | None, ...] = ()  # answers to the turns by which a model's are scored; None: there is none
    options: Kwargs = field(default_factory=dict)  # what chat templates read besides messages, such as `tools`


def read_prompts(
    source: str | Path, skip_broken: bool = False, ignore_columns: Sequence[str] | None = None
) -> tuple[list[Prompt], list[str]]:
    """Return the prompts of a file or of a data set, and the errors of the rows that were left out.

    The source is a `.jsonl` with JSON strings, or objects with `turns` (Spec-Bench, SPEED-Bench), `question` (GSM8K),
    `messages`, `prompt` or `text`, and, optionally, `question_id`, `category`, `reference` or `answer`, and for the
    chat template `tools` and `chat_template_kwargs`; any other file with a prompt per line; or `NAME:SPLIT` or
    `NAME:CONFIG:SPLIT` of a data set with such rows. Columns that are not known or in `ignore_columns` are refused.
    """
    prompts, broken = list[Prompt](), list[str]()
    for number, row in enumerate(_rows(str(source)), 1):
        try:
            if not isinstance(row, str) or row.strip():
                is_json = isinstance(row, str) and str(source).endswith(".jsonl")
                prompts.append(_prompt(number, json.loads(row) if is_json else row, {*(ignore_columns or ())}))
        except ValueError as error:  # of json's, too
            broken.append(f"line {number}: {error}")
    names = Counter(prompt.name for prompt in prompts).most_common(1)
    if broken and not skip_broken:
        raise ValueError(f"{source}, {broken[0]}")
    if not names:
        raise ValueError(f"{source}: no prompt in it")
    if names[0][1] > 1:
        raise ValueError(f"{source}: question_id {names[0][0]} occurs twice")
    return prompts, broken


def _rows(source: str) -> Iterable[Any]:
    """Return the lines of a file, or the objects of a data set."""
    if (path := Path(source)).is_file():
        return path.read_text(encoding="utf-8").split("\n")
    name, *config, split = source.split(":") if source.count(":") in (1, 2) else (source, "")
    if not split:
        raise FileNotFoundError(f"{source}: no such file of prompts; of a data set, name the split, too: NAME:SPLIT")
    with needs_extra("train", "prompts of a data set"):
        from datasets import load_dataset
    return map(dict, load_dataset(name, *config, split=split))


def _prompt(number: int, value: Any, ignored: Set[str]) -> Prompt:
    entry = value if isinstance(value, dict) else {"prompt": value}
    # None are columns of a data set that others fill
    entry = {name: each for name, each in entry.items() if each is not None and name not in ignored}
    check_columns(entry, PROMPTS, "a prompt")
    before, turns = tuple[Kwargs, ...](), entry.get("turns")
    messages = next((entry[name] for name in ("messages", "prompt") if isinstance(entry.get(name), list)), None)
    if messages is not None:
        users = [at for at, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"]
        before = tuple(messages[: users[-1]]) if users else ()
        turns = [messages[users[-1]].get("content")] if users else []
    elif turns is None:
        turns = [next((entry[name] for name in ("question", "prompt", "text") if name in entry), None)]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError('neither a string nor an object with "turns", "question", "messages" or "prompt"')
    said = next((entry[name] for name in ("reference", "answer") if name in entry), [])
    references = tuple(each if isinstance(each, str) else None for each in ([said] if isinstance(said, str) else said))
    name, category = str(entry.get("question_id", number)), str(entry.get("category") or "prompts")
    return Prompt(name, tuple(map(str, turns)), category, before, references, template_options(entry))


def groups_of(prompts: Sequence[Prompt], batch_size: int, per_category: int | None = None) -> list[list[Prompt]]:
    """Return the prompts that are decoded together; categories take turns, and a group has one where it is possible.

    What is left over of a batch size is left out, unless it is all there is. `per_category=None` takes all.
    """
    columns, rest = list[list[list[Prompt]]](), list[Prompt]()
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        chosen = [prompt for prompt in prompts if prompt.category == category][:per_category]
        whole = len(chosen) - len(chosen) % batch_size
        columns.append([chosen[i : i + batch_size] for i in range(0, whole, batch_size)])
        rest += chosen[whole:]
    groups = [group for turn in zip_longest(*columns) for group in turn if group]
    mixed = [rest[i : i + batch_size] for i in range(0, len(rest), batch_size)]
    return groups + [group for group in mixed if len(group) == batch_size or not any(columns)]


@dataclass(frozen=True)
class PromptEncoder:
    """Makes ids of dialogues, by the tokenizer's chat template if `chats` and it has one; else turns are joined.

    Unless `thinks`, the template gets `enable_thinking=False`; templates that know no such option ignore it.
    """

    tokenizer: PreTrainedTokenizerBase
    chats: bool = True
    thinks: bool = True

    @property
    def template(self) -> str:
        """The template that is used, in words."""
        return "the tokenizer's chat template" if self._uses_template else "none, prompts as they are"

    @property
    def gap(self) -> str:
        """What stands between a prompt and the answer where both are shown."""
        return "\n\n" if self._uses_template else ""

    @property
    def _uses_template(self) -> bool:
        return self.chats and self.tokenizer.chat_template is not None

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Refuse prompts with tools, or other options of a template, where none is used."""
        for prompt in prompts if not self._uses_template else ():
            if prompt.options:
                raise ValueError(f"prompt {prompt.name} has {', '.join(prompt.options)}, which no chat template reads")

    def batch(
        self, group: Sequence[Prompt], answers: Sequence[Sequence[str]], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Return the padded ids and the mask of a group, with the model's answers to the turns of each so far."""
        texts = [self._text(prompt, earlier) for prompt, earlier in zip(group, answers)]
        options: Kwargs = {"padding": True, "padding_side": "left"} if len(texts) > 1 else {}
        options |= {"add_special_tokens": False} if self._uses_template else {}
        if len(texts) > 1 and self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        encoded = self.tokenizer(texts, return_tensors="pt", **options).to(device)
        return {name: encoded[name] for name in ("input_ids", "attention_mask")}

    def _text(self, prompt: Prompt, answers: Sequence[str]) -> str:
        contents = [each for turn in zip(prompt.turns, answers) for each in turn] + [prompt.turns[len(answers)]]
        said = ({"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents))
        chat = [*prompt.before, *said]
        if not self._uses_template:
            return "\n".join(str(message.get("content", "")) for message in chat)
        options: Kwargs = prompt.options | ({} if self.thinks else {_THINKING: False})
        return str(self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **options))

    def warn_of_thinking(self, drafters: Iterable[object]) -> None:
        """Warn of drafters that learned from answers without thinking, where the template lets the model think."""
        if self._uses_template and self.thinks and _THINKING in str(self.tokenizer.chat_template):
            for name in {type(each).__name__ for each in drafters if getattr(each, "learned_without_thinking", False)}:
                words = f"This {name} learned from answers without thinking, which the chat template leaves on: "
                warnings.warn(words + "--no-thinking turns it off (enable_thinking=False)", UserWarning, stacklevel=2)

    def answer(self, ids: Sequence[int]) -> str:
        """Return the text of new ids, for the history of the next turn."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))
