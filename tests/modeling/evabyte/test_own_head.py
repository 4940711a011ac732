"""The own head is a separate module: what asks for output embeddings sees a plain model, and files stay official."""

import copy

import peft
import pytest
import torch
from accelerate import (
    Accelerator,
    dispatch_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from datasets import Dataset
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from tests.models import TRAINED, tiny_model
from tokenahead import EvaByteForMTPC, EvaByteModel, EvaByteTokenizer

IDS = torch.randint(64, 320, (1, 12), generator=torch.Generator().manual_seed(0))


def files(folder) -> dict[str, torch.Tensor]:
    """All tensors of a directory."""
    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}


def heads_of(model: EvaByteForMTPC) -> torch.Tensor:
    return torch.cat([head.weight for head in (model.lm_head, model.draft_heads) if head is not None])


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "40KB"}], ids=["whole", "sharded"])
def test_official_files_are_split_on_loading_and_joined_on_saving(options, tmp_path):
    model = EvaByteForMTPC.from_pretrained(TRAINED)
    assert isinstance(model.lm_head, torch.nn.Linear) and model.lm_head.weight.shape == (320, 64)
    model.save_pretrained(tmp_path, **options)
    official, saved = files(TRAINED), files(tmp_path)
    assert official.keys() == saved.keys() and all(torch.equal(saved[name], official[name]) for name in official)
    again, backbone = EvaByteForMTPC.from_pretrained(tmp_path), EvaByteModel.from_pretrained(tmp_path)
    assert torch.equal(heads_of(again), official["lm_head.weight"])
    assert torch.equal(backbone.embed_tokens.weight, again.model.embed_tokens.weight)


@pytest.mark.parametrize("num_pred_heads", [1, 3])
def test_models_from_scratch_are_joined_too(num_pred_heads, tmp_path):
    model = tiny_model(num_pred_heads=num_pred_heads)
    model.save_pretrained(tmp_path)
    assert files(tmp_path)["lm_head.weight"].shape == (num_pred_heads * 320, 32)
    assert torch.equal(heads_of(EvaByteForMTPC.from_pretrained(tmp_path)), heads_of(model))


@pytest.mark.nightly
@pytest.mark.parametrize("places", [{"model": "cpu", "lm_head": "cpu", "draft_heads": "disk"}, {"": "disk"}])
def test_offloaded_heads(places, tmp_path):
    model = EvaByteForMTPC.from_pretrained(TRAINED, device_map=places, offload_folder=tmp_path / "offload")
    plain = EvaByteForMTPC.from_pretrained(TRAINED)
    options = {"max_new_tokens": 20, "do_sample": False}
    assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(files(tmp_path / "saved")["lm_head.weight"], heads_of(plain))


def test_an_official_state_dict_is_taken_whole():
    """`Trainer` reads a checkpoint's file into the model itself."""
    model, other = tiny_model(0), tiny_model(1)
    state = {name: value for name, value in other.state_dict().items() if name != "draft_heads.weight"}
    result = model.load_state_dict(state | {"lm_head.weight": heads_of(other)})
    assert not result.missing_keys and torch.equal(heads_of(model), heads_of(other))


def test_the_mapping_goes_back_to_every_official_name():
    """Whether a model was loaded or made; transformers asks for it when it saves."""
    official = files(TRAINED)
    loaded = EvaByteForMTPC.from_pretrained(TRAINED)
    made = EvaByteForMTPC(loaded.config)
    made.load_state_dict(loaded.state_dict())
    for model in (loaded, made):
        state = revert_weight_conversion(model, model.state_dict())
        assert state.keys() == official.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in official.items())


@pytest.mark.nightly
def test_how_accelerate_places_an_official_directory(tmp_path):
    """With a map it sets tensors by their names in the file, where one has all heads; without one, by a state dict."""
    plain = EvaByteForMTPC.from_pretrained(TRAINED)
    with pytest.raises(ValueError, match="shape"):
        load_checkpoint_and_dispatch(EvaByteForMTPC(plain.config), TRAINED, device_map={"": "cpu"})
    read = EvaByteForMTPC(plain.config)
    load_checkpoint_in_model(read, TRAINED)
    Accelerator(cpu=True).save_model(plain, tmp_path)
    with init_empty_weights():
        empty = EvaByteForMTPC(plain.config)
    own = load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"})
    placed = EvaByteForMTPC.from_pretrained(TRAINED, device_map={"": "cpu"})
    with torch.no_grad():
        for model in (dispatch_model(read, {"": "cpu"}), own, placed):
            assert torch.equal(model.eval()(IDS).logits, plain(IDS).logits)


