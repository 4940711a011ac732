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


def test_one_drafter_is_named_once(capsys):
    code, line = error_of(capsys, "doctor", "--model", "m", "--drafter", "ngram", "--heads", "h")
    assert code == 2 and "--heads: not allowed with argument --drafter (ngram)" in line


@pytest.mark.parametrize("command", ["demo", "generate", "bench", "card"])
def test_the_help_of_a_command_names_each_field_of_its_request(capsys, command):
    run(command, "--help")
    words = capsys.readouterr().out
    for entry in dataclasses.fields(cli._COMMANDS[command][1]):
        name = entry.name.replace("_", "-")
        assert (f"\n  {name} " if entry.metadata.get("positional") else f"\n  --{name}") in words


def test_a_flag_leaves_the_word_after_it_alone():
    assert cli._parse(["card", "--overwrite", "directory"]).model == "directory"


@pytest.mark.by_day(most=6)
@pytest.mark.core_cases("arguments0---seconds: '0' must be a number above 0")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--seconds", "0"], "--seconds: '0' must be a number above 0"),
        (["demo", "--seconds", "nan"], "--seconds: 'nan' must be a number above 0"),
        (["demo", "--seed", str(2**32)], "--seed: '4294967296' must be a whole number from 0"),
        (["generate", "x"], "required: --model"),
        (["generate", "--model", "m", "x", "y"], "unrecognized arguments: y"),
        (["generate", "--model", "m", "--nope"], "unrecognized arguments: --nope"),
        (["generate", "--model", "m", "x", "--heads", "h", "--plain"], "--plain: not allowed with argument --heads"),
        (["generate", "--model", "m", "x", "--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
        (["demo", "x"], "unrecognized arguments: x"),
        (["generate", "--model", "m", "x", "--max-new-tokens", "1.5"], "'1.5' must be a whole number from 1"),
        (
            ["generate", "--model", "m", "x", "--temperature", "-0.1"],
            "'-0.1' must be a number of at least",
        ),
        (["generate", "--model", "m", "x", "--top-p", "0"], "--top-p: '0' must be a number above 0 and at most 1"),
        (["dance"], "'dance'"),
        ([], "{demo,generate,bench,doctor,verify,card,train,regenerate,features,lm-eval}"),
    ],
)
def test_wrong_arguments_are_named_in_one_line(capsys, arguments, named):
    code, line = error_of(capsys, *arguments)
    assert code == 2 and named in line and line.startswith("tokenahead")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_missing_prompt_is_named_where_nobody_pipes_one_in(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    code, line = error_of(capsys, "generate", "--model", "m")
    assert code == 1 and "a prompt is required" in line


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        (["x", "--model", "m"], "x"),
        (["--model", "m", "-abc"], "-abc"),
        (["--model", "m", "- an item"], "- an item"),
        (["--model", "m", "--", "--seed"], "--seed"),
        (["--model", "m", "-"], "-"),
        (["--model", "m"], None),
        (["--model", "m", "--chat", "--json", "yes"], "yes"),
    ],
)
def test_a_prompt_may_begin_with_a_dash(arguments, prompt):
    assert cli._parse(["generate", *arguments]).prompt == prompt


def test_a_missing_folder(capsys, tmp_path):
    code, line = error_of(capsys, "generate", "--model", tmp_path / "nowhere", "x")
    assert code == 1 and line.startswith(f"tokenahead generate: --model {tmp_path / 'nowhere'}: no such")


@pytest.mark.core_cases("--model")
@pytest.mark.parametrize("option", ["--model", "--heads"])
def test_a_name_that_the_hub_cannot_give(capsys, folder, option):
    options = ["--model", folder, "--heads", "some/thing"] if option == "--heads" else ["--model", "some/thing"]
    code, line = error_of(capsys, "generate", *options, "x")  # tests run offline
    assert code == 1 and line.startswith(f"tokenahead generate: {option} some/thing: no such")
    assert line.endswith("HF_HUB_OFFLINE is set, and the cache does not hold it")


