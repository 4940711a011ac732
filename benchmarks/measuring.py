"""What benchmarks share: small models, prompts, seconds, tables, and files that a stopped run continues from."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead.training.utils import replace_file


def llama_config(width: int, layers: int, vocab: int = 320, **options: Any) -> LlamaConfig:
    """Return the configuration of a small Llama without special tokens but padding."""
    sizes = {"hidden_size": width, "intermediate_size": 11 * width // 4, "num_attention_heads": max(1, width // 32)}
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    return LlamaConfig(vocab_size=vocab, num_hidden_layers=layers, **(sizes | tokens | options))


def llama(width: int, layers: int, vocab: int = 320, **options: Any) -> Any:
    """Return a small Llama of random weights, which are always the same."""
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config(width, layers, vocab, **options)).eval()


def repeating_prompts(batch: int, period: int, length: int, vocab: int = 320) -> torch.Tensor:
    """Return texts [batch, length] that repeat themselves, so that look-ups find drafts."""
    ids = torch.randint(min(64, vocab // 2), vocab, (batch, period), generator=torch.Generator().manual_seed(1))
    return ids.repeat(1, -(-length // period))[:, :length]


def now() -> float:
    """Return seconds: the processor's where one thread works, else the wall clock's."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def by_turns(ways: dict[str, Callable[[], Any]], rounds: int, repeats: int = 1) -> dict[str, float]:
    """Return median seconds of each way; all take turns, so that a change of load meets all, and warm up in a first."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, run in ways.items():
            started = now()
            for _ in range(repeats):
                run()
            seconds[name].append((now() - started) / repeats)
    return {name: statistics.median(own[1:]) for name, own in seconds.items()}


def seconds_of(call: Callable[[], Any], repeats: int, warm_up: int = 0) -> float:
    """Return median seconds of a call."""
    times = []
    for _ in range(warm_up + repeats):
        started = now()
        call()
        times.append(now() - started)
    return statistics.median(times[warm_up:])


def accepted_of(output: Any) -> list[int]:
    """Return the accepted drafts of every verification of every sequence; none after plain decoding."""
    stats = getattr(output, "speculation", None)
    return [] if stats is None else [count for row in stats.rows_accepted for count in row]


def show(columns: Iterable[str], rows: Iterable[Iterable[object]], title: str | None = None, width: int = 140) -> None:
    """Print a table."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)


def markdown(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    columns = list(columns)
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows]) + "\n"


def resumed(path: Path, names: Iterable[str], measure: Callable[[str], Any]) -> dict[str, Any]:
    """Measure what a file of results does not hold, write it after each name, a line each, and return its content."""
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in names:
        if name not in results:
            results[name] = measure(name)
            rows = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in results.items())
            replace_file(path, "{" + ",\n".join(rows) + "}")
            print(name, json.dumps(results[name]), file=sys.stderr, flush=True)
    return results
