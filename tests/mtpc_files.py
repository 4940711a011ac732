"""Directories in the layout of MtPC's authors with random tensors, and what their circuits say of a window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

MAPS = {
    **{f"self_attn.{x}_proj": "dd" for x in "qkvo"},
    "mlp.gate_proj": "di",
    "mlp.up_proj": "di",
    "mlp.down_proj": "id",
}
"""Adapted maps with the letters of their widths, in and out: d of the states, i inside."""
LEAVES, SUM = "mt_head._categorical_log_probs_heads.0.head.proj", "mt_head._sum_weights_heads.{}.head.proj"
SCOPE = "circuit._circuit._nodes.0._scope_idx"
Published = dict[str, Any]


def sum_shapes(kind: str, n: int, r: int) -> list[tuple[int, int, int]]:
    """Folds, states above and states below of every layer of sums, in the order of the file."""
    levels = [(n >> level, r, r) for level in range(1, n.bit_length() - 1)]
    layers = {"ff": [], "cp": [], "hmm": [(1, r, r)] * (n - 1), "btree": levels}[kind]
    return [*layers, (1, 1, r)] if kind != "ff" else []


def published(
    kind: str, n: int = 4, r: int = 2, vocab: int = 40, width: int = 32, inner: int = 64, layers: int = 3, lora: int = 0
) -> Published:
    """The tensors of a file, None for those of the backbone, of which the last `lora` layers have adapters."""
    generator = torch.Generator().manual_seed(n + r)

    def drawn(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    r = 1 if kind == "ff" else r
    named: Published = dict.fromkeys(("lm._lm.lm_head.weight", "lm._lm.model.norm.weight"))
    named |= {f"lm._lm.model.layers.{i}.mlp.up_proj.weight": None for i in range(layers)}
    for i in range(layers - lora, layers):
        for path, (into, out) in MAPS.items():
            start = f"lm._lm.base_model.model.model.layers.{i}.{path}"
            named[f"{start}.base_layer.weight"] = None
            sizes = {"d": width, "i": inner}
            named[f"{start}.lora_A.default.weight"] = drawn(4, sizes[into], std=0.3, dtype=torch.float32)
            named[f"{start}.lora_B.default.weight"] = drawn(sizes[out], 4, std=0.3, dtype=torch.float32)
    for name in ("_autoregressive_mar_mask", "_univariate_mar_mask"):
        named[f"circuit.{name}"] = torch.ones(n, n).bool()
    positions = torch.arange(n)
    named[SCOPE] = (positions.flip(0) if kind == "hmm" else positions)[:, None].clone()
    named["circuit._circuit._address_book._in_fold_idx_1_0"] = torch.zeros(1, 2, dtype=torch.int64)
    named[LEAVES], named["_exp_gamma_weights"] = drawn(n, r, vocab, width, std=0.5), 0.8**positions
    return named | {SUM.format(k): drawn(*shape, width) for k, shape in enumerate(sum_shapes(kind, n, r))}


def settings(kind: str, n: int = 4, r: int = 2, vocab: int = 40, layers: int = 3, lora: int = 0) -> Published:
    """What a config.yaml says of them, with its references."""
    adaptor = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "layers_to_transform": "${lm.last}"}
    sizes = {"n_token": n, "n_component": 1 if kind == "ff" else r, "n_repetition": 1}
    references = {name: f"${{circuit.{name}}}" for name in sizes}
    heads = {"transformer_n_layer": 0, "expander_type": "linear", "expander_n_layer": 1}
    return {
        "circuit": sizes | {"model": references | {"kind": "cp" if kind == "ff" else kind}},
        "mt_head": {"name": "linear-evabyte", "hyperparameters": heads},
        "adaptor": {"hyperparameters": adaptor if lora else None},
        "lm": {
            "last": [*range(layers - lora, layers)],
            "model": {"from_huggingface": "someone/model", "adaptor_kwargs": "${adaptor.hyperparameters}"},
        },
        "data": {"vocab_size": vocab},
    }


def write(folder: Path, tensors: Published, values: Published | None, step: int = 3) -> Path:
    """Write both files, with what else the authors' hold."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": step, "model_state_dict": tensors, "optimizer_state_dict": None}
    torch.save(state, folder / f"model@{step}.pt")
    if values is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


def log_prob(kind: str, tensors: Published, state: Tensor, window: Tensor) -> Tensor:
    """The logarithm of q(window [n]) given a state [D], in float64, along the layers of the file."""
    leaves = torch.einsum("frvd,d->frv", tensors[LEAVES].double(), state).log_softmax(-1)
    by_position = {int(place): leaves[fold] for fold, place in enumerate(tensors[SCOPE].flatten())}
    evidence = [by_position[i][:, token].exp() for i, token in enumerate(window)]  # n times [R]
    names = [name for name in tensors if name.startswith("mt_head._sum")]
    sums = [torch.einsum("foid,d->foi", tensors[name].double(), state).softmax(-1) for name in names]
    if kind in ("ff", "cp"):
        seen = torch.stack(evidence).prod(0)
    elif kind == "hmm":  # the last step first
        seen = evidence[-1]
        for before, step in zip(reversed(evidence[:-1]), sums):
            seen = before * (step[0] @ seen)
    else:  # pairs from the left, level by level up to the root
        nodes = torch.stack(evidence)  # [n, R]
        for level in sums:
            nodes = nodes.unflatten(0, (-1, 2)).prod(1)
            nodes = torch.einsum("foi,fi->fo", level, nodes)
        return nodes[0, 0].log()
    return (sums[-1][0, 0] @ seen if sums else seen[0]).log()
