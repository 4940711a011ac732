"""The tables of docs/families.md: the registry, what the tests hold, and the last run of `benchmarks/serving.py`.

python benchmarks/families_table.py                 # writes them to the page
python benchmarks/families_table.py --check         # fails where the page has others
"""

from __future__ import annotations

import json
import re
import sys
from os.path import commonprefix
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from measuring import markdown  # noqa: E402
from serving import RESULTS  # noqa: E402

from tests.families import BACKBONES, NAMES, RETROFITS  # noqa: E402
from tests.towers import TOWERS  # noqa: E402
from tokenahead.configuration.mtp_families import FAMILIES, REFUSED, RETROFIT, SAME, MTPFamily  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
MODELS = {
    "bailing_hybrid": "Ling 2.5", "deepseek_v3": "R1, V3.1", "deepseek_v4": "V4-Flash, V4-Pro",
    "dots3_note_text": "dots3-note", "exaone4_5": "EXAONE-4.5", "glm4_moe": "GLM-4.5, 4.6",
    "glm4_moe_lite": "GLM-4.7-Flash", "glm4v_moe": "GLM-4.5V, 4.6V", "glm5_next": "GLM-5.3-Flash",
    "glm_moe_dsa": "GLM-5",
    "hy_v3": "Hy3", "hy_v4": "Hy4", "inkling_mm_model": "Inkling", "inkling_text": "Inkling",
    "mimo": "MiMo-7B", "minimax_m3_vl": "MiniMax-M3", "nemotron_h": "Nemotron-H 3",
    "qwen3_5": "Qwen3.5, 3.6", "qwen3_5_moe": "Qwen3.5, 3.6", "qwen4_exp": "Qwen4-Exp", "step3p7": "Step-3.7",
}  # fmt: skip
"""Models by the `model_type` of their files."""
READ = dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3", "ernie4_5_moe"), "SGLang read")
READ |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "bailing_hybrid", "nemotron_h", "longcat_flash"), "vLLM read")
READ["qwen3_5_moe"] = "vLLM read"
READ |= dict.fromkeys(("glm5_next", "minimax_m3_vl", "qwen4_exp", "qwen4_exp_text"), "no: vLLM's code is for GPUs")
"""Engines whose loader was compared with what is saved, and not run."""
FLAGS = {
    "own_heads": "a separate norm and head each, and states from before that norm",
    "unnormed": "states from before a module's norm",
    "streams": "several streams of hidden states",
    "own_embeddings": "separate embeddings",
    "one_stream": "one stream, though the main model has hyper-connections",
    "rotates": "always with rotary positions",
    "shares_norm": "one norm for all",
    "scales_nothing": "attention without the main model's scaling",
}
BODIES = {"stack": "a pair of layers", "latent": "one latent attention and a dense MLP"}


def modules(family: MTPFamily) -> str:
    """Return what the registry says of a family's modules."""
    names = [theirs for theirs, _ in family.names if "{layer}" not in theirs and not family.own_embeddings]
    parts = [f"`{commonprefix(names).split('{')[0].removesuffix('layers.0.') or 'model.layers.'}*`"]
    parts += ["`final_layernorm`"] if any("final_layernorm" in theirs for theirs, _ in family.names) else []
    parts += ["D = 1"] if family.most_modules == 1 else []
    parts += [] if family.embedding_first else ["[hidden; embedding]"]
    parts += [] if family.norm_before_head else ["no norm before the head"]
    parts += [BODIES[family.body]] if family.body in BODIES else []
    for field, kind in family.block:
        if kind == SAME:
            parts.append("attention of the main layer of the same index")
        elif isinstance(kind, str) and field != "indexer_types":
            parts.append(kind.replace("_", " ") + (" MLP" if field == "mlp_layer_types" else ""))
    return "; ".join(parts + [text for flag, text in FLAGS.items() if vars(family)[flag]])


def served(name: str, results: list[dict[str, Any]]) -> str:
    """Return what the engine did with directories of a family; "-" where it was not run."""
    rows = [row for row in results if re.match(rf"{name} (k=|without|retrofit)", row["name"])]
    ran = [row for row in rows if "error" not in row]
    equal, total = sum(row["alone"] + row["together"] for row in ran), sum(2 * row["prompts"] for row in ran)
    run = f"vLLM run: {equal}/{total} texts equal" if ran else "vLLM does not start" if rows else ""
    return ", ".join(filter(None, (run, READ.get(name)))) or "-"


def families(results: list[dict[str, Any]]) -> str:
    """Return the table of families with official modules, and of those that modules can be made for."""
    rows = []
    for key in sorted({*FAMILIES, *TOWERS}):
        text = key if key in FAMILIES else f"{key}_text"
        if key in FAMILIES and (tower := key.removesuffix("_text")) in TOWERS and key not in NAMES and tower != key:
            continue  # has a row with its tower
        family = FAMILIES.get(text, FAMILIES.get(key, RETROFIT))
        held = "yes" if key in NAMES or key in TOWERS else "-"
        layout = modules(family) + ("; with a tower for images" if key in TOWERS else "")
        label = f"{key} ({MODELS[key]})" if key in MODELS else key
        load = "new" if family.retrofit and held == "yes" else held
        rows.append([label, layout, load, held, held, held, served(key, results)])
    made = [name for name in RETROFITS if name not in FAMILIES]
    copies = "copies of the last layer"
    rows += [[name, copies, "new", "yes", "yes", "yes", served(name, results)] for name in made]
    others = ", ".join(sorted(BACKBONES)) + ", and all others that pass the probe"
    rows.append([others, copies, "new", "yes", "yes", "yes", "the backbone alone, or with heads"])
    return markdown(("`model_type`", "modules", "load", "speculate", "train", "save", "serve"), rows)


def refused() -> str:
    """Return the table of families that are refused, with the reasons of the registry."""
    groups: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        groups.setdefault(reason, []).append(name)
    rows = [
        [", ".join(names), re.sub(r"\((\S*/\S*\.py|\w+ in \S+)\)", r"(`\1`)", why)] for why, names in groups.items()
    ]
    return markdown(("`model_type`", "reason"), rows)


def rewritten(page: str) -> str:
    """Return the page with new tables instead of those between its marks."""
    tables = {"families": families(json.loads(RESULTS.read_text())["rows"]), "refused": refused()}
    for name, table in tables.items():
        mark, end = f"<!-- python benchmarks/families_table.py: {name} -->\n\n", "\n<!-- end -->"
        before, rest = page.split(mark)
        page = before + mark + table + end + rest.split(end, 1)[1]
    return page


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    if "--check" in sys.argv:
        sys.exit(int(rewritten(text) != text))
    PAGE.write_text(rewritten(text), encoding="utf-8")
