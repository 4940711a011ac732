"""N-gram and assistant drafters on code: greedy output is the backbone's own, sampled output has its distribution."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.backbones import backbone, blurred, code_prompts
from tests.models import left_padded
from tests.no_sync import NoSync
from tokenahead import AssistantDrafter, EvaByteConfig, EvaByteForMTPC
from tokenahead.generation.assistant.session import AssistantSession

NAMES = ["llama", "mistral", "gpt2"]
NEW, DRAFT = 30, 4
NEW_GREEDY = dict(max_new_tokens=NEW, do_sample=False)


@pytest.mark.by_day("gpt2")
@pytest.mark.parametrize("name", NAMES)
def test_no_step_of_a_padded_batch_waits_for_the_device(name, monkeypatch):
    """transformers looks at the mask of a single token; from the second drafted token on there is none to look at."""
    model, asked = backbone(name), []
    drafter = AssistantDrafter(blurred(model, 0.3), num_tokens=DRAFT).attach(model)
    propose = AssistantSession.propose

    def watched(self, tokens, length):
        asked.append(length)
        with NoSync():
            return propose(self, tokens, length)

    monkeypatch.setattr(AssistantSession, "propose", watched)
    options = dict(max_new_tokens=NEW, do_sample=False, assistant_model=drafter)
    out = model.generate(**left_padded(code_prompts(3)), **options)
    drafter.detach()
    assert max(asked) == DRAFT and torch.equal(out, model.generate(**left_padded(code_prompts(3)), **NEW_GREEDY))


@pytest.mark.by_day("0.9")
@pytest.mark.parametrize("threshold", [0.0, 0.9])
def test_an_assistant_drafts_for_a_byte_model_with_a_cache_of_its_own(threshold):
    """Its cache has a length per row and no columns, with padded rows and without; unsure drafts end early."""
    torch.manual_seed(0)
    shape = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    small = LlamaForCausalLM(LlamaConfig(**shape, eos_token_id=None, pad_token_id=0)).eval()
    model = EvaByteForMTPC(EvaByteConfig(**shape, window_size=16, chunk_size=4, num_pred_heads=4)).eval()
    drafter, ids = AssistantDrafter(small, 3).attach(model), torch.randint(3, 64, (2, 9))
    padded = torch.ones_like(ids)
    padded[0, :4] = 0
    common = dict(max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    for inputs in (dict(input_ids=ids[:1]), dict(input_ids=ids, attention_mask=padded)):
        out = model.generate(
            **inputs, **common, assistant_model=drafter, assistant_confidence_threshold=threshold,
            return_dict_in_generate=True,
        )  # fmt: skip
        assert torch.equal(out.sequences, model.generate(**inputs, **common, use_mtp=False))
        longest = max(len(draft) for row in out.speculation.rows_drafts for draft in row)
        assert longest == (1 if threshold else 3)


def test_an_assistant_with_fewer_positions_drafts_as_far_as_they_go():
    for prompt in [9, 30]:
        model, ids = backbone(), torch.arange(5, 5 + prompt)[None]
        config = GPT2Config(
            vocab_size=model.config.vocab_size, n_positions=24, n_embd=32, n_layer=1, n_head=4, bos_token_id=1,
            eos_token_id=None,
        )  # fmt: skip
        want = model.generate(ids, max_new_tokens=30, do_sample=False)
        drafter = AssistantDrafter(GPT2LMHeadModel(config).eval()).attach(model)
        out = model.generate(
            ids, max_new_tokens=30, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
        )
        assert torch.equal(out.sequences, want)
        assert (out.speculation.rows_drafts[0][0] != []) == (prompt < 24)


def adapted(**options):
    torch.manual_seed(4)
    return get_peft_model(blurred(backbone(), 0.3), LoraConfig(target_modules=["q_proj"], **options))


@pytest.mark.by_day("both")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda: adapted(init_lora_weights=False),
        lambda: torch.compile(blurred(backbone(), 0.3), backend="eager"),
        lambda: torch.compile(adapted(init_lora_weights=False), backend="eager"),
    ],
    ids=["peft", "compiled", "both"],
)
def test_an_assistant_within_wrappers(wrap):
    model, batch, small = backbone(), left_padded(code_prompts(4)), wrap()
    plain = model.generate(**batch, **NEW_GREEDY)
    drafter = AssistantDrafter(small).attach(model)
    for assistant in (drafter, small, drafter.model):
        out = model.generate(**batch, **NEW_GREEDY, assistant_model=assistant, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain) and max(map(max, out.speculation.rows_accepted)) > 0


def test_an_assistant_of_adapters_is_saved_and_loaded(tmp_path):
    model, batch = backbone(), left_padded(code_prompts(4))
    blurred(model, 0.3).save_pretrained(tmp_path / "base")
    small = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(
        target_modules=["q_proj"], init_lora_weights=False
    ))  # fmt: skip
    AssistantDrafter(small).save_pretrained(tmp_path / "adapters")
    assert not (tmp_path / "adapters" / "config.json").exists()
    plain, drafts = model.generate(**batch, **NEW_GREEDY), []
    loaded = AssistantDrafter.from_pretrained(tmp_path / "adapters")
    loaded.save_pretrained(tmp_path / "again")
    for drafter in (AssistantDrafter(small), loaded, AssistantDrafter.from_pretrained(tmp_path / "again")):
        drafter.attach(model)
        out = model.generate(**batch, **NEW_GREEDY, assistant_model=drafter, return_dict_in_generate=True)
        assert torch.equal(out.sequences, plain)
        drafts.append(out.speculation.rows_drafts)
    assert drafts[0] == drafts[1] == drafts[2]
