"""Hidden states from a vLLM server, which writes those of each prompt to a file on a disk that both see.

vLLM's method `extract_hidden_states` gives the outputs of chosen layers; `vllm_options` returns how it is started.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ..modeling.common.backbone_parts import BackboneParts, compute_device
from .endpoint import Endpoint, EndpointError
from .states import Columns, Drafter, Row, TextStates
from .utils import escaped

_MORE, _HEADER = 64, 1 << 16  # tokens beside the prompt's, and bytes beside those of tensors, that a file may have


def layer_outputs(drafter: Drafter) -> list[int]:
    """Return the layers whose outputs a drafter reads, as vLLM numbers them: i is the output of the i-th of L layers.

    The last output is not normed there; in transformers' `hidden_states`, which drafters read, it is.
    """
    count = drafter.backbone.config.get_text_config().num_hidden_layers
    return sorted({layer % (count + 1) for layer in drafter.learning_layers})


def vllm_options(drafter: Drafter, folder: str | Path) -> list[str]:
    """Return the arguments of `vllm serve BACKBONE` that make it write states for a drafter into a directory."""
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layer_outputs(drafter)}}
    method = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers}
    place = {"shared_storage_path": str(folder)}
    connector = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    connector |= {"kv_connector_extra_config": place}
    words = ["--speculative_config", json.dumps(method), "--kv_transfer_config", json.dumps(connector)]
    return [*words, "--no-enable-chunked-prefill"]


class ServerStates(TextStates):
    """States of a backbone that a vLLM server runs: rows of a Trainer with `data_collator=rows.collate`.

    Args:
        endpoint: The server, started with `vllm_options`; at most `concurrency` requests are in flight.
        drafter: Attached; its backbone gives the final norm and, where losses read them, logits.
        data: See `TextStates`, as for `dtype` and `ignore_columns`.
        folder: The directory of the server's files, where it is mounted here; of the paths that the server gives, only
            the last name is read, and what was read is deleted.
        wait: Seconds until a file must be whole, after the server's answer.

    Raises:
        ValueError: No directory, or no time.
        EndpointError: No such server; where a row is read, states of other tokens, of another number of layers or
            width, or that are not finite, and files that do not come, or are no files of their own.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        drafter: Drafter,
        data: Sequence[Row],
        dtype: str | None = None,
        folder: str | Path | None = None,
        wait: float = 60.0,
        ignore_columns: Sequence[str] = (),
    ) -> None:
        if not folder or not isinstance(folder, str | Path):
            raise ValueError(f"folder={folder!r} must be the directory in which the server's files are found here")
        if not (isinstance(wait, int | float) and 0 <= wait < inf):
            raise ValueError(f"wait={wait!r} must be a number of seconds")
        super().__init__(drafter, data, dtype, ignore_columns)
        self.endpoint, self.folder, self.wait = endpoint, Path(folder), wait
        endpoint.served_model()
        self._outputs = layer_outputs(drafter)

    def rows(self, numbers: Sequence[int], done: Callable[[int], object] = int) -> list[Columns]:
        """See `StatesSource`."""
        with ThreadPoolExecutor(max(1, min(self.endpoint.concurrency, len(numbers)))) as pool:
            coming = pool.map(self._row, numbers)
            return [(columns, done(1))[0] for columns in coming]

    @torch.no_grad()
    def _row(self, number: int) -> Columns:
        text, backbone = self.text(number), self.drafter.backbone
        ids, config = text["input_ids"].tolist(), backbone.config.get_text_config()
        said = self.endpoint.answer("completions", self.endpoint.body(ids, 1), self._path_of)
        name = PurePosixPath(said).name if isinstance(said, str) and "\0" not in said else ""
        if name in ("", ".."):
            raise EndpointError(
                f"the answer to row {number} has no hidden_states_path of a file, but {escaped(repr(said))[:200]}: "
                "docs/scale.md says how vLLM is started"
            )
        where, width = f"{escaped(name)[:200]} of row {number}", len(self._outputs) * config.hidden_size
        try:
            found = _read(self.folder / name, self.wait, (len(ids) + _MORE) * (1 + width) * 8 + _HEADER)
        except EndpointError as error:
            raise EndpointError(f"{where} {error}") from error
        states, tokens = (found.get(each, torch.empty(0)) for each in ("hidden_states", "token_ids"))
        wanted = (tokens.numel(), len(self._outputs), config.hidden_size)
        if tokens.flatten().tolist()[: len(ids)] != ids:
            raise EndpointError(f"{where} holds states of other tokens than were sent")
        if states.shape != wanted or not states.is_floating_point():
            given = f"{tuple(states.shape)} ({states.dtype})"
            raise EndpointError(f"{where} holds hidden_states {given}, not {wanted}, of the layers {self._outputs}")
        states = states[: len(ids)].to(compute_device(backbone), backbone.dtype)  # [T, n, d]
        if not states.isfinite().all():
            raise EndpointError(f"{where} holds states that are not finite: nothing learns so")
        (self.folder / name).unlink(missing_ok=True)
        last = config.num_hidden_layers
        layers = [layer % (last + 1) for layer in self.layers]
        columns = [states[:, self._outputs.index(layer)] for layer in layers]
        normed = [BackboneParts(backbone).norm(each) if layer == last else each for layer, each in zip(layers, columns)]
        return text | self._columns(torch.stack(normed, 1)[None], [len(ids)])[0]

    def _path_of(self, answer: Any, body: Mapping[str, Any]) -> Any:
        self.endpoint.choice_of(answer, body)
        return (answer.get("kv_transfer_params") or {}).get("hidden_states_path")


def _opened(path: Path) -> BinaryIO:
    """Open a file that is one: no link to another place, and no pipe, whose reader would wait for ever."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise EndpointError(f"is no plain file, or its lock ({path.suffix}) is none")
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def _read(path: Path, wait: float, most: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a file once it is whole: the server may still write it, and newer ones lock it so long."""
    until, lock = time.monotonic() + wait, path.with_name(f"{path.name}.lock")
    while True:
        try:
            with suppress(FileNotFoundError), _opened(lock) as held:
                fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            with _opened(path) as file:
                content = file.read(most + 1)
            if len(content) > most:
                raise EndpointError(f"has more than the {most} bytes of these states")
            found = load(content)
            lock.unlink(missing_ok=True)
            return found
        except (OSError, ValueError, SafetensorError) as error:
            if time.monotonic() > until:
                raise EndpointError(
                    f"is not whole {wait:g} s after the server's answer ({type(error).__name__}): do this machine and "
                    "the server see one disk?"
                ) from error
            time.sleep(0.05)
