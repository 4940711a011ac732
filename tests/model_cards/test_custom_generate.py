"""Repositories for `custom_generate`: what is written, and that they draft where tokenahead cannot be imported."""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from tests.backbones import backbone
from tests.loopback_hub import LoopbackHub
from tests.models import left_padded
from tokenahead import EagleHead, NgramDrafter, __version__, cli
from tokenahead.model_cards import publish_generate

TEXTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 9, 10, 9], [20, 21, 22, 20]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "drafts"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["publish-generate", str(path), "--with", "ngram", "suffix", "block", "eagle", "--name", "me/drafts"])
    return path


@pytest.fixture(scope="module")
def base():
    return backbone()


def test_code_is_whole_and_of_one_version(folder):
    files = {path.stem: path.read_text() for path in (folder / "custom_generate").iterdir()}
    assert {"generate", "modeling_eagle", "modeling_block", "generation_lookups_suffix"} <= files.keys()
    for text in files.values():
        assert f" of tokenahead {__version__} " in text.partition("\n")[0]
        relative = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom) and node.level]
        assert {node.module for node in relative} <= files.keys()
    assert files.keys() - {"generate"} == {  # so that transformers reads every file once
        node.module for node in ast.walk(ast.parse(files["generate"])) if isinstance(node, ast.ImportFrom)
    }
    assert {path.name for path in folder.iterdir()} == {"README.md", "custom_generate"}  # and no requirements.txt


def test_the_card_has_the_tag_of_the_hub_and_a_block_to_copy(folder):
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "transformers" and "custom_generate" in card.data.tags
    code = card.text.partition("```python\n")[2].partition("```")[0]
    assert 'load_custom_generate("me/drafts", trust_remote_code=True)' in code and compile(code, "README.md", "exec")
    assert (
        '| suffix | "suffix" | Drafts' in card.text
        and "| eagle | its directory or `owner/name` | An EAGLE" in card.text
    )


