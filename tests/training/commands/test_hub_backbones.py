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


def test_adapters_on_the_hub_go_on_the_backbone(used):
    found, alone = used.found["adapted"], used.found["alone"]
    assert found["wanted"] != alone["wanted"]
    assert found["generate"] == found["of its own"] == found["wanted"]
    assert found["model"] == used.base and found["adapters"].endswith("/backbone")


def test_a_whole_backbone_on_the_hub_is_the_one_that_is_meant(used):
    found = used.found["whole"]
    assert found["wanted"] != used.found["alone"]["wanted"]
    assert found["of its own"] == found["wanted"]
    assert found["model"].endswith("/backbone") and found["adapters"] is None
    assert f"the backbone of me/whole learned with these heads; name {found['model']} instead" in found["generate"]


def test_heads_alone_stay_with_the_backbone_that_they_name(used):
    found = used.found["alone"]
    assert found["generate"] == found["of its own"] == found["wanted"]
    assert found["model"] == used.base and found["adapters"] is None


def test_nothing_is_fetched_in_vain(used):
    """Of heads alone no file but theirs, of adapters no other weights, and never a checkpoint."""
    assert not any("backbone" in name for name in fetched(used, "alone"))
    weights = {name for name in fetched(used, "adapted") if name.endswith(".safetensors")}
    assert weights == {"model.safetensors", "backbone/adapter_model.safetensors"}
    assert not any("checkpoint" in line for line in used.hub.requests if line.startswith("GET"))
    assert used.hub.unknown == []
