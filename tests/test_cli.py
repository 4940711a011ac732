"""The command line: what is printed where, exit statuses, errors of one line."""

import dataclasses
import io
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.training.conftest import small_model
from tokenahead import EvaByteTokenizer, MTPHeadConfig, MTPHeads, __version__, cli
from tokenahead.model_cards import DecodingResult, MeasuredResults
from tokenahead.training import demo as demo_module
from tokenahead.training import loading
from tokenahead.training.demo import Measurement


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model that never ends a text by itself."""
    path = tmp_path_factory.mktemp("model")
    small_model().save_pretrained(path)
    EvaByteTokenizer().save_pretrained(path)
    return path


def run(*arguments) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return ended.value.code or 0


def error_of(capsys, *arguments) -> tuple[int, str]:
    """Exit status and the one line that stands on the standard error."""
    code, captured = run(*arguments), capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1 and captured.out == "", captured
    return code, lines[0]


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"tokenahead {__version__}\n"


_ENTERS = """
import sys
import tokenahead_command
try:
    tokenahead_command.main()
except SystemExit as ended:
    print(ended.code or 0, "torch" in sys.modules, "transformers" in sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("words", "status"),
    [("--help", 0), ("--version", 0), ("nothing", 2), ("bench --nope", 2), ("generate --model m --nope", 2)],
)
def test_what_needs_no_model_imports_no_library(words, status):
    done = subprocess.run([sys.executable, "-c", _ENTERS, *words.split()], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == f"{status} False False"


def test_a_command_that_runs_has_the_whole_package(folder):
    code = f"{_ENTERS}\nimport tokenahead, transformers\nprint(transformers.AutoConfig.for_model('evabyte').model_type)"
    words = ["generate", "--model", str(folder), "--max-new-tokens", "4", "ab"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "0 True True" and done.stdout.splitlines()[-1] == "evabyte"


@pytest.mark.parametrize("command", ["demo", "generate", "bench", "card", "restore-modules"])
def test_the_help_of_a_command_names_each_field_of_its_request(capsys, command):
    run(command, "--help")
    words = capsys.readouterr().out
    for entry in dataclasses.fields(cli._COMMANDS[command][0]):
        name = entry.name.replace("_", "-")
        assert (f"\n  {name} " if entry.metadata.get("positional") else f"\n  --{name}") in words


def test_words_are_read_as_the_options_say():
    assert cli._parse(["card", "--overwrite", "directory"]).model == "directory"  # a flag takes no word
    for name in ("--heads", "--eagle", "--student"):
        assert cli._parse(["generate", "--model", "m", name, "x"]).method() == "auto:x"
    words = "bench --model m --prompts p --methods ngram own --output o --batch-size 1 2"
    bench = cli._parse(words.split())
    assert (bench.methods, bench.batch_size) == (["ngram", "own"], [1, 2])
    assert (bench.output, bench.device) == (Path("o"), "cpu")


def test_a_missing_extra_is_named_with_its_command(capsys, monkeypatch):
    monkeypatch.setattr(cli, "import_module", lambda *names: __import__("no_such_package"))
    for command in ("lm-eval", "regenerate"):
        code, line = error_of(capsys, command)
        assert code == 1 and f"tokenahead {command} needs 'no_such_package'" in line


WRONG = {
    "demo --seconds x": "--seconds",
    "demo --batch-size 0": "--batch-size: '0'",
    "demo x": "unrecognized arguments: x",
    "generate x": "required: --model",
    "generate --model m x y": "unrecognized arguments: y",
    "generate --model m --nope": "unrecognized arguments: --nope",
    "generate --model m x --heads h --plain": "--plain: not allowed with argument --heads",
    "generate --model m x --dtype int3": "--dtype: invalid choice: 'int3'",
    "generate --model m x --max-new-tokens 1.5": "--max-new-tokens",
    "doctor --model m --drafter ngram --heads h": "--heads: not allowed with argument --drafter",
    "restore-modules x --output o": "required: --modules",
    "dance": "'dance'",
    "": "{demo,generate,bench,doctor,verify,card,publish-generate,restore-modules,train,regenerate,features,lm-eval}",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_arguments_are_named_in_one_line(capsys, words):
    code, line = error_of(capsys, *words.split())
    assert code == 2 and WRONG[words] in line and line.startswith("tokenahead")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_missing_prompt_is_named_where_nobody_pipes_one_in(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    code, line = error_of(capsys, "generate", "--model", "m")
    assert code == 1 and "a prompt is required" in line


def test_a_prompt_may_begin_with_a_dash():
    for words, prompt in [
        (["x", "--model", "m"], "x"),
        (["--model", "m", "-abc"], "-abc"),
        (["--model", "m", "- an item"], "- an item"),
        (["--model", "m", "--", "--seed"], "--seed"),
        (["--model", "m", "-"], "-"),
        (["--model", "m"], None),
        (["--model", "m", "--chat", "--json", "yes"], "yes"),
    ]:
        assert cli._parse(["generate", *words]).prompt == prompt


@pytest.mark.core
def test_names_that_nothing_gives(capsys, folder, tmp_path):
    for words, named in [
        (["--model", tmp_path / "nowhere"], f"--model {tmp_path / 'nowhere'}: no such"),
        (["--model", "some/thing"], "--model some/thing: no such"),  # tests run offline
        (["--model", folder, "--heads", "some/thing"], "--heads some/thing: no such"),
        (["--model", folder, "--heads", "./nowhere"], "--heads ./nowhere: no such directory"),
        (["--model", folder, "--heads", folder], f"--heads {folder} holds 'evabyte'"),
    ]:
        code, line = error_of(capsys, "generate", *words, "x")
        assert code == 1 and line.startswith(f"tokenahead generate: {named}")
        assert "some/thing" not in line or line.endswith("HF_HUB_OFFLINE is set, and the cache does not hold it")


def test_a_hub_that_does_not_answer_is_named(capsys, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    monkeypatch.setattr(loading, "is_offline_mode", lambda: False)
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", unreachable)
    code, line = error_of(capsys, "generate", "--model", "some/thing", "x")
    assert code == 1 and line.endswith("the Hub did not give it: We couldn't connect to 'https://huggingface.co'")


def test_a_path_is_said_once(capsys, folder, tmp_path):
    heads = tmp_path / "heads"
    MTPHeads(MTPHeadConfig(window=2, hidden_size=8, vocab_size=320)).save_pretrained(heads)
    stored = load_file(heads / "model.safetensors")
    lost = min(stored)
    save_file({key: each for key, each in stored.items() if key != lost}, heads / "model.safetensors")
    code, captured = run("generate", "--model", folder, "--heads", heads, "x"), capsys.readouterr()
    assert code == 1 and f"--heads {heads}: the checkpoint lacks 1 tensors of MTPHeads: ['{lost}']\n" in captured.err


def test_a_model_that_is_damaged(capsys, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    weights.write_bytes((folder / weights.name).read_bytes()[:-100])
    code, line = error_of(capsys, "generate", "--model", tmp_path, "x")
    assert code == 1 and "cannot be loaded" in line
    shutil.copy(folder / weights.name, weights)
    config.write_text(config.read_text().replace('"chunk_size": 4', '"chunk_size": 5'))
    code, line = error_of(capsys, "generate", "--model", tmp_path, "x")
    reason = "window_size=32 must be a multiple of chunk_size=5"
    assert code == 1 and line.startswith(f"tokenahead generate: {tmp_path}") and reason in line


def test_ctrl_c_ends_without_a_traceback(capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_module, "run_demo", interrupted)
    assert run("demo") == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("identical", "code"), [(True, 0), (False, 1)])
def test_the_demo_gets_its_arguments_and_fails_where_outputs_differ(monkeypatch, tmp_path, identical, code):
    seen = {}

    def run_demo(measurement, subject, output):
        assert [method.name for method in subject.methods[:3]] == ["plain", "ff", "hmm 8"]
        seen.update(measurement=measurement, output=output)
        counts = dict(do_sample=False, backbone_calls=1, new_tokens=1, seconds=1.0, plain_seconds=1.0)
        rows = [DecodingResult(name="greedy", identical=identical, **counts)]
        words = dict.fromkeys(("dataset_name", "dataset_description", "hardware", "dtype", "command"), "x")
        return MeasuredResults(results=rows, library_version="0", **words)

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    options = ("--seconds", "3", "--new-bytes", "9", "--batch-size", "2", "--seed", "5")
    assert run("demo", *options, "--output", tmp_path) == code
    wanted = Measurement(seconds=3.0, new_tokens=9, batch_size=2, seed=5)
    assert seen == {"measurement": wanted, "output": tmp_path}


def test_errors_show_no_escapes(capsys):
    for arguments in (["card", "no\x1b[31m\u202esuch/a/b"], ["demo", "--seconds", "\x1b[31m\u202e"]):
        _, line = error_of(capsys, *arguments)
        assert "\\x1b[31m\\u202e" in line and line.isprintable()


def test_an_address_that_cannot_be_served_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for address in ("127.0.0.1:99999", ":x", f"127.0.0.1:{taken.getsockname()[1]}"):
            code, line = error_of(capsys, "demo", "--web", address)
            assert code == 1 and "--web" in line


def test_a_program_that_imports_the_package_cleans_up_after_ctrl_c(tmp_path):
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background inherits none
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'transformers':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "try:\n    import tokenahead\nfinally:\n    print('cleaned up')\n"
    )
    (file := tmp_path / "trains.py").write_text(program)
    paths = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    ended = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False, timeout=200, env=paths)
    assert ended.stdout == "cleaned up\n" and "KeyboardInterrupt" in ended.stderr
