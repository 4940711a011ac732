"""What the tests of training share: rows of ids, a trainer on one thread."""

import pytest
import torch
from transformers import TrainingArguments

from tests.models import tiny_model
from tokenahead import EvaByteConfig
from tokenahead.training import MTPTrainer


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def micro_config(**changes) -> EvaByteConfig:
    """EvaByte of one narrow layer with 4 heads, for runs of seconds."""
    options = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        window_size=32,
        chunk_size=4,
        num_pred_heads=4,
        max_position_embeddings=1024,
        norm_add_unit_offset=True,
        pad_token_id=0,
    )
    return EvaByteConfig(**(options | changes))


def small_model(seed: int = 0, **changes):
    """`tests.models.tiny_model` with 4 heads and one layer."""
    return tiny_model(seed, num_pred_heads=4, num_hidden_layers=1, **changes)


def ragged_rows(count: int = 8, length: int = 20, vocab_size: int = 320) -> list[dict[str, torch.Tensor]]:
    """Rows whose prompts are not scored and whose ends are padding, all of different lengths."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for row in range(count):
        ids = torch.randint(5, vocab_size, (length,), generator=generator)
        real = torch.arange(length) < length - row
        scored = real & (torch.arange(length) >= 2 * row)
        rows.append({"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~scored, -100)})
    return rows


def trainer_for(model, folder, rows, trainer_class=MTPTrainer, strategy=None, **options) -> MTPTrainer:
    """A quiet trainer that saves nothing and logs every step, unless told otherwise."""
    defaults = dict(
        output_dir=str(folder),
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_steps=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=3,
        dataloader_pin_memory=False,
    )
    arguments = TrainingArguments(**(defaults | options))
    given = {} if strategy is None else {"strategy": strategy}
    return trainer_class(model, arguments, train_dataset=rows, eval_dataset=rows, **given)
