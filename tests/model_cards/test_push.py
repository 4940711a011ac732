"""Pushing and loading over real HTTP: the clients run in processes of their own, the Hub is in this one."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.loopback_hub import LoopbackHub

HERE = Path(__file__).parent
PICTURE = b"\x89PNG\r\n\x1a\n, or so"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def pushed(tmp_path_factory):
    """The Hub after push_client.py, and what that found."""
    folder = tmp_path_factory.mktemp("push")
    (folder / "acceptance.png").write_bytes(PICTURE)
    with LoopbackHub() as hub:
        hub.run(HERE / "push_client.py", folder, home="home of the author")
        found = json.loads((folder / "findings.json").read_text())
        files = {name: repository.files for name, repository in hub.repositories.items()}
        yield SimpleNamespace(hub=hub, folder=folder, found=found, files=files)


@pytest.mark.core
def test_push_is_one_commit_with_model_tokenizer_card_and_files(pushed):
    commits, files = pushed.hub.repositories["me/toy"].commits, pushed.files["me/toy"]
    assert [commit.message for commit in commits[1:]] == ["Upload EvaByteForMTPC"] and pushed.found["unchanged"]
    names = {"README.md", "config.json", WEIGHTS, "tokenizer_config.json", "acceptance.png", "results.json"}
    assert names <= files.keys() and files["acceptance.png"].data == PICTURE and files[WEIGHTS].lfs
    assert b"Measured by:" in files["README.md"].data
    assert pushed.found["url"] == f"{pushed.hub.url}/me/toy" and pushed.hub.unknown == []


def test_plain_push_of_model_and_tokenizer(pushed):
    files = pushed.files["me/plain"]
    assert {"README.md", "config.json", WEIGHTS, "tokenizer_config.json"} <= files.keys()
    assert b'EvaByteForMTPC.from_pretrained("me/plain")' in files["README.md"].data


def test_weights_of_an_earlier_push_are_removed(pushed):
    weights = {name for name in pushed.files["me/shards"] if "safetensors" in name}
    assert pushed.found["shards"] > 1 and weights == {WEIGHTS}


@pytest.mark.parametrize(
    ("push", "kind", "status", "told"),
    [
        ("other architecture", "ValueError", None, "'me/base' holds another model: model_type is 'llama' there"),
        ("other sizes", "ValueError", None, "'me/toy' holds another model: hidden_size is 32 there and 64 here"),
        ("weights of something", "ValueError", None, "'me/weights' holds another model: it has adapter.safetensors"),
        ("private", "ValueError", None, "is public"),
        ("malformed", "ValueError", None, '"license" must be'),
        ("clash", "ValueError", None, "config.json"),
        ("no token", "HfHubHTTPError", 401, ""),
        ("wrong token", "HfHubHTTPError", 401, "Invalid credentials"),
        ("elsewhere", "HfHubHTTPError", 403, ""),
    ],
)
def test_what_would_be_lost_is_refused_by_name(pushed, push, kind, status, told):
    error = pushed.found[push]
    assert error[1] == status and told in error[2] and (kind != "ValueError" or error[0] == kind)
    assert pushed.found["untouched"] and not {"me/none", "other/none"} & pushed.files.keys()
    assert not pushed.files["me/clash"]


def test_asked_for_another_model_is_replaced_and_a_card_written(pushed):
    files = pushed.files["me/weights"]
    assert b"- mine" in files["README.md"].data
    assert b"/home/a" not in files["README.md"].data + files["config.json"].data


def test_code_travels_in_the_same_commit(pushed):
    for repo in ("me/toy", "me/plain"):
        files = pushed.files[repo]
        assert "tokenahead_code/generation_loop.py" in files and b"auto_map" in files["config.json"].data
    files = pushed.files["me/heads"]
    assert not [name for name in files if "code" in name] and b"auto_map" not in files["config.json"].data


@pytest.mark.nightly
def test_what_was_pushed_loads_with_its_code_and_with_the_library(pushed):
    pushed.hub.run(HERE / "load_client.py", pushed.folder, home="home of a reader", token=None)
    loaded = json.loads((pushed.folder / "loaded.json").read_text())
    assert loaded.pop("figures") == {"tokens_per_call": 1.8, "tokens_per_second": 18.0, "speed_up": 2.0}
    assert loaded.pop("files") == sorted(pushed.files["me/toy"])
    assert pushed.hub.repositories["me/private"].private and "me/private" in loaded.pop("private")
    assert len(loaded) == 7 and all(found is True for found in loaded.values()), loaded


@pytest.mark.nightly
def test_upload_pipeline_of_xet_clients(tmp_path):
    """Where hf_xet is installed, huggingface_hub uploads in another way; the commits must be the same."""
    pytest.importorskip("hf_xet")
    (tmp_path / "acceptance.png").write_bytes(PICTURE)
    with LoopbackHub(upload_mode="regular") as hub:
        hub.run(HERE / "push_client.py", tmp_path, "twice", xet=True)
        assert [len(commit.files) > 0 for commit in hub.repositories["me/toy"].commits] == [False, True]
        assert {"README.md", WEIGHTS, "acceptance.png"} <= hub.repositories["me/toy"].files.keys()
        assert hub.unknown == []
