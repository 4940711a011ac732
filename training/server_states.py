"""Hidden states from a vLLM server, which writes those of each prompt to a file on a disk that both see.

vLLM's method `extract_hidden_states` gives the outputs of chosen layers; `vllm_options` returns how it is started.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from ..modeling.common.backbone_parts import BackboneParts, compute_device
from .endpoint import Endpoint, EndpointError
from .states import Columns, Drafter, Row, TextStates


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
    connector = {
        "kv_connector": "ExampleHiddenStatesConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    words = ["--speculative_config", json.dumps(method), "--kv_transfer_config", json.dumps(connector)]
    return [*words, "--no-enable-chunked-prefill"]


class ServerStates(TextStates):
    """States of a backbone that a vLLM server runs.

    Args:
        endpoint: The server, started with `vllm_options`; at most `concurrency` requests are in flight.
        drafter: Attached; its backbone gives the final norm and, where losses read them, logits.
        data: See `TextStates`, as for `dtype`.
        dtype: See there.
        folder: The directory of the server's files, where it is mounted elsewhere here; None: as the server says.
        wait: Seconds until a file must be whole, after the server's answer.

    Raises:
        EndpointError: No such server; where a row is read, states of other tokens, of another number of layers or
            width, or that are not finite, and files that do not come.

    Example:
        >>> rows = ServerStates(Endpoint("http://localhost:8000/v1"), head, data)
        >>> MTPTrainer(head, args, train_dataset=rows, data_collator=rows.collate).train()
    """

    def __init__(
        self,
        endpoint: Endpoint,
        drafter: Drafter,
        data: Sequence[Row],
        dtype: str | None = None,
        folder: str | Path | None = None,
        wait: float = 60.0,
    ) -> None:
        super().__init__(drafter, data, dtype)
        self.endpoint, self.folder, self.wait = endpoint, folder, wait
        endpoint.served_model()
        self._outputs = layer_outputs(drafter)

    def rows(self, numbers: Sequence[int], done: Callable[[int], object] = int) -> list[Columns]:
        """See `StatesSource`."""
        with ThreadPoolExecutor(min(self.endpoint.concurrency, len(numbers))) as pool:
            coming = pool.map(self._row, numbers)
            return [(columns, done(1))[0] for columns in coming]

    @torch.no_grad()
    def _row(self, number: int) -> Columns:
        text = self.text(number)
        ids = text["input_ids"].tolist()
        path = Path(self.endpoint.states_file(ids))
        path = path if self.folder is None else Path(self.folder) / path.name
        found = _read(path, self.wait)
        states, tokens = found["hidden_states"], found["token_ids"].flatten().tolist()
        width, name = self.drafter.backbone.config.get_text_config().hidden_size, f"{path.name} of row {number}"
        if tokens[: len(ids)] != ids:
            raise EndpointError(f"{name} holds states of other tokens than were sent")
        if states.shape != (len(tokens), len(self._outputs), width):
            wanted = f"[{len(tokens)}, {len(self._outputs)}, {width}], of the layers {self._outputs}"
            raise EndpointError(f"{name} holds states of shape {list(states.shape)}, and needed are {wanted}")
        if not states.isfinite().all():
            raise EndpointError(f"{name} holds states that are not finite: nothing learns so")
        path.unlink()
        backbone, count = self.drafter.backbone, len(ids)
        states = states[:count].to(compute_device(backbone), backbone.dtype)  # [T, n, d]
        last = backbone.config.get_text_config().num_hidden_layers
        layers = [layer % (last + 1) for layer in self.layers]
        columns = [states[:, self._outputs.index(layer)] for layer in layers]
        normed = [BackboneParts(backbone).norm(each) if layer == last else each for layer, each in zip(layers, columns)]
        return text | self._columns(torch.stack(normed, 1)[None], [count])[0]


def _read(path: Path, wait: float) -> dict[str, torch.Tensor]:
    """Return the tensors of a file once it is whole: the server may still write it, and newer ones lock it so long."""
    until, lock = time.monotonic() + wait, path.with_name(f"{path.name}.lock")
    while True:
        try:
            if lock.exists():
                with lock.open() as held:
                    fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
            found = load_file(path)
            lock.unlink(missing_ok=True)
            return found
        except (OSError, SafetensorError) as error:
            if time.monotonic() > until:
                raise EndpointError(
                    f"{path} is not whole {wait:g} s after the server's answer ({type(error).__name__}): do this "
                    "machine and the server see one disk?"
                ) from error
            time.sleep(0.05)
