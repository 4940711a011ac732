"""Losses and gradients against plain definitions: every drafter and objective, however an update is cut."""

import datetime

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.training.plain_losses import DRAFTERS, OBJECTIVES, check, exact_norms, gradients
from tokenahead.modeling.common import chunks
from tokenahead.modeling.eagle import losses as eagle_losses
from tokenahead.training.batches import Collator, JoinedCollator

joined = JoinedCollator(Collator())
LENGTHS = (9, 4, 12, 6)
ALL = ("cp", "half of hydra", "eagle 3", "half of hass", "modules")
SOME = ("labels", "kl and labels", "lk", "block by calls")
CASES = [
    (drafter, objective)
    for drafter in DRAFTERS
    for objective in OBJECTIVES
    if drafter in ALL or objective in SOME
    if objective != "labels" or not {"eagle", "hass"} & {*drafter.split()}
    if "block" not in objective or drafter != "eagle 1"
]
BY_DAY = [f"{drafter}-{objective}" for drafter, objective in [*CASES[::3], ("cp", "tv"), ("modules", "cross_entropy")]]
"""Every drafter, and every objective."""


def rows(vocab_size: int = 24) -> list[dict[str, torch.Tensor]]:
    """Documents whose beginnings, a third of each, are left out of the loss."""
    draws, made = torch.Generator().manual_seed(0), []
    for length in LENGTHS:
        ids = torch.randint(vocab_size, (length,), generator=draws)
        made.append({"input_ids": ids, "labels": ids.masked_fill(torch.arange(length) < length // 3, -100)})
    return made


def left_padded(data: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch; padding on the right is compared with joined rows elsewhere."""
    width = max(len(row["input_ids"]) for row in data)
    rows = [row | {"attention_mask": torch.ones_like(row["labels"])} for row in data]
    fills = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    batch = {
        name: torch.stack([nn.functional.pad(row[name], (width - len(row[name]), 0), value=fill) for row in rows])
        for name, fill in fills.items()
    }
    return batch | {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)}


def drafter_of(name: str, objective: str, dtype: torch.dtype) -> nn.Module:
    """A drafter away from its start, where some gradients are 0."""
    torch.manual_seed(0)
    model = DRAFTERS[name].make(OBJECTIVES[objective]).to(dtype).train()
    if getattr(model, "is_apart", False):
        model.backbone.to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


def expected(model: nn.Module, name: str, objective: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The plain loss of all rows, and its gradients."""
    model.zero_grad()
    loss = DRAFTERS[name].loss(model, rows(), OBJECTIVES[objective])
    loss.backward()
    return loss.detach(), gradients(model)


def bound_of(name: str) -> float:
    """Relative error in float64; EvaByte's norm computes in float32 anyway."""
    return 2e-6 if name == "evabyte" else 1e-12


def exact_and_cut(patch: pytest.MonkeyPatch) -> None:
    """Exact norms; several chunks and blocks."""
    exact_norms(patch)
    patch.setattr(chunks, "LOGITS_PER_CHUNK", 7 * 2 * 3 * 24)
    patch.setattr(eagle_losses, "LOGITS_PER_CHUNK", 7 * 24)
    patch.setattr(eagle_losses, "BLOCK", 5)


@pytest.fixture(autouse=True)
def _exact_and_cut(monkeypatch):
    exact_and_cut(monkeypatch)


@pytest.mark.by_day(*BY_DAY)
@pytest.mark.parametrize("name, objective", CASES)
def test_losses_and_gradients_are_those_of_the_definition(name, objective):
    compare(name, objective, torch.float64, bound_of(name))


@pytest.mark.by_day("ff-cross_entropy", "half of eagle 3-kl and labels", "modules-cross_entropy")
@pytest.mark.parametrize("objective", ["cross_entropy", "kl and labels"])
@pytest.mark.parametrize("name", ["ff", "layer", "joint", "half of eagle 3", "hass", "modules"])
def test_gradients_are_the_definition_s_in_float32(name, objective):
    compare(name, objective, torch.float32, 2e-6)


def compare(name: str, objective: str, dtype: torch.dtype, bound: float) -> None:
    """Padded or joined, in one batch or accumulated over two and four."""
    model, data = drafter_of(name, objective, dtype), rows()
    wanted = expected(model, name, objective)
    counts = sum(model.loss_counts(row["labels"][None]) for row in data)
    for collate, size in ((left_padded, 4), (joined, 4), (joined, 2), (joined, 1)):
        model.zero_grad()
        given = {} if size == 4 else {"num_items_in_batch": counts}
        batches = [collate(data[start : start + size]) for start in range(0, 4, size)]
        losses = [model(**batch, use_cache=False, **given).loss for batch in batches]
        for loss in losses:
            loss.backward()
        check(sum(losses).detach(), gradients(model), wanted, bound)


def in_one_of_two(rank: int, file: str) -> None:
    """Half of the rows, joined, under DDP: gradients are those of all rows, for every objective."""
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=120)  # of collectives
    torch.distributed.init_process_group("gloo", f"file://{file}", rank=rank, world_size=2, timeout=limit)
    with pytest.MonkeyPatch.context() as patch:
        exact_and_cut(patch)
        for name, objective in CASES:
            model, data = drafter_of(name, objective, torch.float64), rows()
            wanted = expected(model, name, objective)
            counts = sum(model.loss_counts(row["labels"][None]) for row in data)
            model.zero_grad()
            wrapped = DistributedDataParallel(model, find_unused_parameters=True)
            loss = wrapped(**joined(data[rank::2]), use_cache=False, num_items_in_batch=counts).loss
            (2 * loss).backward()  # DDP takes the mean of gradients
            total = loss.detach().clone()
            torch.distributed.all_reduce(total)
            check(total, gradients(model), wanted, bound_of(name), f"{name}, {objective}")
    torch.distributed.destroy_process_group()


@pytest.mark.nightly
def test_two_processes_have_the_gradients_of_the_definition(tmp_path):
    torch.multiprocessing.spawn(in_one_of_two, [str(tmp_path / "store")], nprocs=2)
