"""Backbone and modules pushed to a Hub and loaded from there by name, over real HTTP."""

import json
from pathlib import Path

import pytest

from tests.loopback_hub import LoopbackHub

HERE = Path(__file__).parent


@pytest.mark.nightly
def test_push_and_load_by_name(tmp_path):
    with LoopbackHub() as hub:
        hub.run(HERE / "deepseek_hub_client.py", tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert len(found) == 5 and all(found.values()), found
    assert "model.safetensors.index.json" in hub.repositories["me/modules"].files
    assert "model.safetensors" in hub.repositories["me/saved"].files
