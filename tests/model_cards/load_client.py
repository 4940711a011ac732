"""Run by test_push.py as a separate process, without a token: loads what push_client.py pushed.

First with the code that was pushed, while tokenahead cannot be imported, then with the library.

Usage: python load_client.py FOLDER. Leaves `loaded.json` in FOLDER.
"""

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import ModelCard, snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "def main():"
TRUST = {"trust_remote_code": True}


def load_own(repo: str) -> tuple:
    """With the classes of the library."""
    from tokenahead import EvaByteForMTPC, EvaByteTokenizer

    return EvaByteForMTPC.from_pretrained(repo), EvaByteTokenizer.from_pretrained(repo)


LOADERS = {
    "code": lambda repo: tuple(kind.from_pretrained(repo, **TRUST) for kind in (AutoModelForCausalLM, AutoTokenizer)),
    "own": load_own,
    "auto": lambda repo: (AutoModelForCausalLM.from_pretrained(repo), AutoTokenizer.from_pretrained(repo)),
}
REPOSITORIES = ("me/toy", "me/plain")


def has_logits(loader: str, repo: str | Path, expected: torch.Tensor) -> bool:
    """Whether the model and tokenizer loaded from `repo` give exactly the expected logits."""
    model, tokenizer = LOADERS[loader](repo)
    with torch.no_grad():
        return torch.equal(model(**tokenizer(PROMPT, return_tensors="pt")).logits, expected)


def run_example(repo: str) -> dict:
    """Runs the code that the card shows, as it stands, and returns its variables."""
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", ModelCard.load(repo).text, re.DOTALL)[1], names)
    return names


def try_model_example() -> list[bool]:
    """Whether the example of a model wrote anything, and the same in both ways."""
    names = run_example("me/toy")
    wrote = names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    return [wrote, torch.equal(names["output"], names["plain"])]


def try_heads_example() -> list[bool]:
    """Whether the example of heads apart wrote anything, and what the backbone writes without them."""
    names = run_example("me/heads")
    wrote = names["output"].shape[1] > names["inputs"]["input_ids"].shape[1]
    names["drafter"].detach()
    plain = names["backbone"].generate(**names["inputs"], max_new_tokens=64)
    return [wrote, torch.equal(names["output"], plain)]


def figures() -> dict[str, float]:
    """The measured figures in the card's metadata."""
    return {entry.metric_type: entry.metric_value for entry in ModelCard.load("me/toy").data.eval_results}


def attempt(call: Callable[[], object]) -> object:
    """The result, or the error in words: one failure must not hide what the rest finds."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(folder: Path) -> None:
    expected = torch.load(folder / "logits.pt")
    snapshot = Path(snapshot_download("me/toy"))
    sys.modules["tokenahead"] = None  # which makes an import fail
    found = {f"code {repo}": attempt(partial(has_logits, "code", repo, expected)) for repo in REPOSITORIES}
    del sys.modules["tokenahead"]
    import tokenahead  # noqa: F401 - makes itself known to the Auto classes

    for loader in ("own", "auto"):
        found |= {f"{loader} {repo}": attempt(partial(has_logits, loader, repo, expected)) for repo in REPOSITORIES}
    files = [path.relative_to(snapshot) for path in snapshot.rglob("*") if path.is_file()]
    found["snapshot files"] = sorted(path.as_posix() for path in files)
    found["snapshot"] = attempt(lambda: has_logits("own", snapshot, expected))
    found["example"] = attempt(try_model_example)
    found["heads example"] = attempt(try_heads_example)
    found["figures"] = attempt(figures)
    found["private"] = attempt(lambda: load_own("me/private"))
    (folder / "loaded.json").write_text(json.dumps(found, default=str), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
