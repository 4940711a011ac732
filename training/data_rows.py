"""Rows of `datasets` before TRL prepares them: their columns are judged, and masks and padding become labels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ..generation.tensors.wrapped_models import Kwargs
from .columns import MASKS, OPTIONS, TEXTS, RowReader, check_columns, template_options
from .utils import needs_extra

with needs_extra("train", "a trainer of TRL"):
    from datasets import Dataset, Features, Json
    from trl.data_utils import is_conversational, is_conversational_from_value

if TYPE_CHECKING:
    from datasets import IterableDataset
    from trl.trainer.sft_config import SFTConfig


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
    kinds: Kwargs = {"features": Features({**data.features, OPTIONS[1]: Json()})} if isinstance(data, Dataset) else {}
    return data.map(_own_options, **kinds)


def _own_options(row: Mapping[str, Any]) -> dict[str, Any]:
    return {OPTIONS[1]: template_options({OPTIONS[1]: row[OPTIONS[1]]})}
