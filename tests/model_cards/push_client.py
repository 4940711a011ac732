"""Run by test_push.py as a separate process, against a loopback Hub: pushes a tiny model in every way tested.

Usage: python push_client.py FOLDER [twice]. Leaves `findings.json` and the model's logits in FOLDER; with `twice` it
only pushes the same thing two times.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import HfApi
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead import EvaByteConfig, EvaByteForMTPC, EvaByteTokenizer, MTPHeadConfig, MTPHeads
from tokenahead.model_cards import DecodingResult, MeasuredResults, push_to_hub, render_card

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
WINDOWS = {"window_size": 16, "chunk_size": 4, "num_pred_heads": 4, "max_position_embeddings": 256}
ROW = {"name": "greedy", "do_sample": False, "backbone_calls": 5, "new_tokens": 9, "seconds": 0.5, "plain_seconds": 1.0}
TEXTS = {"dataset_name": "made up", "dataset_description": "Figures for a test.", "hardware": "none"}


def tiny_model(**changes: int) -> EvaByteForMTPC:
    torch.manual_seed(0)
    return EvaByteForMTPC(EvaByteConfig(**SIZES | WINDOWS | changes)).eval()


def error_of(call: Callable[[], object]) -> list:
    """Class, status and message of what a call must fail with."""
    try:
        call()
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        return [type(error).__name__, status, str(error)]
    return [None, None, "no error"]


def head(repo_id: str) -> str:
    """The head of `main`: it moves with every commit."""
    return HfApi().model_info(repo_id).sha


def push_refused(model: EvaByteForMTPC, tokenizer: EvaByteTokenizer, push: dict) -> dict:
    """Errors of pushes that would lose or show something, and whether anything changed by them."""
    layer = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "_name_or_path": "/home/a/base"}
    config = {"window": 2, "hidden_size": 32, "vocab_size": 320, "base_model_name_or_path": "/home/a/base"}
    heads = MTPHeads(MTPHeadConfig(**config, head_type="layer", backbone_config=layer))
    wider, card, malformed = tiny_model(hidden_size=64), render_card(model, None), render_card(model, None)
    malformed.data.license = ["not", "a", "text"]
    (clash := push["files"][0].parent / "clash" / "config.json").parent.mkdir()
    clash.write_text("{}")
    HfApi().create_repo("me/weights")
    HfApi().upload_file(repo_id="me/weights", path_in_repo="adapter.safetensors", path_or_fileobj=b"theirs")
    before = {name: head(name) for name in ("me/base", "me/toy", "me/weights")}
    pushes = {
        "other architecture": lambda: heads.push_to_hub("me/base"),
        "other sizes": lambda: push_to_hub(wider, tokenizer, render_card(wider, None), "me/toy"),
        "weights of something": lambda: heads.push_to_hub("me/weights"),
        "no token": lambda: model.push_to_hub("me/toy", token=False),
        "private": lambda: push_to_hub(model, tokenizer, card, "me/toy", private=True),
        "malformed": lambda: push_to_hub(model, tokenizer, malformed, "me/none"),
        "wrong token": lambda: push_to_hub(model, tokenizer, card, "me/none", **push, token="hf_wrong"),
        "elsewhere": lambda: push_to_hub(model, tokenizer, card, "other/none", **push),
        "clash": lambda: push_to_hub(model, tokenizer, card, "me/clash", files=[clash], remote_code=None),
    }
    found = {name: error_of(call) for name, call in pushes.items()}
    found["untouched"] = all(head(name) == sha for name, sha in before.items())
    heads.push_to_hub("me/weights", overwrite=True, tags=["mine"])
    return found


def main(folder: Path) -> None:
    model, tokenizer = tiny_model(), EvaByteTokenizer()
    results = MeasuredResults(
        results=[DecodingResult(**ROW, identical=True)], dtype="float32", command="pytest", library_version="0", **TEXTS
    )
    push = {"files": [folder / "acceptance.png", results.to_json(folder / "results.json")], "private": False}
    card = render_card(model, results, license="apache-2.0", repo_id="me/toy", picture="acceptance.png")
    found = {"url": push_to_hub(model, tokenizer, card, "me/toy", **push).repo_url}
    first = head("me/toy")
    push_to_hub(model, tokenizer, card, "me/toy", **push)
    model.push_to_hub("me/toy")
    found["unchanged"] = head("me/toy") == first

    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    HfApi().create_repo("me/shards")
    HfApi().upload_folder(repo_id="me/shards", folder_path=folder / "shards")
    found["shards"] = len(list((folder / "shards").glob("model-*.safetensors")))
    for name, is_private in (("me/shards", None), ("me/private", True)):
        push_to_hub(model, None, render_card(model, None), name, private=is_private, remote_code=None)
    for part in (tokenizer, model):
        part.push_to_hub("me/plain")
    base = LlamaForCausalLM(LlamaConfig(vocab_size=320, **SIZES))
    for part in (base, tokenizer):
        part.push_to_hub("me/base")
    heads = MTPHeads.from_backbone(base, window=4)
    push_to_hub(heads, None, render_card(heads, None, repo_id="me/heads", base_model="me/base"), "me/heads")
    found |= push_refused(model, tokenizer, push)
    with torch.no_grad():
        torch.save(model(**tokenizer("def main():", return_tensors="pt")).logits, folder / "logits.pt")
    (folder / "findings.json").write_text(json.dumps(found), encoding="utf-8")


def push_twice(folder: Path) -> None:
    model, tokenizer = tiny_model(), EvaByteTokenizer()
    for _ in range(2):
        push_to_hub(model, tokenizer, render_card(model, None), "me/toy", files=[folder / "acceptance.png"])


if __name__ == "__main__":
    (push_twice if sys.argv[2:] == ["twice"] else main)(Path(sys.argv[1]))
