"""`tokenahead train`: every drafter from a YAML file to a directory that loads again, with the facts of the run."""

import ast
import json
from collections import Counter

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, TrainerCallback

from tests.training.commands.conftest import LINES
from tests.training.test_states import serving
from tokenahead import DeepSeekMTP, EagleHead, EvaByteTokenizer, MTPHeads, cli
from tokenahead.modeling.common.draft_vocabulary import frequent_tokens
from tokenahead.modeling.heads.joint import JointMTPModel
from tokenahead.training.commands.settings import read_settings
from tokenahead.training.commands.train import METRICS, build, given, train
from tokenahead.training.features import FeatureDataset
from tokenahead.training.parts import part_files
from tokenahead.training.regeneration import RegeneratedText

ACCEPTANCE = {"prompts": 1, "prompt_tokens": 8, "new_tokens": 8, "rows": 4}
RUNS = {
    "evabyte": dict(model="evabyte", drafter_options={"head_type": "btree", "rank": 2}),
    "heads": dict(drafter="heads", drafter_options={"head_type": "hydra", "window": 3}),
    "modules of its own": dict(model="modules", loss_options={"weight": 0.5}),
    "new modules": dict(drafter="modules", drafter_options={"num_modules": 1}),
    "parallel": dict(drafter="parallel", drafter_options={"num_slots": 3}, loss_options={"completions": 4}),
    "masks": dict(
        drafter="parallel",
        drafter_options={"variant": "mask", "num_slots": 3},
        max_steps=24,
        logging_steps=6,
        eval_steps=12,
    ),
    "parallel of its own": dict(model="ptp"),
    "eagle": dict(drafter="eagle", loss_options={"steps": 2}),
    "heads and backbone": dict(
        drafter="heads", drafter_options={"window": 3}, strategy={"train": "lora", "head_warmup": 1, "loss_weight": 0.2}
    ),
    "heads, packed": dict(drafter="heads", drafter_options={"window": 3}, packing=True),
    "heads, streamed": dict(drafter="heads", dataset_streaming=True, test_split_size=None, eval_strategy="no"),
}


