"""Run by test_deepseek_hub.py as a separate process: pushes backbone and modules, and loads them by name.

Usage: python deepseek_hub_client.py FOLDER. Leaves `found.json` in FOLDER.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.families import family_model, random_ids
from tokenahead import DeepSeekMTP


@torch.no_grad()
def main(folder: Path) -> None:
    model, ids = family_model("deepseek_v3", num_nextn_predict_layers=2), random_ids()
    expected = model(ids)
    model.push_to_hub("me/modules", max_shard_size="50KB")
    model.save_pretrained(folder / "local", push_to_hub=True, repo_id="me/saved")
    found = {}
    for repo in ("me/modules", "me/saved"):
        again = DeepSeekMTP.from_pretrained(repo)(ids)
        found[repo] = torch.equal(again.mtp_logits[1], expected.mtp_logits[1])
        found[f"plain {repo}"] = torch.equal(AutoModelForCausalLM.from_pretrained(repo)(ids).logits, expected.logits)
    found["without modules"] = torch.equal(
        DeepSeekMTP.from_pretrained("me/saved", inference_only=True)(ids).logits, expected.logits
    )
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