def test_a_directory_of_heads_that_is_not_there(capsys, folder, command=("doctor",)):
    code, line = error_of(capsys, *command, "--model", folder, "--heads", "./nowhere")
    assert code == 1 and line.startswith(f"tokenahead {command[0]}: --heads ./nowhere: no such directory")


def test_a_hub_that_does_not_answer_is_named(capsys, monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to 'https://huggingface.co'")

    monkeypatch.setattr(loading, "is_offline_mode", lambda: False)
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", unreachable)
    code, line = error_of(capsys, "generate", "--model", "some/thing", "x")
    assert code == 1 and line.endswith("the Hub did not give it: We couldn't connect to 'https://huggingface.co'")


def test_heads_that_are_none(capsys, folder):
    code, line = error_of(capsys, "generate", "--model", folder, "--heads", folder, "x")
    assert code == 1 and "holds 'evabyte'" in line


def test_a_path_is_said_once(capsys, folder, tmp_path):
    heads = tmp_path / "heads"
    MTPHeads(MTPHeadConfig(window=2, hidden_size=8, vocab_size=320)).save_pretrained(heads)
    stored = load_file(heads / "model.safetensors")
    lost = min(stored)
    save_file({key: each for key, each in stored.items() if key != lost}, heads / "model.safetensors")
    code, captured = run("generate", "--model", folder, "--heads", heads, "x"), capsys.readouterr()
    assert code == 1 and f"--heads {heads}: the checkpoint lacks 1 tensors of MTPHeads: ['{lost}']\n" in captured.err


def test_weights_that_are_cut_short(capsys, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, line = error_of(capsys, "generate", "--model", tmp_path, "x")
    assert code == 1 and "cannot be loaded" in line


def test_a_config_that_contradicts_itself(capsys, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "config.json"
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


def measured(identical: bool) -> MeasuredResults:
    row = DecodingResult(
        name="greedy",
        do_sample=False,
        backbone_calls=1,
        new_tokens=1,
        seconds=1.0,
        plain_seconds=1.0,
        identical=identical,
    )
    words = dict.fromkeys(("dataset_name", "dataset_description", "hardware", "dtype", "command"), "x")
    return MeasuredResults(results=[row], library_version="0", **words)


@pytest.mark.parametrize(("identical", "code"), [(True, 0), (False, 1)])
def test_the_demo_gets_its_arguments_and_fails_where_outputs_differ(monkeypatch, tmp_path, identical, code):
    seen = {}

    def run_demo(measurement, subject, output):
        assert [method.name for method in subject.methods[:3]] == ["plain", "ff", "hmm 8"]
        seen.update(measurement=measurement, output=output)
        return measured(identical)

    monkeypatch.setattr(demo_module, "run_demo", run_demo)
    options = ("--seconds", "3", "--new-bytes", "9", "--batch-size", "2", "--seed", "5")
    assert run("demo", *options, "--output", tmp_path) == code
    wanted = Measurement(seconds=3.0, new_tokens=9, batch_size=2, seed=5)
    assert seen == {"measurement": wanted, "output": tmp_path}


def test_errors_show_no_escapes(capsys):
    for arguments in (["card", "no\x1b[31m\u202esuch/a/b"], ["demo", "--seconds", "\x1b[31m\u202e"]):
        _, line = error_of(capsys, *arguments)
        assert "\\x1b[31m\\u202e" in line and line.isprintable()


@pytest.mark.parametrize("address", ["127.0.0.1:99999", ":x"])
def test_a_bad_address_is_one_line(capsys, address):
    code, line = error_of(capsys, "demo", "--web", address)
    assert code == 1 and "--web" in line


def test_a_port_in_use_is_one_line(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, line = error_of(capsys, "demo", "--web", f"127.0.0.1:{taken.getsockname()[1]}")
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
    (tmp_path / "tokenahead_trains").mkdir()
    (tmp_path / "tokenahead_trains" / "__main__.py").write_text(program)
    paths = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[1]}"}
    words = [sys.executable, "-m", "tokenahead_trains"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=200, env={**os.environ, **paths})
    assert ended.stdout == "cleaned up\n" and "KeyboardInterrupt" in ended.stderr
