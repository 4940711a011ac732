"""Run by test_hub_backbones.py as a separate process: heads with trained backbones on a loopback Hub, used by name.

Usage: python hub_backbones_client.py FOLDER. FOLDER has a `llama`; `found.json` is left there.
"""

import json
import sys
from pathlib import Path

import torch
from huggingface_hub import HfApi
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tokenahead import EvaByteTokenizer, MTPHeads
from tokenahead.modeling.heads.joint import JointMTPModel
from tokenahead.training.commands.settings import read_settings
from tokenahead.training.commands.train import with_moved_backbone
from tokenahead.training.completion import complete
from tokenahead.training.requests import GenerateRequest

PROMPT = "import os"
TOKENIZER = EvaByteTokenizer()
IDS = torch.tensor([TOKENIZER(PROMPT)["input_ids"]])


def text_of(model) -> str:
    """What a model, or the backbone of attached heads, writes behind the prompt."""
    backbone = model.backbone if isinstance(model, MTPHeads) else model
    new = backbone.generate(IDS, max_new_tokens=8, do_sample=False)[0, IDS.shape[1] :]
    return TOKENIZER.decode(new, skip_special_tokens=True)


def push(folder: Path, kind: str) -> str:
    """Pushes heads whose backbone learned with them, or stayed, and returns what that backbone writes."""
    backbone = AutoModelForCausalLM.from_pretrained(folder / "llama").eval()
    heads = MTPHeads.from_backbone(backbone, window=3)
    if kind == "adapted":
        backbone.add_adapter(LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    elif kind == "whole":
        with torch.no_grad():
            backbone.get_output_embeddings().weight.mul_(-1)
    (heads if kind == "alone" else JointMTPModel(heads)).save_pretrained(folder / kind)
    TOKENIZER.save_pretrained(folder / kind)
    (folder / kind / "checkpoint-1").mkdir()
    (folder / kind / "checkpoint-1" / "model.safetensors").write_bytes(b"large")
    HfApi().create_repo(f"me/{kind}")
    HfApi().upload_folder(repo_id=f"me/{kind}", folder_path=folder / kind)
    return text_of(backbone)


def completed(model: str, heads: str) -> str:
    """What `tokenahead generate` writes, or why it does not."""
    try:
        return complete(GenerateRequest(model, PROMPT, heads=heads, max_new_tokens=8))["text"]
    except ValueError as error:
        return str(error)


def main(folder: Path) -> None:
    found = {}
    for kind in ("alone", "adapted", "whole"):
        name, wanted = f"me/{kind}", push(folder, kind)
        words = ["--drafter", f"heads:{name}", "--output_dir", str(folder / "out")]
        settings = with_moved_backbone(read_settings(words))
        backbone = settings.model.model_name_or_path or str(folder / "llama")
        found[kind] = {
            "wanted": wanted,
            "generate": completed(str(folder / "llama"), name),
            "of its own": completed(backbone, name),
            "model": backbone,
            "adapters": settings.adapters,
        }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
