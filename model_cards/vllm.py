"""Heads of `MTPHeads` as a drafter of vLLM: independent positions and circuits, on any backbone that vLLM serves.

vLLM takes a drafter by the name of its class (`method="custom_class"`), but passes it tokens alone: the hidden states
that heads read are taken from the arguments of the model runner's own method that requests drafts. Written for vLLM
0.32 (model runner V1). Also the repair of vLLM's rejection sampler on CPUs, for who calls `register`; docs/upstream.md
describes the defect. Importing this module needs no vLLM.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..configuration import MTPHeadConfig
from ..generation.tensors.sampling import draw
from ..generation.tensors.tensor_files import read_tensors, refuse_unknown
from ..modeling.common.backbone_parts import BackboneParts
from ..modeling.heads.family import FAMILIES, build_head, distribution_after

logger = logging.getLogger(__name__)
OPTION = "tokenahead_heads"
"""The entry of vLLM's `additional_config` that names the directory of the heads."""
_RUNNER, _PLATFORMS = "vllm.v1.worker.gpu_model_runner", "vllm.platforms"
_SAMPLER, _EXPAND, _CUT = "vllm.v1.sample.rejection_sampler", "expand_batch_to_tokens", "apply_top_k_top_p"
_ARGUMENTS = ("sample_hidden_states", "spec_decode_metadata", "sampling_metadata")


class HeadProposer:
    """The drafter, as `speculative_config` names it.

    Requests get the argmax of each exact conditional, as in this library; with `"draft_sample_method": "probabilistic"`
    drafts of sampled ones are drawn from the conditionals at the request's temperature, and vLLM verifies them by these
    distributions, which accepts more. Both are lossless. On CPUs, loading heads repairs vLLM's sampler (`register`).

    Args:
        vllm_config: vLLM's configuration; `additional_config["tokenahead_heads"]` is a directory that
            `MTPHeads.save_pretrained` wrote, of heads for this backbone that read its last hidden state alone.

    Example:
        >>> from vllm import LLM
        >>> method = {"method": "custom_class", "model": "tokenahead.model_cards.vllm.HeadProposer"}
        >>> speculative = method | {"num_speculative_tokens": 3}
        >>> llm = LLM("backbone", speculative_config=speculative, additional_config={"tokenahead_heads": "heads"})
    """

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        self.draws = getattr(vllm_config.speculative_config, "draft_sample_method", "greedy") == "probabilistic"
        self.max_length = int(vllm_config.model_config.max_model_len)
        options = vllm_config.additional_config
        named = (options if isinstance(options, dict) else vars(options or object)).get(OPTION)
        if not named or not Path(named, "config.json").is_file():
            raise ValueError(f"additional_config: {OPTION!r} must be a directory that MTPHeads.save_pretrained wrote")
        self.directory = Path(named)
        self.config = config = MTPHeadConfig.from_pretrained(self.directory)
        self.head: nn.Module | None = None
        self.parts: BackboneParts | None = None
        self._step: tuple[torch.Tensor, list[int], torch.Tensor | None] | None = None
        self._probs: torch.Tensor | None = None
        if more := FAMILIES[config.head_type].reads_besides(config):
            raise ValueError(f"{OPTION}: head_type={config.head_type!r} reads {more}, and vLLM passes states alone")
        if not 1 <= self.num_tokens <= config.num_drafts:
            raise ValueError(f"num_speculative_tokens={self.num_tokens}: these heads draft up to {config.num_drafts}")
        for name in ("hidden_size", "vocab_size"):
            ours, theirs = getattr(config, name), getattr(vllm_config.model_config.hf_text_config, name)
            if ours != theirs:
                raise ValueError(f"{name}: the heads were made for {ours}, not for {theirs}")
        listen()

    def load_model(self, target_model: nn.Module) -> None:
        """Load the heads, in the backbone's dtype and on its device (called by vLLM)."""
        weight = next(parameter for parameter in target_model.parameters() if parameter.is_floating_point())
        with torch.device("cpu"):
            head = build_head(self.config, self.config.hidden_size, self.config.vocab_size)
        tensors = read_tensors(sorted(self.directory.glob("*.safetensors")), "head.")
        result = head.load_state_dict(tensors, strict=False)
        refuse_unknown(self.directory, [*result.missing_keys, *result.unexpected_keys])
        self.head = head.to(weight.device, self.vllm_config.model_config.dtype).requires_grad_(False).eval()
        target: Any = target_model
        self.parts = BackboneParts(target)
        self.parts.unembed = functools.partial(_unembed, target)  # which gathers shards and scales
        repair_sampler(weight.device)

    def take(self, states: torch.Tensor, metadata: Any, sampling: Any) -> None:
        """Record, for the next `propose`, the runner's `SpecDecodeMetadata`, `SamplingMetadata` and states [R, d]."""
        counts = [] if metadata is None else list(metadata.num_draft_tokens)
        self._step = states, counts, None if sampling.all_greedy else sampling.temperature

    def take_probs(self) -> torch.Tensor | None:
        """Return the distributions [requests, k, V] of the last drafts, once; None where drafts are deterministic."""
        probs, self._probs = self._probs, None
        return probs

    @torch.inference_mode()
    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return up to `num_speculative_tokens` tokens per request, fewer near its greatest length (called by vLLM).

        A request has new tokens where its prompt is read to its end; `num_tokens_no_spec` [requests] counts them, too.
        """
        step, self._step = self._step, None
        if step is None:
            raise RuntimeError("vLLM requested drafts without its model runner's arguments; see `listen`")
        live = [index for index, tokens in enumerate(sampled_token_ids) if tokens]
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if not live:
            return drafts
        states, counts, temperature = step
        states = states[torch.tensor(_rows(sampled_token_ids, counts), device=states.device)]
        last = torch.tensor([sampled_token_ids[index][-1] for index in live], device=states.device)
        distribution = distribution_after(self.head, self.config, states, last, self.num_tokens, self.parts)
        if self.draws and temperature is not None:
            tokens, probs = distribution.draft(_warped(temperature[live]), self.num_tokens)
            self._probs = probs.new_zeros(len(sampled_token_ids), *probs.shape[1:])
            self._probs[live] = probs
        else:
            tokens = distribution.greedy(self.num_tokens)
        for index, draft in zip(live, tokens.tolist()):
            drafts[index] = draft[: max(self.max_length - int(num_tokens_no_spec[index]), 0)]
        return drafts


def listen() -> None:
    """Make vLLM's model runner pass its hidden states to a `HeadProposer`; other drafters are not affected."""
    runner = importlib.import_module(_RUNNER).GPUModelRunner
    original = runner.propose_draft_token_ids
    if hasattr(original, "of_tokenahead"):
        return
    signature = inspect.signature(original)
    if missing := [name for name in _ARGUMENTS if name not in signature.parameters]:
        raise RuntimeError(f"HeadProposer was written for vLLM 0.32; propose_draft_token_ids here takes no {missing}")

    @functools.wraps(original)
    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.drafter, HeadProposer):
            return original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs).arguments
        self.drafter.take(*(arguments[name] for name in _ARGUMENTS))
        drafts = original(self, *args, **kwargs)
        probs = self.drafter.take_probs()
        if probs is not None:  # read by `_get_spec_decode_draft_probs`, where an EAGLE drafter's would lie
            self._draft_probs, self._draft_prob_req_ids = probs, self.input_batch.req_ids.copy()
        return drafts

    propose_draft_token_ids.of_tokenahead = True
    runner.propose_draft_token_ids = propose_draft_token_ids


