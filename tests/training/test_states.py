"""Sources of states: a stand-in for a vLLM server gives what the backbone in this process does, or is refused."""

import fcntl
import json
import os
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import save, save_file

from tests.training.conftest import ragged_rows, trainer_for
from tests.training.test_evaluation_loss import llama
from tokenahead import EagleHead, MTPHeads
from tokenahead.training import Endpoint, cache_features
from tokenahead.training.endpoint import EndpointError
from tokenahead.training.features import BackboneStates, ServerStates, layer_outputs, vllm_options

PART = {"draft_ids": list(range(70, 90))}
DRAFTERS = {
    "heads": lambda backbone: MTPHeads.from_backbone(backbone, window=3),
    "eagle1": lambda backbone: EagleHead.from_backbone(backbone, version=1),
    "eagle3": lambda backbone: EagleHead.from_backbone(backbone, aux_layers=[1, 2, 3], **PART),
}


class Handler(BaseHTTPRequestHandler):
    """Extracts outputs of layers as vLLM does: the last one is not normed, and files come late and locked."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.say({"data": [{"id": "tiny"}]})

    def do_POST(self):
        body, server = json.loads(self.rfile.read(int(self.headers["Content-Length"]))), self.server
        with server.lock:
            server.asked += 1
            path, late = server.folder / f"{server.asked}.safetensors", server.asked % 3
            tensors = {"hidden_states": server.extracted(body["prompt"]), "token_ids": torch.tensor(body["prompt"])}
        server.change(tensors)
        writer = threading.Thread(target=server.write, args=(path, tensors, late))
        writer.start()
        if not late:
            writer.join()
        choice = {"text": "", "token_ids": [3], "prompt_token_ids": body["prompt"], "finish_reason": "length"}
        self.say({"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)} if server.gives else {}})

    def say(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


class Server(ThreadingHTTPServer):
    request_queue_size, daemon_threads = 128, True

    @torch.no_grad()
    def extracted(self, prompt):
        found, model = [], self.backbone.model
        hooks = [layer.register_forward_hook(lambda *given: found.append(given[2])) for layer in model.layers]
        model(torch.tensor([prompt]))
        for hook in hooks:
            hook.remove()
        return torch.stack([found[layer - 1][0] for layer in self.layers], 1)  # [T, n, d]

    def write(self, path, tensors, late):
        if late == 1:  # half of it first
            path.write_bytes(save(tensors)[:200])
            time.sleep(0.05)
            save_file(tensors, path)
        elif late == 2:
            with path.with_name(f"{path.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                save_file({name: tensor * 0 for name, tensor in tensors.items()}, path)
                time.sleep(0.05)
                save_file(tensors, path)
        else:
            save_file(tensors, path)


@contextmanager
def serving(drafter, folder, change=lambda tensors: None, gives=True):
    server = Server(("127.0.0.1", 0), Handler)
    server.backbone, server.folder, server.change, server.gives = drafter.backbone, folder, change, gives
    server.layers, server.lock, server.asked = layer_outputs(drafter), threading.Lock(), 0
    folder.mkdir()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield Endpoint(f"http://127.0.0.1:{server.server_port}/v1", pause=0.01, concurrency=4)
    finally:
        server.shutdown()
        server.server_close()


def data():
    return [{**row, "labels": row["labels"].clone()} for row in ragged_rows(6, 20)]


def close(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name].float(), expected[name].float(), atol=1e-5) for name in expected)


@pytest.mark.by_day("eagle3")
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_server_gives_the_rows_of_the_backbone_and_of_the_disk(name, tmp_path):
    drafter = DRAFTERS[name](llama(num_hidden_layers=4))
    here = BackboneStates(drafter, data())
    with serving(drafter, tmp_path / "files") as endpoint:
        there = ServerStates(endpoint, drafter, data(), folder=tmp_path / "files")
        for found, expected in zip(there.__getitems__(range(6)), here.__getitems__(range(6)), strict=True):
            close(found, expected)
        assert not any((tmp_path / "files").glob("*.safetensors"))  # what is read is deleted
        stored = cache_features(drafter, data(), tmp_path / "stored", source=there)
    for source in (stored, there.data and here):
        assert len(source) == 6 and source.lengths == here.lengths
    close(stored[4], here[-2])
    close(stored.collate([stored[1], stored[3]]), here.collate([here[1], here[3]]))


def test_a_trainer_takes_rows_of_a_server(tmp_path):
    drafters = [DRAFTERS["eagle3"](llama(num_hidden_layers=4)) for _ in range(2)]
    drafters[1].load_state_dict(drafters[0].state_dict())
    options = dict(max_steps=2, per_device_train_batch_size=3, optim="sgd", learning_rate=0.1)
    trainer_for(drafters[0], tmp_path / "plain", data(), **options).train()
    with serving(drafters[1], tmp_path / "files") as endpoint:
        rows = ServerStates(endpoint, drafters[1], data(), folder=tmp_path / "files")
        trainer = trainer_for(drafters[1], tmp_path / "served", rows, **options)
        trainer.data_collator = rows.collate
        trainer.train()
    for one, other in zip(drafters[0].parameters(), drafters[1].parameters()):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


SHAPE = r"hidden_states.*\[1, 2, 3, 4\]"
CHANGES = {
    "other tokens": (lambda found: found.update(token_ids=found["token_ids"] + 1), "other tokens"),
    "narrow": (lambda found: found.update(hidden_states=found["hidden_states"][..., :16].contiguous()), SHAPE),
    "turned": (lambda found: found.update(hidden_states=found["hidden_states"].transpose(0, 1).contiguous()), SHAPE),
    "infinite": (lambda found: found["hidden_states"][0, 0].fill_(torch.nan), "not finite"),
    "unnamed": (lambda found: found.pop("hidden_states"), "hidden_states"),
    "wider than asked": (lambda found: found.update(more=torch.zeros(1 << 22)), "more than"),
}


@pytest.mark.by_day("other tokens", "turned", "infinite", "wider than asked")
@pytest.mark.parametrize("name", CHANGES)
def test_other_states_are_refused(name, tmp_path):
    drafter, (change, words) = DRAFTERS["eagle3"](llama(num_hidden_layers=4)), CHANGES[name]
    refused = pytest.raises(EndpointError, match=f"row 2.*{words}")
    with serving(drafter, tmp_path / "files", change) as endpoint, refused:
        ServerStates(endpoint, drafter, data(), folder=tmp_path / "files")[2]


def test_a_server_that_extracts_nothing_and_files_that_do_not_come_are_refused(tmp_path):
    drafter = DRAFTERS["heads"](llama())
    refused = pytest.raises(EndpointError, match="no hidden_states_path")
    with serving(drafter, tmp_path / "files", gives=False) as endpoint, refused:
        ServerStates(endpoint, drafter, data(), folder=tmp_path / "files")[0]
    with serving(drafter, tmp_path / "others") as endpoint:
        elsewhere = ServerStates(endpoint, drafter, data(), folder=tmp_path / "not mounted", wait=0.1)
        with pytest.raises(EndpointError, match="one disk"):
            elsewhere[0]


def planted(path, kind, states):
    """Put something else where a file of states is expected."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        elsewhere = path.parent.with_name("secret.safetensors")
        elsewhere.write_bytes(states)
        path.symlink_to(elsewhere)


