"""Data of a run, from files or the Hub: chats, prompts with completions, plain text or token ids. Knows no model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..columns import read_rows
from ..regeneration import RegeneratedText, holds_text
from ..utils import needs_extra
from .settings import Settings

with needs_extra("train", "reading data"):
    from datasets import Dataset, IterableDataset, load_dataset, load_from_disk
    from trl.scripts.utils import get_dataset

if TYPE_CHECKING:
    Data = Dataset | IterableDataset

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}


def load_data(settings: Settings, with_evaluation: bool) -> dict[str, Data]:
    """Return training data by `"train"`, and by `"eval"` those to evaluate on: a split, or a share of all rows.

    `dataset_name` is a file (JSON, JSON lines, Parquet, CSV, Arrow, or text with a row per line), a directory of such
    files, of `Dataset.save_to_disk` or of `regenerate` (whose completions alone are scored), or a name on the Hub;
    `datasets` is a mixture of them, as in TRL.
    """
    data: Any = _loaded(settings)
    names = {"train": settings.data.dataset_train_split}
    if with_evaluation:
        names["eval"] = settings.data.dataset_test_split
    if not isinstance(data, dict):
        data = {names["train"]: data}
    size, train = settings.mixture.test_split_size, data.get(names["train"])
    if with_evaluation and size is not None and names["eval"] not in data and isinstance(train, Dataset):
        parts = train.train_test_split(test_size=size, seed=settings.training.seed)
        data = {**data, names["train"]: parts["train"], names["eval"]: parts["test"]}
    for kind, name in names.items():
        if name not in data:
            raise ValueError(
                f"dataset_{kind.replace('eval', 'test')}_split={name!r}: the data have {', '.join(map(repr, data))}; "
                "name one of these, or set test_split_size (of no stream), or eval_strategy='no'"
            )
        if next(iter(data[name]), None) is None:
            raise ValueError(f"the {kind} data are empty")
    return {kind: read_rows(data[each], f"a row of the {kind} data", settings.training) for kind, each in names.items()}


def _loaded(settings: Settings) -> object:
    name, mixture = settings.data.dataset_name, settings.mixture
    streaming = settings.data.dataset_streaming or mixture.streaming
    if mixture.datasets:
        return get_dataset(replace(mixture, streaming=streaming, test_split_size=None))
    if name is None:
        raise ValueError("dataset_name is missing: a file, a directory or a name on the Hub; or `datasets`, a mixture")
    path = Path(name)
    if path.is_file() and path.suffix in _BUILDERS:
        return load_dataset(_BUILDERS[path.suffix], data_files={"train": name}, streaming=streaming)
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return load_from_disk(name)
    if holds_text(path):
        return RegeneratedText(path).to_dataset()
    return load_dataset(name, settings.data.dataset_config, streaming=streaming)
