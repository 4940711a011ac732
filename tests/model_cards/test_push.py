"""Pushing and loading over real HTTP: the clients run in processes of their own, the Hub is in this one."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.loopback_hub import LoopbackHub

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
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
        yield SimpleNamespace(hub=hub, folder=folder, found=found, toy=hub.repositories["me/toy"])


@pytest.fixture(scope="module")
def loaded(pushed):
    """What load_client.py found there afterwards."""
    pushed.hub.run(HERE / "load_client.py", pushed.folder, home="home of a reader", token=None)
    return json.loads((pushed.folder / "loaded.json").read_text())


@pytest.mark.core
def test_push_is_one_commit_with_model_tokenizer_card_and_files(pushed):
    assert [commit.message for commit in pushed.toy.commits[1:]] == ["Upload EvaByteForMTPC"]
    names = {"README.md", "config.json", WEIGHTS, "tokenizer_config.json", "acceptance.png", "results.json"}
    assert names <= pushed.toy.files.keys()
    assert pushed.toy.files["acceptance.png"].data == PICTURE
    assert pushed.toy.files[WEIGHTS].lfs
    assert pushed.found["url"] == f"{pushed.hub.url}/me/toy"


@pytest.mark.core
def test_unchanged_push_makes_no_commit(pushed):
    assert pushed.found["unchanged"]


def test_plain_push_keeps_the_card(pushed):
    assert pushed.found["card_kept"]
    assert b"Measured by:" in pushed.toy.files["README.md"].data


def test_plain_push_of_model_and_tokenizer(pushed):
    files = pushed.hub.repositories["me/plain"].files
    assert {"README.md", "config.json", WEIGHTS, "tokenizer_config.json"} <= files.keys()
    assert b'EvaByteForMTPC.from_pretrained("me/plain")' in files["README.md"].data


@pytest.mark.nightly
@pytest.mark.parametrize("repo", ["me/toy", "me/plain"])
@pytest.mark.parametrize("loader", ["code", "own", "auto"])
def test_clean_process_loads_equal_logits(loaded, loader, repo):
    assert loaded[f"{loader} {repo}"] is True


@pytest.mark.nightly
def test_snapshot_download_brings_every_file(pushed, loaded):
    assert loaded["snapshot files"] == sorted(pushed.toy.files)
    assert loaded["snapshot"] is True


@pytest.mark.nightly
@pytest.mark.parametrize("example", ["example", "heads example"])
def test_code_of_the_card_runs_and_is_lossless(loaded, example):
    wrote, identical = True, True
    assert loaded[example] == [wrote, identical]


@pytest.mark.nightly
def test_measured_figures_come_back_from_the_hub(loaded):
    assert loaded["figures"] == {"tokens_per_call": 1.8, "tokens_per_second": 18.0, "speed_up": 2.0}


def test_wrong_token_is_named(pushed):
    error = pushed.found["wrong_token"]
    assert (error["type"], error["status"]) == ("HfHubHTTPError", 401)
    assert "Invalid credentials" in error["message"]


def test_other_namespace_is_refused(pushed):
    assert pushed.found["elsewhere"]["status"] == 403


def test_malformed_card_is_refused(pushed):
    assert pushed.found["malformed"]["type"] == "ValueError"
    assert '"license" must be' in pushed.found["malformed"]["message"]


def test_refused_pushes_leave_no_repository(pushed):
    assert "me/none" not in pushed.hub.repositories
    assert "other/none" not in pushed.hub.repositories


def test_file_that_the_model_saves_is_refused(pushed):
    assert pushed.found["clash"]["type"] == "ValueError"
    assert "config.json" in pushed.found["clash"]["message"]
    assert not pushed.hub.repositories["me/clash"].files


def test_public_repository_is_not_taken_for_a_private_one(pushed):
    assert pushed.found["private_asked"]["type"] == "ValueError"
    assert "is public" in pushed.found["private_asked"]["message"]


@pytest.mark.nightly
def test_private_repository_stays_private(pushed, loaded):
    assert pushed.hub.repositories["me/private"].private
    assert loaded["private"].startswith("OSError")
    assert "me/private" in loaded["private"]


def test_weights_of_an_earlier_push_are_removed(pushed):
    assert pushed.found["shards"] > 1
    weights = {name for name in pushed.hub.repositories["me/shards"].files if "safetensors" in name}
    assert weights == {WEIGHTS}


@pytest.mark.parametrize(
    ("push", "told"),
    [
        ("other architecture", "'me/base' holds another model: model_type is 'llama' there and 'mtp_heads' here"),
        ("other sizes", "'me/toy' holds another model: hidden_size is 32 there and 64 here"),
        ("other sizes, all at once", "'me/toy' holds another model: hidden_size"),
        ("weights of something", "'me/weights' holds another model: it has adapter.safetensors, and no config.json"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(pushed, push, told):
    assert pushed.found[push]["type"] == "ValueError" and told in pushed.found[push]["message"]
    assert pushed.found["untouched"]


def test_a_push_without_a_token_is_refused(pushed):
    assert pushed.found["no token"]["status"] == 401


def test_asked_for_another_model_is_replaced_and_a_card_written(pushed):
    assert pushed.found["overwritten"]
    files = pushed.hub.repositories["me/weights"].files
    assert b"- mine" in files["README.md"].data
    assert b"/home/a" not in files["README.md"].data + files["config.json"].data


def test_code_travels_in_the_same_commit(pushed):
    for repo in ("me/toy", "me/plain"):
        files = pushed.hub.repositories[repo].files
        assert "tokenahead_code/generation_loop.py" in files and b"auto_map" in files["config.json"].data
    files = pushed.hub.repositories["me/heads"].files
    assert not [name for name in files if "code" in name] and b"auto_map" not in files["config.json"].data


def test_hub_knew_every_request(pushed):
    assert pushed.hub.unknown == []


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
