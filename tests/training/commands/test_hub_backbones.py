"""Heads that are named as on the Hub, with the backbone that learned with them in their repository, over real HTTP."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.loopback_hub import LoopbackHub

pytestmark = pytest.mark.nightly
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def used(folders, tmp_path_factory):
    """What hub_backbones_client.py found, and what it asked the Hub for."""
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(folders / "llama", folder / "llama")
    with LoopbackHub() as hub:
        hub.run(HERE / "hub_backbones_client.py", folder)
    return SimpleNamespace(hub=hub, base=str(folder / "llama"), found=json.loads((folder / "found.json").read_text()))


def fetched(used, kind):
    """Files that were fetched whole from a repository."""
    start = f"GET /me/{kind}/resolve/"
    return {line.removeprefix(start).split("/", 1)[1] for line in used.hub.requests if line.startswith(start)}


def test_heads_on_the_hub_come_with_the_backbone_that_learned_with_them(used):
    alone, adapted, whole = (used.found[kind] for kind in ("alone", "adapted", "whole"))
    assert all(found["of its own"] == found["wanted"] for found in (alone, adapted, whole))
    assert alone["wanted"] not in (adapted["wanted"], whole["wanted"])
    assert alone["generate"] == alone["wanted"] and adapted["generate"] == adapted["wanted"]
    assert alone["model"] == adapted["model"] == used.base and alone["adapters"] is whole["adapters"] is None
    assert adapted["adapters"].endswith("/backbone") and whole["model"].endswith("/backbone")
    assert f"the backbone of me/whole learned with these heads; name {whole['model']} instead" in whole["generate"]


def test_nothing_is_fetched_in_vain(used):
    """Of heads alone no file but theirs, of adapters no other weights, and never a checkpoint."""
    assert not any("backbone" in name for name in fetched(used, "alone"))
    weights = {name for name in fetched(used, "adapted") if name.endswith(".safetensors")}
    assert weights == {"model.safetensors", "backbone/adapter_model.safetensors"}
    assert not any("checkpoint" in line for line in used.hub.requests if line.startswith("GET"))
    assert used.hub.unknown == []
