"""Run by test_push.py as a separate process, against a loopback Hub: pushes a tiny model in every way tested.

Usage: python push_client.py FOLDER [twice]. Leaves `findings.json` and the model's logits in FOLDER; with `twice` it
only pushes the same thing two times.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import HfApi
from transformers import LlamaConfig, LlamaForCausalLM

from tokenahead import EvaByteConfig, EvaByteForMTPC, EvaByteTokenizer, MTPHeadConfig, MTPHeads
from tokenahead.model_cards import DecodingResult, MeasuredResults, push_to_hub, render_card

PROMPT = "def main():"


def tiny_model() -> EvaByteForMTPC:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    windows = {"window_size": 16, "chunk_size": 4, "num_pred_heads": 4, "max_position_embeddings": 256}
    return EvaByteForMTPC(EvaByteConfig(**sizes, **windows)).eval()


def measured() -> MeasuredResults:
    row = DecodingResult(
        name="greedy", do_sample=False, backbone_calls=5, new_tokens=9, seconds=0.5, plain_seconds=1.0, identical=True
    )
    texts = {"dataset_name": "made up", "dataset_description": "Figures for a test.", "hardware": "none"}
    return MeasuredResults(results=[row], dtype="float32", command="pytest", library_version="0", **texts)


def error_of(call: Callable[[], object]) -> dict:
    """What a call that must fail fails with."""
    try:
        call()
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        return {"type": type(error).__name__, "message": str(error), "status": status}
    return {"type": None, "message": "no error", "status": None}


def head(repo_id: str) -> str:
    """The head of `main`: it moves with every commit."""
    return HfApi().model_info(repo_id).sha


def push_heads(tokenizer: EvaByteTokenizer) -> None:
    """Pushes a backbone that is not ours, and heads for it that stand apart."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes))
    for part in (base, tokenizer):
        part.push_to_hub("me/base")
    heads = MTPHeads.from_backbone(base, window=4)
    push_to_hub(heads, None, render_card(heads, None, repo_id="me/heads", base_model="me/base"), "me/heads")


def refused_pushes(model: EvaByteForMTPC, tokenizer: EvaByteTokenizer) -> dict:
    """Pushes that would lose something, and what stood there before and after."""
    layer = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "_name_or_path": "/home/a/base"}
    config = {"window": 2, "hidden_size": 32, "vocab_size": 320, "base_model_name_or_path": "/home/a/base"}
    heads = MTPHeads(MTPHeadConfig(**config, head_type="layer", backbone_config=layer))
    wider = EvaByteForMTPC(EvaByteConfig(**model.config.to_dict() | {"hidden_size": 64}))
    HfApi().create_repo("me/weights")
    HfApi().upload_file(repo_id="me/weights", path_in_repo="adapter.safetensors", path_or_fileobj=b"theirs")
    pushes = {
        "other architecture": lambda: heads.push_to_hub("me/base"),
        "other sizes": lambda: wider.push_to_hub("me/toy"),
        "other sizes, all at once": lambda: push_to_hub(wider, tokenizer, render_card(wider, None), "me/toy"),
        "weights of something": lambda: heads.push_to_hub("me/weights"),
        "no token": lambda: model.push_to_hub("me/toy", token=False),
    }
    before = {name: head(name) for name in ("me/base", "me/toy", "me/weights")}
    found = {name: error_of(call) for name, call in pushes.items()}
    found["untouched"] = all(head(name) == sha for name, sha in before.items())
    heads.push_to_hub("me/weights", overwrite=True, tags=["mine"])
    found["overwritten"] = head("me/weights") != before["me/weights"]
    return found


def main(folder: Path) -> None:
    model, tokenizer = tiny_model(), EvaByteTokenizer()
    picture, results = folder / "acceptance.png", measured()
    results.to_json(folder / "results.json")
    card = render_card(model, results, license="apache-2.0", repo_id="me/toy", picture=picture.name)
    push = {"files": [picture, folder / "results.json"], "private": False}
    found = {}

    found["url"] = push_to_hub(model, tokenizer, card, "me/toy", **push).repo_url
    first = head("me/toy")
    push_to_hub(model, tokenizer, card, "me/toy", **push)
    found["unchanged"] = head("me/toy") == first
    found["private_asked"] = error_of(lambda: push_to_hub(model, tokenizer, card, "me/toy", **push | {"private": True}))

    malformed = render_card(model, None)
    malformed.data.license = ["not", "a", "text"]
    found["malformed"] = error_of(lambda: push_to_hub(model, tokenizer, malformed, "me/none"))
    found["wrong_token"] = error_of(lambda: push_to_hub(model, tokenizer, card, "me/none", **push, token="hf_wrong"))
    found["elsewhere"] = error_of(lambda: push_to_hub(model, tokenizer, card, "other/none", **push))
    clash = folder / "clash"
    clash.mkdir()
    shutil.copyfile(folder / "results.json", clash / "config.json")
    plain_card = render_card(model, None)
    found["clash"] = error_of(
        lambda: push_to_hub(model, tokenizer, plain_card, "me/clash", files=[clash / "config.json"], remote_code=None)
    )

    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    HfApi().create_repo("me/shards")
    HfApi().upload_folder(repo_id="me/shards", folder_path=folder / "shards")
    found["shards"] = len(list((folder / "shards").glob("model-*.safetensors")))
    push_to_hub(model, None, plain_card, "me/shards", remote_code=None)
    push_to_hub(model, None, plain_card, "me/private", private=True, remote_code=None)

    tokenizer.push_to_hub("me/plain")  # whose card is a form that nobody filled in
    model.push_to_hub("me/plain")
    model.push_to_hub("me/toy")
    found["card_kept"] = head("me/toy") == first

    push_heads(tokenizer)
    found |= refused_pushes(model, tokenizer)

    with torch.no_grad():
        logits = model(**tokenizer(PROMPT, return_tensors="pt")).logits
    torch.save(logits, folder / "logits.pt")
    (folder / "findings.json").write_text(json.dumps(found), encoding="utf-8")


def push_twice(folder: Path) -> None:
    model, tokenizer = tiny_model(), EvaByteTokenizer()
    for _ in range(2):
        push_to_hub(model, tokenizer, render_card(model, None), "me/toy", files=[folder / "acceptance.png"])


if __name__ == "__main__":
    (push_twice if sys.argv[2:] == ["twice"] else main)(Path(sys.argv[1]))
