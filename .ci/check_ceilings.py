"""Counts how large the house is, and fails where a count is above its ceiling in `ceilings.json`, which only falls.

python .ci/check_ceilings.py             compare
python .ci/check_ceilings.py --lower     lower every ceiling to what is counted
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CEILINGS = Path(__file__).with_name("ceilings.json")
PRODUCT = "configuration", "generation", "modeling", "training", "model_cards", "tokenahead"
_CHECKS = re.compile(r"^_*(check|refuse|warn|validate|obstacle)(_|s_|$)|_(check|refuse|obstacle)(_|$)")


def sources() -> dict[str, str]:
    """Return the text of every Python file that git knows, by its path."""
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True, cwd=ROOT)
    found = {name: ROOT / name for name in listed.stdout.split()}
    plain = {name: path for name, path in found.items() if path.is_file() and not path.is_symlink()}
    return {name: path.read_text(encoding="utf-8") for name, path in plain.items()}


def room_of(path: str) -> str:
    """Return the room of a product file: its folder of the first two levels; of other files: the first level."""
    if path == "tokenahead_command.py":  # the console script's module stands beside the package
        return "tokenahead"
    parts = path.split("/")[:-1]
    return "/".join(parts[:2]) if parts and parts[0] in PRODUCT else parts[0] if parts else "."


def kinds_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield what is counted in a file, and how much of it."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and _CHECKS.search(node.name):
            yield "check functions", 1
            yield "lines of check functions", (node.end_lineno or 0) - node.lineno + 1
        elif isinstance(node, ast.Raise):
            yield "raise", 1
        elif isinstance(node, ast.Name) and node.id == "Any":
            yield "Any", 1
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("cast", "untyped"):
            yield "cast", 1


def counts_of_sources() -> Counter[str]:
    """Count lines and files by room, and what `kinds_of` names in the product."""
    counts = Counter[str]()
    for path, text in sources().items():
        room, lines = room_of(path), text.count("\n")
        if room.split("/")[0] in PRODUCT:
            counts.update({f"lines of {room}": lines, "product lines": lines})
            counts.update([f"files of {room}", "product files"])
            for kind, number in kinds_of(ast.parse(text)):
                counts[kind] += number
        elif room in ("tests", "benchmarks"):
            counts[f"lines of {room}"] += lines
    return counts


def counts_of_a_call() -> Counter[str]:
    """Count our files that a greedy call with an EAGLE head crosses, and our bases of three models."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tokenahead import DeepSeekMTP, EagleHead, EvaByteForMTPC, MTPHeads

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    backbone = LlamaForCausalLM(LlamaConfig(vocab_size=64, eos_token_id=None, pad_token_id=0, **sizes)).eval()
    head, prompt = EagleHead.from_backbone(backbone), torch.arange(3, 15)[None]
    backbone.generate(prompt, max_new_tokens=3, assistant_model=head)
    crossed = files_of(lambda: backbone.generate(prompt, max_new_tokens=7, assistant_model=head))
    models = MTPHeads, DeepSeekMTP, EvaByteForMTPC
    ours = {f"bases of {m.__name__}": sum(b.__module__.startswith("tokenahead") for b in m.__mro__[1:]) for m in models}
    return Counter({"files of a call": len(crossed), **ours})


def files_of(call: Callable[[], object]) -> set[str]:
    """Return our files of which a call runs a function."""
    crossed = set[str]()
    sys.setprofile(lambda frame, event, argument: crossed.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    places = (Path(each).resolve() for each in crossed if not each.startswith("<"))
    return {str(place) for place in places if any(ROOT / room in place.parents for room in PRODUCT)}


def main() -> int:
    """Print the counts that are above their ceilings; 1 where there are any."""
    counts = counts_of_sources() + counts_of_a_call()
    ceilings = json.loads(CEILINGS.read_text()) if CEILINGS.exists() else {}
    over = {name: number for name, number in counts.items() if number > ceilings.get(name, 0 if ceilings else number)}
    for name, number in sorted(over.items()):
        print(f"{name}: {number}, and at most {ceilings.get(name, 0)}")
    if "--lower" in sys.argv and not over:
        CEILINGS.write_text(json.dumps(dict(sorted(counts.items())), indent=1) + "\n")
    elif not over and any(counts[name] < most for name, most in ceilings.items()):
        print("some ceilings can be lowered: python .ci/check_ceilings.py --lower")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