@torch.no_grad()
def test_output_embeddings_are_those_of_the_next_token():
    model = tiny_model()
    states = model.model(IDS).last_hidden_state
    logits = model.get_output_embeddings()(states)
    torch.testing.assert_close(logits, model(IDS).logits)
    torch.testing.assert_close(logits, model(IDS, return_all_pred_logits=True).logits[..., 0, :])
    new = torch.nn.Linear(32, 320, bias=False)
    model.set_output_embeddings(new)
    torch.testing.assert_close(model(IDS).logits, new(states))
    torch.testing.assert_close(model.window_distribution(states).leaf_logits[..., 0, 0, :], new(states))


@pytest.mark.parametrize("num_pred_heads", [1, 4])
def test_embeddings_can_be_tied(num_pred_heads, tmp_path):
    model = tiny_model(num_pred_heads=num_pred_heads, tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = EvaByteForMTPC.from_pretrained(tmp_path).eval()
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(heads_of(again), heads_of(model))
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(IDS, **options), model.generate(IDS, use_mtp=False, **options))


def test_a_single_head_has_no_draft_heads_and_can_get_some():
    model = tiny_model(num_pred_heads=1)
    assert model.draft_heads is None and model.head is model.lm_head
    assert not list(getattr(model, model.silent_part).parameters())  # a trainer of others does not warn
    model.train_only("drafter")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    own, loss = model.lm_head.weight.detach().clone(), model(IDS, labels=IDS).loss
    assert loss == pytest.approx(next_byte_loss(model, IDS), abs=1e-5)
    model.set_head(window=4)
    assert model.config.num_pred_heads == 4 and torch.equal(model.lm_head.weight, own)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["draft_heads.weight"]
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_mtp=False, **options))


def test_adapters_of_the_own_head(tmp_path):
    config = peft.LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), config)
    expected = model(IDS).logits
    assert not torch.allclose(expected, tiny_model()(IDS).logits)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(tiny_model(), tmp_path)
    torch.testing.assert_close(again(IDS).logits, expected)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(EvaByteForMTPC.from_pretrained(tmp_path / "merged")(IDS).logits, expected)


def arguments(folder, **options):
    return dict(
        output_dir=str(folder), use_cpu=True, bf16=False, report_to="none", save_strategy="no", max_steps=1,
        logging_steps=1, gradient_checkpointing=False, disable_tqdm=True, **options,
    )  # fmt: skip


@torch.no_grad()
def next_byte_loss(model: EvaByteForMTPC, ids: torch.Tensor) -> float:
    logits = model(ids).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()


def test_the_first_loss_of_sft_is_that_of_the_next_byte(tmp_path):
    model, tokenizer = tiny_model(), EvaByteTokenizer()
    expected = next_byte_loss(model, tokenizer("hello world", return_tensors="pt")["input_ids"])
    data = Dataset.from_dict({"text": ["hello world"] * 4})
    drafts = model.draft_heads.weight.detach().clone()
    config = SFTConfig(**arguments(tmp_path, per_device_train_batch_size=4, eos_token="<eos>"))
    data = data.map(lambda row: {"input_ids": tokenizer(row["text"])["input_ids"]}, remove_columns=["text"])
    trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-4)
    assert torch.equal(model.draft_heads.weight, drafts)


@pytest.mark.nightly
def test_grpo_scores_what_the_model_says(tmp_path):
    model = tiny_model()
    config = GRPOConfig(
        **arguments(tmp_path, per_device_train_batch_size=2, num_generations=2, max_completion_length=4, beta=0.0)
    )
    data = Dataset.from_dict({"prompt": ["say: "] * 2})

    def reward(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    trainer = GRPOTrainer(model, reward, config, train_dataset=data, processing_class=EvaByteTokenizer())
    with torch.no_grad():
        log_probs = model(IDS).logits.log_softmax(-1)[:, -5:-1].gather(-1, IDS[:, -4:, None])[..., 0]
        found = trainer._get_per_token_logps_and_entropies(trainer.model, IDS, torch.ones_like(IDS), 4)[0]
    torch.testing.assert_close(found, log_probs, atol=1e-4, rtol=0)
    before = copy.deepcopy(model.state_dict())
    trainer.train()
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])
    assert torch.equal(model.draft_heads.weight, before["draft_heads.weight"])
