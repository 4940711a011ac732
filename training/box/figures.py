"""What the box can do, measured: expected acceptance on held-out text, and decoding beside plain decoding by turns.

Knows models and prompts; knows neither how the box was trained nor where its text comes from.
"""

from __future__ import annotations

import copy
import os
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ...generation.verification import block_acceptance
from ...modeling import EvaByteForMTPC
from ...modeling.sampling import race
from ..evaluation import GREEDY, DecodingMode, sampled

MODES = (GREEDY, sampled(0.7), sampled(1.0))
"""Ways of decoding that are measured."""
REPEATED_GRAM = 16
"""Bytes of a passage that counts as repeated if it stands in a text twice."""


class ExpectedAcceptance:
    """Expected bytes per call on held-out prefixes under block verification.

    For each prefix the byte that a verification would add is drawn from the target; the head drafts behind it, and the
    expected number of accepted drafts is computed over the verifier's randomness, not sampled. Greedy drafts are
    counted.

    Args:
        model: The model; its head may be changed between calls.
        prefixes: [N, L] ids.
    """

    @torch.no_grad()
    def __init__(self, model: EvaByteForMTPC, prefixes: torch.Tensor) -> None:
        output = model(prefixes, use_cache=True, output_hidden_states=-1, logits_to_keep=1)
        self.hidden, self.logits = output.hidden_states[-1][:, -1], output.logits[:, -1]
        self.cache = output.past_key_values

    @torch.no_grad()
    def __call__(self, model: EvaByteForMTPC, mode: DecodingMode, draws: int = 2) -> dict[str, float]:
        """Bytes per call and its standard error over prefixes; `model` shares the backbone of the first."""
        torch.manual_seed(0)
        runs = [self._accepted(model, mode) for _ in range(draws if mode.is_sampled else 1)]
        per_prefix = 1 + torch.stack(runs).mean(0)
        error = float(per_prefix.std()) / len(per_prefix) ** 0.5
        return {"bytes_per_call": float(per_prefix.mean()), "standard_error": error}

    def _accepted(self, model: EvaByteForMTPC, mode: DecodingMode) -> torch.Tensor:
        temperature = mode.options.get("temperature", 1.0)
        first = race((self.logits / temperature).softmax(-1)) if mode.is_sampled else self.logits.argmax(-1)
        law = model.window_law(self.hidden).condition(first)
        if not mode.is_sampled:
            draft = law.greedy()
            best = self._target(model, first, draft, 1.0).argmax(-1)
            return (draft == best[:, :-1]).double().cumprod(1).sum(1)
        draft, q = law.draft(lambda probs: _tempered_race(probs, temperature))
        q = q.double() / q.double().sum(-1, keepdim=True)
        accept = block_acceptance(draft, q, self._target(model, first, draft, temperature))[0]
        return (1 - (1 - accept).flip(1).cumprod(1).flip(1)).sum(1)

    def _target(
        self, model: EvaByteForMTPC, first: torch.Tensor, draft: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """The target's laws of every drafted byte and of the one behind the draft, [N, m + 1, v] float64."""
        block = torch.cat([first[:, None], draft], dim=1)
        logits = model(block, past_key_values=copy.deepcopy(self.cache)).logits
        return (logits.double() / temperature).softmax(-1)


def _tempered_race(probs: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    q = probs if temperature == 1.0 else (probs.log() / temperature).softmax(-1)
    return race(q), q


def decoding_figures(
    models: dict[str, EvaByteForMTPC],
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    mode: DecodingMode,
    new_bytes: int,
    batch: int,
) -> dict[str, dict[str, Any]]:
    """Plain decoding and decoding with every head, of the same prompts by turns.

    Args:
        models: By head, all with the same backbone.
        tokenizer: Their tokenizer.
        prompts: Texts to complete, a multiple of `batch`.
        mode: Way of decoding.
        new_bytes: Bytes per completion.
        batch: Prompts per call.

    Returns:
        By head: bytes per call (and spread over prompts), bytes per second, the ratios to plain decoding by the wall
        clock and by the processor's time, whether greedy outputs are the same, and how much of the text repeats itself.
    """
    groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    turns = {"plain": next(iter(models.values()))} | models
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in turns}
    for name, model in turns.items():  # the first call pays for what is set up once
        _run(model, tokenizer, groups[0], mode, 4, name != "plain")
    for index, group in enumerate(groups):
        for name, model in turns.items():
            torch.manual_seed(index)
            runs[name].append(_run(model, tokenizer, group, mode, new_bytes, name != "plain"))
    return {name: _figures(runs["plain"], runs[name], mode) for name in models}


def _figures(
    plain_runs: list[dict[str, Any]], drafted_runs: list[dict[str, Any]], mode: DecodingMode
) -> dict[str, Any]:
    plain, drafted = _total(plain_runs), _total(drafted_runs)
    per_prompt = [rate for run in drafted_runs for rate in run["per_row"]]
    pairs = [(one, other) for a, b in zip(plain_runs, drafted_runs) for one, other in zip(a["rows"], b["rows"])]
    repeated = [repeated_share(row) for run in drafted_runs for row in run["rows"]]
    speed_up = {key: plain[key] / plain["bytes"] / (drafted[key] / drafted["bytes"]) for key in ("seconds", "cpu")}
    return {
        "bytes_per_call": round(statistics.mean(per_prompt), 3),
        "bytes_per_call_spread": [round(min(per_prompt), 2), round(max(per_prompt), 2)],
        "bytes_per_second": round(drafted["bytes"] / drafted["seconds"], 1),
        "plain_bytes_per_second": round(plain["bytes"] / plain["seconds"], 1),
        "speed_up": round(speed_up["seconds"], 3),
        "speed_up_processor_time": round(speed_up["cpu"], 3),
        "identical": None if mode.is_sampled else all(one == other for one, other in pairs),
        "repeated_share": round(statistics.mean(repeated), 3),
        "degenerate": statistics.mean(repeated) > 0.5,
    }


def repeated_share(ids: list[int], gram: int = REPEATED_GRAM) -> float:
    """Share of a text that is covered by passages of `gram` ids which stand in it more than once."""
    places: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(ids) - gram + 1):
        places.setdefault(tuple(ids[start : start + gram]), []).append(start)
    covered = {start + i for starts in places.values() if len(starts) > 1 for start in starts for i in range(gram)}
    return len(covered) / max(1, len(ids))