@pytest.mark.by_day("evabyte", "heads and backbone", "new modules", "parallel", "eagle")
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_drafter_learns_and_its_folder_loads_again(run, settings_of, tmp_path):
    settings = settings_of(**({"eval_strategy": "steps", "eval_steps": 2, "acceptance": ACCEPTANCE} | run))
    trainer = train(settings)
    folder = tmp_path / "run"
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4 and min(losses) < losses[0]
    model = trainer.accelerator.unwrap_model(trainer.model)
    model = model.heads if isinstance(model, JointMTPModel) else model
    loaded = {MTPHeads: AutoModel, DeepSeekMTP: DeepSeekMTP, EagleHead: AutoModel}
    again = loaded.get(type(model), AutoModelForCausalLM).from_pretrained(folder)
    assert type(again) is type(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    facts = json.loads((folder / "run.json").read_text())
    assert facts["model"]["class"] == type(model).__name__ and facts["seeds"]["seed"] == 42
    assert facts["versions"]["torch"] == torch.__version__ and "--" not in facts["versions"]
    entries = json.loads((folder / "metrics.json").read_text())
    if settings.training.eval_strategy != "no":
        held_out = [entry for entry in entries if "eval_loss" in entry]
        accepted, per_call = (held_out[0][f"eval_generated_{name}"] for name in ("accepted", "tokens_per_call"))
        assert len(held_out) == 2 and accepted <= 7 and abs(per_call - 1 - accepted) < 1
        wanted = "eval_num_correct" if "PTP" in type(model).__name__ else "eval_expected_accepted"
        assert all(wanted in entry for entry in held_out)


def test_the_command_reads_a_file_and_flags(settings_of, tmp_path, capsys):
    settings_of(drafter="heads")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", str(tmp_path / "config.yaml"), "--max_steps", "2", "--drafter_options", '{"window": 12}'])
    assert ended.value.code == 0
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["model"]["window"] == 12
    shown = capsys.readouterr()
    assert "2/2" in shown.err and "'loss'" in shown.out
    printed = [ast.literal_eval(line) for line in shown.out.splitlines() if line.startswith("{")]
    history = json.loads((tmp_path / "run" / METRICS).read_text())
    assert max(map(len, printed)) == 12 and printed[0].keys() < history[0].keys() and "epoch" in printed[0]


@pytest.mark.by_day("True")
@pytest.mark.parametrize("packing", [False, True])
def test_long_rows_are_left_out_where_that_is_asked_for(packing, settings_of, data, tmp_path):
    texts = [json.loads(line)["text"] for line in data["text"].read_text().splitlines()]
    short = [text for text in texts if len(EvaByteTokenizer()(text).input_ids) < 64]  # the end of a row is a token, too
    assert 0 < len(short) < len(texts)
    options = dict(drafter="heads", drop_longer=True)
    trainer = train(settings_of(**options, packing=packing, test_split_size=None, eval_strategy="no"))
    joined = " ".join(EvaByteTokenizer().decode(row["input_ids"]) for row in trainer.train_dataset)
    assert all(joined.count(text) == texts.count(text) * (text in short) for text in set(texts))
    with pytest.raises(ValueError, match="drop_longer=True.*max_length=4"):
        train(settings_of(**options, max_length=4, output_dir=str(tmp_path / "short")))


@pytest.mark.by_day("{'packing': True}")
@pytest.mark.parametrize(
    "changes", [{}, {"packing": True}, {"drafter": "eagle"}, {"drafter": "block"}, {"dataset_name": "chat"}], ids=str
)
def test_kept_features_teach_the_same(changes, settings_of, data, tmp_path):
    changes = {"drafter": "heads", "eval_strategy": "steps", "eval_steps": 4} | changes
    if changes.get("dataset_name") == "chat":
        changes |= {"dataset_name": str(data["chat"]), "assistant_only_loss": True}
    kept, losses = str(tmp_path / "features"), []
    for run, features in (("plain", None), ("kept", kept), ("again", kept)):
        log = train(settings_of(**changes, features=features, output_dir=str(tmp_path / run))).state.log_history
        losses.append([entry[name] for entry in log for name in ("loss", "eval_loss") if name in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[1] == losses[2]
    assert len(losses[0]) == 5 and len(part_files(tmp_path / "features")) == 1


def test_states_of_a_server_are_stored_and_learned_from(tmp_path, settings_of):
    """By a stand-in of vLLM."""
    options = dict(drafter="heads", drafter_options={"window": 2}, max_steps=1, eval_strategy="no")
    settings = settings_of(**options, features=str(tmp_path / "states"))
    drafter = MTPHeads.from_backbone(build(settings).backbone, window=2)
    with serving(drafter, tmp_path / "files") as endpoint:
        settings.drafter.features_engine = {"url": endpoint.url, "folder": str(tmp_path / "files")}
        train(settings)
    assert len(FeatureDataset(tmp_path / "states")) and not list((tmp_path / "files").glob("*.safetensors"))


@pytest.mark.by_day("chat-heads")
@pytest.mark.parametrize("kind, drafter", [("text", "heads"), ("chat", "heads"), ("text", "parallel")])
def test_text_of_the_backbone_is_written_once_and_learned(kind, drafter, settings_of, data, tmp_path):
    asked = {"folder": str(tmp_path / "own"), "prompt_tokens": 6, "max_new_tokens": 9, "do_sample": True}
    settings = settings_of(drafter=drafter, dataset_name=str(data[kind]), regenerate=asked)
    first = train(settings)
    rows = RegeneratedText(tmp_path / "own").rows
    assert len(rows) == (len(LINES) * 6 if kind == "text" else 12)
    assert {row["prompt"] for row in rows} == {6} if kind == "text" else max(row["prompt"] for row in rows) > 6
    assert first.train_dataset[0]["labels"].count(-100) == rows[0]["prompt"]
    again = train(settings)
    assert RegeneratedText(tmp_path / "own").rows == rows
    assert [entry.get("loss") for entry in again.state.log_history] == [
        entry.get("loss") for entry in first.state.log_history
    ]


@pytest.mark.by_day("heads-None")
@pytest.mark.parametrize(
    "drafter, options",
    [(name, None) for name in ("heads", "eagle", "block", "modules")]
    + [("own", {"head_type": "btree", "rank": 2, "draft_layers": 1})],
)
def test_what_learns_beside_a_backbone_in_bfloat16_has_float32_weights(drafter, options, settings_of, tmp_path):
    settings = settings_of(
        "evabyte" if drafter == "own" else "llama", drafter=drafter, drafter_options=options, dtype="bfloat16",
        save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, acceptance=ACCEPTANCE,
    )  # fmt: skip
    kinds = set()

    class Kinds(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            kinds.update(each.dtype for each in model.parameters() if each.requires_grad)

    train(settings, [Kinds()])
    settings.training.max_steps, settings.training.resume_from_checkpoint = 5, True
    resumed = train(settings, [Kinds()])
    assert kinds == {torch.float32} and resumed.state.global_step == 5
    (file,) = (tmp_path / "run").glob("*.safetensors")
    assert {each.dtype for each in load_file(file).values() if each.is_floating_point()} == {torch.bfloat16}


def test_adapters_beside_a_backbone_in_bfloat16_stay_in_float32(settings_of, tmp_path):
    adapters = {"use_peft": True, "lora_target_modules": "all-linear", "lora_r": 2}
    train(settings_of(drafter="own", dtype="bfloat16", model="evabyte", **adapters))
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert {each.dtype for name, each in saved.items() if "lora_" in name} == {torch.float32}


@pytest.mark.by_day("features")
@pytest.mark.parametrize("command", ["regenerate", "features"])
def test_what_a_training_reads_is_prepared_alone(command, settings_of, tmp_path, capsys):
    settings_of(drafter="heads")
    with pytest.raises(SystemExit) as end:
        cli.main([command, str(tmp_path / "config.yaml")])
    assert end.value.code == 1 and f"tokenahead {command}: {command} is missing" in capsys.readouterr().err
    asked = {"folder": str(tmp_path / "own"), "max_new_tokens": 4}
    states = str(tmp_path / "states")
    settings = settings_of(drafter="heads", max_steps=1, regenerate=asked, features=states, eval_strategy="steps")
    with pytest.raises(SystemExit) as end:
        cli.main([command, str(tmp_path / "config.yaml"), "--disable_tqdm"])
    assert not end.value.code and not [*settings.output.glob("*")]
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("rows-*.safetensors")}
    assert {path.parent.name for path in kept} == {"own"} | ({"states"} if command == "features" else set())
    train(settings)
    assert kept == {path: path.stat().st_mtime_ns for path in kept}


def test_a_chat_is_learned_where_the_assistant_speaks(settings_of, data):
    trainer = train(settings_of(drafter="heads", dataset_name=str(data["chat"]), assistant_only_loss=True))
    batch = next(iter(trainer.get_train_dataloader()))
    learned = batch["input_ids"][0][batch["labels"][0] != -100]
    assert trainer.processing_class.decode(learned) == "hello<|eot_id|>"


def test_a_run_folder_tells_no_token_and_no_key_of_a_server_and_can_be_run_again(settings_of, tmp_path):
    engine = {"url": "http://host/v1", "api_key": "my_secret"}
    flags = "--hub_token", "my_secret", "--max_steps=1", f"--features_engine={json.dumps(engine | {'folder': 'files'})}"
    settings = settings_of(
        drafter="heads", features="states", regenerate={"folder": "answers", "engine": engine}, flags=flags,
        datasets=[{"path": "text", "data_files": [{"token": "my_secret"}]}], dataset_name=None, max_steps=3,
    )  # fmt: skip
    values = yaml.safe_dump(given(settings))
    assert "my_secret" not in values
    assert settings.drafter.regenerate["engine"]["api_key"] == "my_secret"
    (tmp_path / "again.yaml").write_text(values)
    again = read_settings([str(tmp_path / "again.yaml")])
    assert (again.training.max_steps, again.training.learning_rate) == (1, 1e-2)
    assert again.names == settings.names - {"hub_token"}
    assert again.drafter.regenerate == {"folder": "answers", "engine": {"url": "http://host/v1"}}


@pytest.mark.by_day("heads")
@pytest.mark.parametrize("drafter", ["heads", "eagle", "modules"])
def test_a_file_names_the_tokens_to_draft(drafter, settings_of, tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps([101, 32, 110]))
    name = "draft_vocabulary" if drafter == "modules" else "draft_ids"
    model = train(settings_of(drafter=drafter, drafter_options={name: str(tmp_path / "ids.json")}, max_steps=2)).model
    for each in (model, type(model).from_pretrained(tmp_path / "run")):
        assert each.draft_vocabulary.ids.tolist() == [32, 101, 110]


@pytest.mark.by_day("options0")
@pytest.mark.parametrize("options", [{}, {"features": "states"}, {"drafter": "eagle"}])
def test_a_size_alone_drafts_the_commonest_tokens_of_the_data(options, settings_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    always = frequent_tokens([], 84, EvaByteTokenizer()).tolist()  # special tokens, digits and white space
    run = {"drafter": "heads", "drafter_options": {"draft_vocab_size": 90}} | options
    run |= {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = train(settings_of(**run))
    counts = Counter(int(token) for row in trainer.train_dataset for token in dict(row)["input_ids"])
    said = [token for token, _ in counts.most_common() if token not in always]
    for model in (trainer.model, type(trainer.model).from_pretrained(tmp_path / "run")):
        assert set(model.draft_vocabulary.ids.tolist()) == {*always, *said[:6]}
    again = train(settings_of(**run | dict(max_steps=4, resume_from_checkpoint="true"))).model
    assert torch.equal(again.draft_vocabulary.ids, trainer.model.draft_vocabulary.ids)


def test_a_size_alone_is_refused_where_no_text_tells_the_tokens(settings_of):
    streamed = dict(dataset_streaming=True, test_split_size=None, eval_strategy="no")
    with pytest.raises(ValueError, match="draft_vocab_size=90.*draft_ids"):
        train(settings_of(drafter="heads", drafter_options={"draft_vocab_size": 90}, **streamed))
    with pytest.raises(ValueError, match="size=3 must be at least 84"):
        train(settings_of(drafter="heads", drafter_options={"draft_vocab_size": 3}))


def test_a_run_has_a_budget_of_tokens_unless_a_number_of_rows_is_given(settings_of, tmp_path):
    assert settings_of().training.tokens_per_batch == 0  # its file has rows
    settings = settings_of(drafter="heads", per_device_train_batch_size=None, max_steps=1)
    assert settings.training.tokens_per_batch is None
    trainer = train(settings)
    batch = next(iter(trainer.get_train_dataloader()))
    assert "attention_mask" not in batch and batch["input_ids"].shape[0] == 1
    rows = ("--per_device_train_batch_size", "8")
    assert settings_of(per_device_train_batch_size=None, flags=rows).training.tokens_per_batch == 0
    assert settings_of(per_device_train_batch_size=None, tokens_per_batch=512).training.tokens_per_batch == 512
    with pytest.raises(ValueError, match="tokens_per_batch=16.*row"):
        changes = dict(drafter="heads", per_device_train_batch_size=None, tokens_per_batch=16)
        train(settings_of(output_dir=str(tmp_path / "other"), **changes))
