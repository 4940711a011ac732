"""Run by test_push.py as a separate process, without a token: loads what push_client.py pushed.

First with the code that was pushed, while tokenahead cannot be imported, then with the library.

Usage: python load_client.py FOLDER. Leaves `loaded.json` in FOLDER.
"""

import json
import re
import sys
from pathlib import Path

import torch
from huggingface_hub import ModelCard, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.model_cards.clean_client import attempt


def has_logits(repo: str | Path, expected: torch.Tensor, **options: bool) -> bool:
    """Whether the model and tokenizer loaded from `repo` give exactly the expected logits."""
    model, tokenizer = (kind.from_pretrained(repo, **options) for kind in (AutoModelForCausalLM, AutoTokenizer))
    with torch.no_grad():
        return torch.equal(model(**tokenizer("def main():", return_tensors="pt")).logits, expected)


def is_lossless(repo: str) -> bool:
    """Whether the code that a card shows, as it stands, writes what is written without drafts."""
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", ModelCard.load(repo).text, re.DOTALL)[1], names)
    if "drafter" in names:
        names["drafter"].detach()
        names["plain"] = names["backbone"].generate(**names["inputs"], max_new_tokens=64)
    wrote = names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    return wrote and torch.equal(names["output"], names["plain"])


def main(folder: Path) -> None:
    expected, repos = torch.load(folder / "logits.pt"), ("me/toy", "me/plain")
    snapshot = Path(snapshot_download("me/toy"))
    sys.modules["tokenahead"] = None  # which makes an import fail
    found = {f"code {repo}": attempt(has_logits, repo, expected, trust_remote_code=True) for repo in repos}
    del sys.modules["tokenahead"]
    import tokenahead

    found |= {f"own {repo}": attempt(has_logits, repo, expected) for repo in (*repos, snapshot)}
    found["files"] = sorted(path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file())
    found |= {f"card of {repo}": attempt(is_lossless, repo) for repo in ("me/toy", "me/heads")}
    figures = {entry.metric_type: entry.metric_value for entry in ModelCard.load("me/toy").data.eval_results}
    private = attempt(tokenahead.EvaByteForMTPC.from_pretrained, "me/private")
    (folder / "loaded.json").write_text(json.dumps(found | {"figures": figures, "private": private}), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
