"""What docs/security.md promises and no test of one subject shows; and that the tests which it names exist."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from tests.every_model import llama
from tokenahead import (
    EagleHead,
    LookaheadDrafter,
    MTPHeads,
    NgramDrafter,
    PTPStudent,
    RecyclingDrafter,
    SuffixDrafter,
    cli,
)
from tokenahead.model_cards.push import hide_local_names
from tokenahead.training import web as web_module
from tokenahead.training.features import _opened

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "security.md"
PROMPT = torch.tensor([[5, 6, 7, 8, 5, 6]])


def test_every_promise_names_tests_that_exist():
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE.read_text(encoding="utf-8").partition("\n## Tests\n")[2])
    assert len(named) > 40
    for file, name in named:
        texts = [path.read_text(encoding="utf-8") for path in TESTS.rglob(file)]
        assert any(f"def {name}(" in text for text in texts), (file, name)


def test_code_in_a_directory_is_not_imported(tmp_path):
    kinds = {"heads": (MTPHeads, {"window": 3}), "eagle": (EagleHead, {"version": 1})}
    for name, (kind, options) in kinds.items():
        kind.from_backbone(llama(), **options).save_pretrained(tmp_path / name)
        config = tmp_path / name / "config.json"
        fields = json.loads(config.read_text()) | {"auto_map": {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"}}
        config.write_text(json.dumps(fields))
        (tmp_path / name / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
        kind.from_pretrained(tmp_path / name)
    assert not (tmp_path / "ran").exists()


def test_settings_make_no_objects(tmp_path, capsys):
    file = tmp_path / "settings.yaml"
    for tag in ("apply:os.system", "new:os.system", "name:os.system", "object:os.system"):
        file.write_text(f"output_dir: !!python/object/{tag} ['touch {tmp_path}/ran']\n")
        with pytest.raises(SystemExit) as ended:
            cli.main(["train", str(file)])
        assert ended.value.code == 1 and "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_local_names_are_taken_out(tmp_path):
    (local := tmp_path / "runs" / "base").mkdir(parents=True)
    fields = {"base_model_name_or_path": str(local), "text_config": {"_name_or_path": str(local)}, "hidden_size": 4}
    (folder := tmp_path / "push").mkdir()
    for file in ("config.json", "adapter_config.json", "tokenizer_config.json", "trainer_state.json"):
        (folder / file).write_text(json.dumps(fields))
    hide_local_names(folder)
    for file in folder.iterdir():
        assert str(tmp_path) not in file.read_text() and json.loads(file.read_text())["hidden_size"] == 4


def test_the_page_is_on_the_loopback(monkeypatch):
    class Page:
        def launch(self, **options):
            launched.update(options)

    launched = {}
    monkeypatch.setattr(web_module, "build", lambda *arguments: Page())
    web_module.serve(None, None, "auto", "")
    assert launched["server_name"] == "127.0.0.1" and launched["share"] is False


class Interrupting(LogitsProcessor):
    """Raises in its n-th call."""

    def __init__(self, error, count):
        self.error, self.left = error, count

    def __call__(self, ids, scores):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


@pytest.mark.by_day(most=8)
@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("own"), MemoryError()], ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        lambda base: NgramDrafter().attach(base),
        lambda base: SuffixDrafter().attach(base),
        lambda base: RecyclingDrafter().attach(base),
        lambda base: LookaheadDrafter().attach(base),
        lambda base: MTPHeads.from_backbone(base, window=4),
        lambda base: EagleHead.from_backbone(base, version=1),
        lambda base: PTPStudent.from_backbone(base, num_slots=3, lora_rank=2),
    ],
    ids=["ngram", "suffix", "recycling", "lookahead", "heads", "eagle", "slots"],
)
def test_an_error_in_a_call_leaves_everything_as_it_was(make, error):
    base = llama()
    wanted, before = base.generate(PROMPT, max_new_tokens=12), {*vars(base)}
    drafter = make(base)
    for count in range(4):
        processors = LogitsProcessorList([Interrupting(error, count)])
        with pytest.raises(type(error)):
            base.generate(PROMPT, max_new_tokens=12, assistant_model=drafter, logits_processor=processors)
    assert torch.equal(base.generate(PROMPT, max_new_tokens=12, assistant_model=drafter), wanted)
    drafter.detach()
    assert torch.equal(base.generate(PROMPT, max_new_tokens=12), wanted) and {*vars(base)} == before


def test_a_link_that_takes_the_place_of_a_file_is_not_followed(tmp_path, monkeypatch):
    """A server's file is looked at, and then opened: what lies there in between may be another."""
    file, secret, look = tmp_path / "states", tmp_path / "secret", Path.lstat
    file.write_bytes(b"states")
    secret.write_bytes(b"secret")

    def swapped(path):
        found = look(path)
        path.unlink()
        path.symlink_to(secret)
        return found

    monkeypatch.setattr(Path, "lstat", swapped)
    with pytest.raises(OSError, match="symbolic links"):
        _opened(file, "the states")
