"""Columns of rows: which are read, which change nothing, and how masks of what is scored become labels.

Any other column is refused by name: to learn what a mask leaves out, or chats without their tools, is a silent fault.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from ..generation.backbone.wrapped_models import Kwargs
from ..modeling.common.online import STATES, SUMMARIES
from ..modeling.heads.losses import IGNORE
from .utils import needs_extra

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from trl.trainer.sft_config import SFTConfig

MASKS = ("loss_mask", "assistant_masks", "completion_mask")
"""What is scored of `input_ids`, 1 or 0 per token: of SpecForge, speculators and Model-Optimizer; of TRL."""
PER_TOKEN = frozenset({"input_ids", "labels", "attention_mask", "position_ids", STATES, SUMMARIES})
"""What models read, one entry per token."""
OPTIONS = ("tools", "chat_template_kwargs")
"""What chat templates read of a row besides its messages."""
TEXTS = ("text", "messages", "conversations", "prompt", "completion", *OPTIONS)
"""What ids are made of, which changes nothing beside them."""
PROMPTS = frozenset(
    {*TEXTS, "turns", "question", "reference", "answer", "response", "output", "solution", "canonical_solution"}
    | {"test", "tests", "entry_point", "multiturn"}
)
"""Columns of rows that are prompts; answers that are no reference are not read, and change nothing."""
# fmt: off
HARMLESS = frozenset({
    "id", "idx", "index", "uid", "uuid", "key", "hash", "sha", "sha1", "sha256", "md5", "row_id", "doc_id",
    "sample_id", "example_id", "prompt_id", "question_id", "conversation_id", "message_id", "task_id", "src_id",
    "_id", "__index_level_0__", "source", "sources", "dataset", "dataset_name", "data_source", "origin", "subset",
    "split", "config", "category", "categories", "sub_category", "subcategory", "topic", "topics", "task", "tasks",
    "task_type", "task_category", "domain", "domains", "subject", "language", "languages", "lang", "locale", "title",
    "url", "urls", "domain_name", "file", "file_path", "filename", "path", "dump", "repo", "author", "license",
    "licence", "date", "time", "timestamp", "created", "created_at", "updated_at", "version", "generator", "model",
    "model_name", "difficulty", "level", "length", "lengths", "num_tokens", "n_tokens", "token_count", "num_turns",
    "n_turns", "turn_count", "word_count", "language_score", "meta", "metadata", "meta_data", "info", "extra",
    "extra_info", "tags", "tag", "score", "scores", "quality", "rating", "ratings"
})
# fmt: on
"""Columns that say something about a row, and nothing about what is learned of it."""


def check_columns(names: Iterable[str], read: Collection[str], what: str) -> None:
    """Refuse columns that are neither read nor known to change nothing."""
    if unknown := sorted({*names} - {*read} - HARMLESS):
        known = f"{', '.join(sorted(read))} are read"
        raise ValueError(f"{what} has the column {unknown[0]!r}; {known}: remove it, or ignore_columns={unknown}")


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the chat template reads of a row besides its messages; None fills up what other rows have."""
    tools, options = (json.loads(each) if isinstance(each := row.get(name), str) else each for name in OPTIONS)
    if not isinstance(options, Mapping | None):
        raise ValueError(f"chat_template_kwargs={options!r:.60} of a row must be a mapping")
    return {name: value for name, value in {"tools": tools, **(options or {})}.items() if value is not None}