def _rows(sampled: list[list[int]], counts: list[int]) -> list[int]:
    """Return the row of each request's state just before its newest token, of m + 1 rows of one with m drafts."""
    rows, offset = [], 0
    for index, tokens in enumerate(sampled):
        if tokens:
            rows.append(offset + len(tokens) - 1)
        offset += 1 + (counts[index] if counts else 0)
    return rows


def _warped(temperature: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that draws at each request's temperature, [requests]; where it is 0, it takes the argmax."""

    def choose(probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        # independent positions come all at once, [requests, k, V]
        heat = temperature.to(probs).view(-1, *[1] * (probs.dim() - 1))
        distribution = (probs.log() / heat.clamp(min=1e-6)).softmax(-1)
        greedy = nn.functional.one_hot(probs.argmax(-1), probs.shape[-1]).to(probs)
        distribution = torch.where(heat > 0, distribution, greedy)
        return draw(distribution), distribution

    return choose


def _unembed(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Return the logits [..., V] that vLLM's target model has for states [..., d]."""
    logits = model.compute_logits(states.reshape(-1, states.shape[-1]))
    if logits is None:
        raise RuntimeError("tensor_parallel_size: vLLM gathers logits on one rank here; use unembedding='own'")
    return logits.view(*states.shape[:-1], -1)


def register() -> None:
    """Repair sampled requests with drafts of this process's vLLM, on CPUs and for every drafter.

    To be called before the engine starts, in its process or in the one that forks it; or by vLLM in every process, as
    an entry point of the group `vllm.general_plugins` of a package of yours. Nothing is replaced where vLLM is right.
    """
    is_cpu = importlib.import_module(_PLATFORMS).current_platform.is_cpu()
    sampler = importlib.import_module(_SAMPLER) if is_cpu else None
    if (original := getattr(sampler, _EXPAND, None)) is None:  # another platform, or a version that does it otherwise
        return

    def first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # at the first call, as vLLM installs its kernels for CPUs later than plugins are called
        setattr(sampler, _EXPAND, original)
        repair_sampler(x.device)
        return getattr(sampler, _EXPAND)(x, *args, **kwargs)

    setattr(sampler, _EXPAND, first)


def repair_sampler(device: torch.device) -> None:
    """Replace the wrong functions of vLLM's rejection sampler on CPUs, with a warning.

    In 0.32 the kernel that expands values of requests writes into a copy, so that temperatures, `top_k` and `top_p` are
    uninitialised memory; and in a step without drafts, `top_k` takes the maximum of an empty tensor.
    """
    sampler = importlib.import_module(_SAMPLER)
    if (original := getattr(sampler, _EXPAND, None)) is None:  # another version, which does it otherwise
        return
    ends = torch.tensor([1, 3], dtype=torch.int32, device=device)
    values = torch.rand(2, device=device)  # drawn: freed memory may hold the values of an earlier trial
    if torch.equal(original(values, ends, 3), values[[0, 1, 1]]):
        return
    setattr(sampler, _EXPAND, _expand)
    cut = getattr(sampler, _CUT)
    setattr(sampler, _CUT, lambda logits, k, p: cut(logits, k, p) if len(logits) else logits)
    logger.warning("tokenahead: %s.%s loses temperatures on %s; replaced", _SAMPLER, _EXPAND, device)


def _expand(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Return values [requests] as values [tokens], one for every drafted token; names as in vLLM."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
