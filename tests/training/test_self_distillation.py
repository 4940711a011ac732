"""FastMTP's recipe from end to end: the model's own answers, one module unrolled, a vocabulary of what it said."""

import torch
from torch.nn import functional
from transformers import Trainer, TrainingArguments

from tests.families import family_model
from tokenahead import DeepSeekMTP
from tokenahead.modeling.common.draft_vocabulary import frequent_tokens
from tokenahead.training import regenerate

GREEDY = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0}


def padded(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    return {
        name: torch.stack([functional.pad(row[name], (0, longest - len(row[name])), value=value) for row in rows])
        for name, value in (("input_ids", 0), ("labels", -100))
    }


def test_a_module_learns_what_its_model_says(tmp_path):
    model = family_model("llama", seed=3)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    prompts = [torch.randint(1, 96, (4 + n % 3,), generator=torch.Generator().manual_seed(n)) for n in range(8)]
    text = regenerate(model, prompts, tmp_path / "answers", max_new_tokens=24, batch_size=4, do_sample=False)
    plain = model.generate(prompts[0][None], use_mtp=False, **GREEDY)
    assert text[0]["input_ids"].tolist() == plain[0].tolist() and (text[0]["labels"][:4] == -100).all()
    options = GREEDY | {"num_assistant_tokens": 3, "return_dict_in_generate": True}
    before = model.generate(prompts[0][None], **options).speculation.tokens_per_call
    model.train_only("drafter")
    model.loss_options.unroll_steps, model.loss_options.decay = 3, 0.8
    arguments = TrainingArguments(
        str(tmp_path / "out"), max_steps=60, per_device_train_batch_size=4, learning_rate=1e-2, report_to="none",
        use_cpu=True, save_strategy="no",
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=text, data_collator=padded).train()
    model.eval()
    said = frequent_tokens((row["input_ids"].tolist() for row in text), 40)
    model.set_draft_vocabulary(said)
    model.save_pretrained(tmp_path / "tuned")
    out = DeepSeekMTP.from_pretrained(tmp_path / "tuned").generate(prompts[0][None], **options)
    assert torch.equal(out.sequences, plain)
    assert out.speculation.tokens_per_call > before + 0.3 and out.speculation.vocabulary_coverage > 0.5