def _run(
    model: EvaByteForMTPC,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    mode: DecodingMode,
    new_bytes: int,
    use_mtp: bool,
) -> dict[str, Any]:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    wall, cpu = time.perf_counter(), time.process_time()
    output = model.generate(
        **inputs, **mode.options, max_new_tokens=new_bytes, use_mtp=use_mtp, return_dict_in_generate=True
    )
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    rows = [_until_end(row) for row in output.sequences[:, inputs["input_ids"].shape[1] :].tolist()]
    speculation = getattr(output, "speculation", None)
    accepted = [] if speculation is None else speculation.rows_accepted
    rates = [1 + statistics.mean(row) for row in accepted if row]
    return {"rows": rows, "bytes": sum(map(len, rows)), "seconds": wall, "cpu": cpu, "per_row": rates}


def _until_end(ids: list[int]) -> list[int]:
    """A row's new ids, without the padding that follows its end."""
    while ids and ids[-1] == 0:
        ids = ids[:-1]
    return ids


def _total(runs: list[dict[str, Any]]) -> dict[str, float]:
    return {key: sum(run[key] for run in runs) for key in ("bytes", "seconds", "cpu")}


def circumstances() -> Iterator[tuple[str, Any]]:
    """Versions, processor, threads and load, as pairs."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    yield "torch", torch.__version__
    yield "transformers", transformers.__version__
    yield "python", platform.python_version()
    yield "processor", capabilities.get("cpu_name") or _processor()
    yield "cores", os.cpu_count()
    yield "threads", torch.get_num_threads()
    yield "load_average", [round(value, 2) for value in os.getloadavg()]


def _processor() -> str:
    try:
        with Path("/proc/cpuinfo").open() as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