def test_fewer_drafters_have_fewer_files_and_what_is_not_ours_stays(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    mine = {tmp_path / "config.json": "{}", tmp_path / "custom_generate" / "mine.py": "x = 1\n"}
    mine[tmp_path / "README.md"] = (folder / "README.md").read_text() + "A word of mine.\n"
    for path, text in mine.items():
        path.write_text(text)
    publish_generate(tmp_path, ["ngram"])
    names = {path.stem for path in (tmp_path / "custom_generate").iterdir()}
    assert {"generate", "generation_lookups_ngram", "mine"} <= names
    assert not {"generation_lookups_suffix", "modeling_eagle", "modeling_block"} & names
    assert {path: path.read_text() for path in mine} == mine


def test_a_foreign_function_is_not_replaced(tmp_path):
    path = tmp_path / "custom_generate" / "generate.py"
    path.parent.mkdir()
    path.write_text("def generate(model, **kwargs): ...\n")
    with pytest.raises(FileExistsError, match="generate.py is not of tokenahead"):
        publish_generate(tmp_path, ["ngram"])
    assert [*path.parent.iterdir()] == [path] and path.read_text().startswith("def generate")


def test_an_unknown_drafter_is_refused_by_the_names_of_those_that_are(tmp_path):
    with pytest.raises(ValueError, match="--with bigram: choose of ngram, suffix, .*eagle"):
        publish_generate(tmp_path / "new", ["ngram", "bigram"])
    assert not (tmp_path / "new").exists()


CLIENT = """
import json, sys
sys.modules["tokenahead"] = None  # an import of it is an ImportError
import torch
from transformers import AutoModelForCausalLM

model_path, head, folder, call = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(model_path)
call = {name: torch.tensor(each) for name, each in call.items()}
call |= {"max_new_tokens": 16, "return_dict_in_generate": True}
loaded, found = model.load_custom_generate(folder, trust_remote_code=True), {}
by_name = {"custom_generate": folder, "trust_remote_code": True}
found["plain"] = model.generate(**call, do_sample=False).sequences.tolist()
drafters = {"ngram": {"num_assistant_tokens": 2}, "suffix": {}, head: {"draft_tree": {"depth": 2, "top_k": 2}}}
for drafter, options in drafters.items():
    out = loaded(model, **call, drafter=drafter, do_sample=False, **options)
    named = model.generate(**call, drafter=drafter, do_sample=False, **by_name, **options)
    torch.manual_seed(3)
    sampled = loaded(model, **call, drafter=drafter, do_sample=True, temperature=0.7, top_k=0)
    lengths = [len(text) for text in out.speculation.rows_drafts]
    drafted = [sum(len(ids) for row in each.speculation.rows_drafts for ids in row) for each in (out, named, sampled)]
    found[drafter] = [each.sequences.tolist() for each in (out, named, sampled)] + drafted
print(json.dumps(found))
"""


def test_drafts_where_tokenahead_cannot_be_imported(base, folder, tmp_path):
    """Greedy texts of a ragged batch are those of plain decoding, sampled ones those that the library draws."""
    head = EagleHead.from_backbone(base)
    drafters = {"ngram": NgramDrafter().attach(base), str(tmp_path / "head"): head.eval()}
    base.save_pretrained(tmp_path / "model")
    head.save_pretrained(tmp_path / "head")
    batch = left_padded([torch.tensor(text) for text in TEXTS])
    call = batch | {"max_new_tokens": 16}
    expected = {}
    for name, drafter in drafters.items():
        torch.manual_seed(3)
        out = base.generate(**call, assistant_model=drafter, do_sample=True, temperature=0.7, top_k=0)
        expected[name] = out.tolist()
        drafter.detach()
    given = json.dumps({name: each.tolist() for name, each in batch.items()})
    words = [tmp_path / "model", tmp_path / "head", folder, given]
    done = subprocess.run(
        [sys.executable, "-I", "-c", CLIENT, *map(str, words)],
        env=os.environ | {"HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    plain = found.pop("plain")
    assert plain == base.generate(**call, do_sample=False).tolist() and len(found) == 3
    for name, (greedy, named, sampled, *drafted) in found.items():
        assert greedy == named == plain and min(drafted) > 0, name
        assert sampled == expected.get(name, sampled), name


def test_a_directory_that_also_holds_the_model(base, folder, tmp_path):
    """transformers puts the function in the place of the model's `generate`, where it drafts in every call."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    base.save_pretrained(tmp_path)
    ids = torch.tensor(TEXTS[:1])
    call = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(ids))
    plain = base.generate(ids, **call)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    for options in ({}, {"drafter": "suffix"}, {}):
        out = model.generate(ids, **call, **options, return_dict_in_generate=True)
        assert out.sequences.equal(plain) and any(out.speculation.rows_drafts[0])


def test_what_would_be_misread_is_refused(base, folder):
    generate = base.load_custom_generate(folder, trust_remote_code=True)
    ids = torch.tensor(TEXTS[:1])
    with pytest.raises(ValueError, match="custom_generate= takes the directory"):
        base.generate(ids, max_new_tokens=4, do_sample=True, temperature=0.5, custom_generate=generate)
    with pytest.raises(ValueError, match=r"drafter='bigram': choose of \['ngram', 'suffix'\], or name a directory"):
        generate(base, ids, drafter="bigram")


OF_THE_HUB = """
import sys
from huggingface_hub import HfApi

api = HfApi()
api.create_repo("me/drafts")
api.upload_folder(repo_id="me/drafts", folder_path="drafts")
sys.modules["tokenahead"] = None
import torch
from transformers import AutoModelForCausalLM

model, ids = AutoModelForCausalLM.from_pretrained("model"), torch.tensor([[5, 6, 7, 5, 6]])
own = {"custom_generate": "me/drafts", "trust_remote_code": True}
for _ in range(2):
    out = model.generate(ids, **own, max_new_tokens=9, return_dict_in_generate=True)
    assert out.sequences.equal(model.generate(ids, max_new_tokens=9, do_sample=False)) and out.speculation
"""


@pytest.mark.nightly
def test_a_repository_of_the_hub(base, tmp_path):
    publish_generate(tmp_path / "drafts", ["ngram"])
    base.save_pretrained(tmp_path / "model")
    (tmp_path / "client.py").write_text(OF_THE_HUB)
    with LoopbackHub() as hub:
        hub.run(tmp_path / "client.py", tmp_path)
        assert set(hub.repositories["me/drafts"].files) > {"README.md", "custom_generate/generate.py"}
        assert not hub.unknown