@dataclass(frozen=True)
class RowReader:
    """Reads rows of token ids: masks become labels of -100, and padding is no target.

    Columns in `takes` are handed on, where rows have them; without `attention_mask`, padding is dropped.
    """

    takes: Collection[str]
    ignored: Collection[str] = ()
    what: str = "a row of the data"

    @property
    def read(self) -> set[str]:
        """Names of the columns that are read."""
        return {*self.takes, "attention_mask", *(MASKS if "labels" in self.takes else ())} - {*self.ignored}

    def check(self, names: Iterable[str]) -> None:
        """Refuse columns, see `check_columns`."""
        names = {*names} - {*self.ignored}
        check_columns(names - {*(TEXTS if "input_ids" in names else ())}, self.read, self.what)

    def __call__(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns that are handed on; a row of which it is not clear what is scored is refused."""
        self.check(name for name, value in row.items() if value is not None)
        found = {name: row[name] for name in row if name in self.read and row[name] is not None}
        named = [name for name in ("labels", *MASKS) if name in row and name in self.read]
        given, is_padded = [name for name in named if name in found], "attention_mask" in found
        if named and not given:
            raise ValueError(f"{self.what} has no {named[0]}, and another has: say in each what is scored")
        for name in ({*given, "attention_mask"} & found.keys()) if "input_ids" in found else ():
            if (count := len(found["input_ids"])) != len(found[name]):
                raise ValueError(f"{self.what} has {count} input_ids and {len(found[name])} {name}: every id needs one")
        if "input_ids" not in found or not (is_padded or {*given} & {*MASKS}):
            return found
        ids = torch.as_tensor(found["input_ids"])
        real = torch.as_tensor(found["attention_mask"] if is_padded else torch.ones_like(ids)) != 0
        masks = [(torch.as_tensor(found[name]) != (IGNORE if name == "labels" else 0)) & real for name in given]
        for name, mask in zip(given, masks):
            if not mask.equal(masks[0]):
                raise ValueError(f"{self.what}: {given[0]} and {name} differ: leave one out, ignore_columns={[name]}")
        if given:
            labels = torch.as_tensor(found.get("labels", ids)).masked_fill(~masks[0], IGNORE)
            found["labels"] = labels.tolist() if isinstance(row["input_ids"], list) else labels
        found = {name: value for name, value in found.items() if name in self.takes}
        if not is_padded or "attention_mask" in self.takes:
            return found
        return {n: torch.as_tensor(each)[real].tolist() if n in PER_TOKEN else each for n, each in found.items()}

    def all(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return rows of a batch, which have the same columns: collators would drop those that some have."""
        found = [self(row) for row in rows]
        for name in {*chain(*found)}:
            if not all(name in row for row in found):
                raise ValueError(f"{self.what} has no {name}, and another has: give it to all of them")
        return found


def read_rows(
    data: Dataset | IterableDataset, what: str, args: SFTConfig, ignored: Collection[str] = ()
) -> Dataset | IterableDataset:
    """Return rows of which TRL reads all that is said: `labels` in place of masks, chats with their own options alone.

    Columns of `ignored` and of `args.ignore_columns`, where there is one, are removed; the rows are not empty.
    """
    with needs_extra("train", "a trainer of TRL"):
        from datasets import Dataset, Features, Json
        from trl.data_utils import is_conversational, is_conversational_from_value

    ignored = {*ignored, *(getattr(args, "ignore_columns", None) or ())}
    ignored |= {"completion_mask"} if args.completion_only_loss is False else set()
    first = next(iter(data))
    data = data.remove_columns([name for name in first if name in ignored])
    names = {*first} - ignored
    if "input_ids" in names:
        reader = RowReader(("input_ids", "labels"), what=what)
        reader.check(names)
        masks = [name for name in (*MASKS, "attention_mask") if name in names]
        return data.map(reader, remove_columns=masks) if masks else data
    is_chat = is_conversational(first) or is_conversational_from_value(first)
    read = {args.dataset_text_field, *(TEXTS if is_chat else ("prompt", "completion") if "prompt" in names else ())}
    if not read.isdisjoint(names):  # else there is no text, as TRL says
        check_columns(names, read, what)
    if not is_chat or OPTIONS[1] not in names:
        return data
    # each has its own options alone; of one type, each would have those of all, as None
    is_whole = isinstance(data, Dataset)
    kinds: Kwargs = {"features": Features({**data.features, OPTIONS[1]: Json()})} if is_whole else {}
    return data.map(_own_options, **kinds)


def _own_options(row: Mapping[str, Any]) -> dict[str, Any]:
    return {OPTIONS[1]: template_options({OPTIONS[1]: row[OPTIONS[1]]})}
