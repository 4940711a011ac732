"""Small boxes, made with the code of `examples/box`, which no package holds."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples" / "box"))

import card  # noqa: E402
import release  # noqa: E402
import text  # noqa: E402
import train  # noqa: E402

__all__ = ["CONFIG", "HELD_OUT", "ROOT", "TRAIN", "card", "release", "text", "train", "untrained_box"]

CONFIG = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
"""Of a model of a few thousand parameters."""


def _code(word: str) -> bytes:
    return "".join(f"def {word}_{i}(value: int) -> int:\n    return value + {i}\n\n\n" for i in range(200)).encode()


TRAIN = text.Package("other", "1", "MIT", [_code("one"), _code("two")])
HELD_OUT = text.Package("requests", "1", "Apache-2.0", [_code("held")[:6000], _code("out")[:6000]])


def untrained_box(folder: Path) -> Path:
    """Write weights of two heads, held-out text and checksums; without results and card."""
    models = {}
    for kind in ("ff", "btree"):
        torch.manual_seed(0)
        models[kind] = train.new_model(train.Recipe(config=CONFIG))
        if kind != "ff":
            models[kind].set_head(head_type=kind, rank=2)
    release.save_box(folder, models, {"ff": release.DRAFTED, "btree": 3})
    excerpts = [asdict(excerpt) for excerpt in release.cut_excerpts([HELD_OUT], 2)]
    (folder / "held_out.json").write_text(json.dumps(excerpts))
    release.seal(folder)
    return folder
