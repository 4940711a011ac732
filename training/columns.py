"""Columns of rows: which are read, which change nothing, and how masks of what is scored become labels.

Any other column is refused by name: to learn what a mask leaves out, or chats without their tools, is a silent fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset

from ..generation.backbone.wrapped_models import Kwargs
from ..modeling.common.recording import STATES, SUMMARIES
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
    """Refuse columns that are neither read nor known to change nothing.

    Raises:
        ValueError: Such columns; the first is named in front.
    """
    if unknown := sorted({*names} - {*read} - HARMLESS):
        known = ", ".join(sorted(read))
        raise ValueError(
            f"{what} has the column {unknown[0]!r}; {known} are read: remove it, or ignore_columns={unknown}"
        )


def template_options(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the chat template reads of a row besides its messages: `tools`, and its `chat_template_kwargs`.

    Files of columns fill up what other rows have with None, which is no option.
    """
    tools, options = (json.loads(each) if isinstance(each := row.get(name), str) else each for name in OPTIONS)
    if not isinstance(options, Mapping | None):
        raise ValueError(f"chat_template_kwargs={options!r:.60} of a row must be a mapping")
    return {name: value for name, value in {"tools": tools, **(options or {})}.items() if value is not None}


@dataclass(frozen=True)
class RowReader:
    """Reads rows of token ids: masks become labels of -100, and padding is no target.

    Attributes:
        takes: Columns that are handed on, where rows have them. Padding is dropped without `attention_mask`.
        ignored: Columns that are left out unread.
        what: Whose rows, for messages.
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
        """Return the columns that are handed on.

        Raises:
            ValueError: An unknown column, one that has not one entry per token, masks that differ, or a row without
                any where others have one.
        """
        self.check(name for name, value in row.items() if value is not None)
        found = {name: row[name] for name in row if name in self.read and row[name] is not None}
        named = [name for name in ("labels", *MASKS) if name in row and name in self.read]
        given, is_padded = [name for name in named if name in found], "attention_mask" in found
        if named and not given:
            raise ValueError(f"{self.what} has no {named[0]}, and another has: say in each what is scored")
        if "labels" in found and len(found["labels"]) != (count := len(found["input_ids"])):
            raise ValueError(f"{self.what} has {count} input_ids and {len(found['labels'])} labels: every id needs one")
        if "input_ids" not in found or not (is_padded or {*given} & {*MASKS}):
            return found
        ids = torch.as_tensor(found["input_ids"])
        real = self._mask("attention_mask", found, ids) if is_padded else torch.ones_like(ids, dtype=torch.bool)
        masks = {name: self._mask(name, found, ids) & real for name in given}
        for name, mask in masks.items():
            if not mask.equal(masks[given[0]]):
                raise ValueError(f"{self.what}: {given[0]} and {name} differ: leave one out, ignore_columns={[name]}")
        if given:
            labels = torch.as_tensor(found.get("labels", ids)).masked_fill(~masks[given[0]], IGNORE)
            found["labels"] = labels.tolist() if isinstance(row["input_ids"], list) else labels
        found = {name: value for name, value in found.items() if name in self.takes}
        if not is_padded or "attention_mask" in self.takes:
            return found
        return {n: torch.as_tensor(each)[real].tolist() if n in PER_TOKEN else each for n, each in found.items()}

    def _mask(self, name: str, row: Mapping[str, Any], ids: Tensor) -> Tensor:
        """Return which tokens a column marks, [T] bool."""
        values = torch.as_tensor(row[name])
        if values.shape != ids.shape:
            raise ValueError(f"{self.what} has {len(ids)} input_ids and {values.numel()} {name}: every id needs one")
        return values != (IGNORE if name == "labels" else 0)


class ReadRows(TorchDataset):
    """Rows of a data set as a reader gives them."""

    def __init__(self, rows: Any, read: RowReader) -> None:
        self.rows, self.read = rows, read

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self.read(self.rows[number])

    def __getitems__(self, numbers: list[int]) -> list[dict[str, Any]]:
        return [*map(self.read, self.rows.__getitems__(numbers))]


@dataclass(frozen=True)
class ReadingCollator:
    """Collates rows as a reader gives them; a class, for workers pickle it."""

    collator: Callable[[list[Any]], Any]
    read: RowReader

    def __call__(self, rows: list[Any]) -> Any:
        """Return the batch; what are no rows, but batches of them, are read already."""
        if not all(isinstance(row, Mapping) for row in rows):
            return self.collator(rows)
        rows = [self.read(row) for row in rows]
        for name in {*chain(*rows)}:
            if not all(name in row for row in rows):  # collators would drop it
                raise ValueError(f"{self.read.what} has no {name}, and another has: give it to all of them")
        return self.collator(rows)


def read_rows(
    data: Dataset | IterableDataset, what: str, args: SFTConfig, ignored: Collection[str] = ()
) -> Dataset | IterableDataset:
    """Return rows of which TRL reads all that is said: `labels` in place of masks, chats with their own options alone.

    Args:
        data: Not empty.
        what: Whose rows, for messages.
        args: `ignore_columns`, where there is one; with `completion_only_loss=False` prompts are scored, too.
        ignored: Further columns that are removed unread.

    Raises:
        ValueError: A column that is not read here, or, where a row is read, see `RowReader`.
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
    read = {*TEXTS} if is_chat else {"prompt", "completion"} if "prompt" in names else set[str]()
    read |= {args.dataset_text_field}
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