@pytest.mark.by_day("file-pipe", "lock-link")
@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
@pytest.mark.parametrize("lock", [False, True], ids=["file", "lock"])
def test_what_is_no_plain_file_is_refused_and_stays(kind, lock, tmp_path, monkeypatch):
    drafter, written = DRAFTERS["heads"](llama()), threading.Event()

    def write(server, path, tensors, late):
        planted(path.with_name(f"{path.name}.lock") if lock else path, kind, save(tensors))
        if lock:  # after what locks it: a reader who came in between would find a file that nothing locks
            save_file(tensors, path)
        written.set()

    monkeypatch.setattr(Server, "write", write)
    with serving(drafter, tmp_path / "files") as endpoint:
        rows = ServerStates(endpoint, drafter, data(), folder=tmp_path / "files", wait=0.2)
        with pytest.raises(EndpointError, match="row 3.*(link|no plain file)"):
            rows[3]
        assert written.wait(60)
    assert len(list((tmp_path / "files").iterdir())) == 1 + lock
    assert kind != "link" or (tmp_path / "secret.safetensors").exists()


def test_names_that_are_none_are_refused_and_a_path_elsewhere_is_a_name_in_the_folder(tmp_path, monkeypatch):
    drafter, say = DRAFTERS["heads"](llama()), Handler.say
    (mine := tmp_path / "mine.safetensors").write_text("mine")
    with serving(drafter, tmp_path / "files") as endpoint:
        rows = ServerStates(endpoint, drafter, data(), folder=tmp_path / "files", wait=0.1)
        for name in ("", "/", ".", "..", "/a/..", "a\0b.safetensors", 3, ["x"], None, str(mine)):
            said = {"kv_transfer_params": {"hidden_states_path": name}}
            monkeypatch.setattr(Handler, "say", lambda self, value, said=said: say(self, value | said))
            words = "mine.safetensors of row 0.*one disk" if name == str(mine) else "row 0|hidden_states_path"
            with pytest.raises(EndpointError, match=words):
                rows[0]
    assert (tmp_path / "files").is_dir() and mine.read_text() == "mine"


def test_the_last_layers_number_counts_outputs(tmp_path):
    drafter = DRAFTERS["eagle3"](llama(num_hidden_layers=4))
    assert layer_outputs(drafter) == [1, 2, 3, 4]  # transformers' -1
    words = vllm_options(drafter, tmp_path)
    layers = json.loads(words[1])["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
    assert layers == [1, 2, 3, 4] and json.loads(words[3])["kv_role"] == "kv_producer"
