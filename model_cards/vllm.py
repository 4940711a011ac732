"""Heads of `MTPHeads` as a drafter of vLLM: independent positions and circuits, on any backbone that vLLM serves.

vLLM takes a drafter by the name of its class (`method="custom_class"`), but passes it tokens alone. The hidden state
before each request's newest token, which a head reads, is taken from the arguments of the model runner's own method
that requests drafts. Written for vLLM 0.32 (model runner V1), whose extension point is marked experimental; the names
that are used there are checked when the engine starts.

Also the repair of vLLM's rejection sampler on CPUs, for who calls `register`; docs/upstream.md describes the defect.
Importing this module needs no vLLM.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..configuration import MTPHeadConfig
from ..configuration.fields import refuse
from ..generation.backbone.wrapped_models import untyped
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
_ARE_PROBABILISTIC = "probabilistic"


@dataclass
class _Step:
    """The model runner's state when it requests drafts.

    Attributes:
        states: [R, d], last hidden states whose logits were computed: m + 1 of a request that had m drafts.
        counts: m for every request.
        temperature: [requests], 0 where a request is greedy; None: all are.
    """

    states: torch.Tensor
    counts: list[int]
    temperature: torch.Tensor | None


class HeadProposer:
    """The drafter, as `speculative_config` names it.

    Greedy requests get the argmax of each exact conditional, as in this library. Sampled requests get it too, and vLLM
    takes it as deterministic, which is lossless; with `"draft_sample_method": "probabilistic"` their drafts are drawn
    from the conditionals at the request's temperature, and vLLM verifies them by these distributions, which accepts
    more.

    On CPUs vLLM 0.32 loses the temperatures of requests with drafts, of any drafter, so that sampled outputs do not
    follow the backbone. This is tested when the heads are loaded, and the wrong function of vLLM is replaced in the
    engine's process; `register` does so for other drafters.

    With tensor parallelism, heads that share the backbone's unembedding get logits from the backbone itself, which
    gathers the shards; engines that gather on one rank only are refused. More than one device was not tried.

    Args:
        vllm_config: vLLM's configuration; `additional_config["tokenahead_heads"]` is a directory that
            `MTPHeads.save_pretrained` wrote.

    Raises:
        ValueError: No such directory, heads that read more than the last hidden state, heads for another backbone, or
            more drafted tokens than their window covers.
        RuntimeError: A version of vLLM without what is needed here.

    Example:
        >>> from vllm import LLM
        >>> llm = LLM(
        ...     "backbone",
        ...     speculative_config={
        ...         "method": "custom_class",
        ...         "model": "tokenahead.model_cards.vllm.HeadProposer",
        ...         "num_speculative_tokens": 3,
        ...     },
        ...     additional_config={"tokenahead_heads": "heads"},
        ... )
    """

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.num_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        method = getattr(vllm_config.speculative_config, "draft_sample_method", "greedy")
        self.draws = method == _ARE_PROBABILISTIC
        self.max_length = int(vllm_config.model_config.max_model_len)
        self.directory = _directory(vllm_config.additional_config)
        self.config = MTPHeadConfig.from_pretrained(self.directory)
        self._check()
        self.head: nn.Module | None = None
        self.parts: BackboneParts | None = None
        self._step: _Step | None = None
        self._probs: torch.Tensor | None = None
        listen()

    def _check(self) -> None:
        config, text = self.config, self.vllm_config.model_config.hf_text_config
        more = FAMILIES[config.head_type].reads_besides(config)
        refuse(
            [
                (more, f"{OPTION}: head_type={config.head_type!r} reads {more}, and vLLM passes the last state alone"),
                (
                    not 1 <= self.num_tokens <= config.num_drafts,
                    f"num_speculative_tokens={self.num_tokens}: these heads draft 1 to {config.num_drafts} tokens",
                ),
                *(
                    (
                        getattr(text, name) != getattr(config, name),
                        f"{name}: the heads were made for {getattr(config, name)}, not for {getattr(text, name)}",
                    )
                    for name in ("hidden_size", "vocab_size")
                ),
            ]
        )

    def load_model(self, target_model: nn.Module) -> None:
        """Load the heads, in the backbone's dtype and on its device (called by vLLM)."""
        weight = next(parameter for parameter in target_model.parameters() if parameter.is_floating_point())
        with torch.device("cpu"):
            head = build_head(self.config, self.config.hidden_size, self.config.vocab_size)
        tensors = read_tensors(sorted(self.directory.glob("*.safetensors")), "head.")
        result = head.load_state_dict(tensors, strict=False)
        refuse_unknown(self.directory, [*result.missing_keys, *result.unexpected_keys])
        dtype = self.vllm_config.model_config.dtype
        self.head = head.to(weight.device, dtype).requires_grad_(False).eval()
        self.parts = _TargetParts(untyped(target_model))
        repair_sampler(weight.device)

    def take(self, states: torch.Tensor, metadata: Any, sampling: Any) -> None:
        """Record the states [R, d], vLLM's `SpecDecodeMetadata` and `SamplingMetadata` for the next `propose`."""
        counts = [] if metadata is None else list(metadata.num_draft_tokens)
        self._step = _Step(states, counts, None if sampling.all_greedy else sampling.temperature)

    def take_probs(self) -> torch.Tensor | None:
        """Return the distributions [requests, k, V] of the last drafts, once; None where drafts are deterministic."""
        probs, self._probs = self._probs, None
        return probs

    @torch.inference_mode()
    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """Return up to `num_speculative_tokens` tokens per request, fewer near its greatest length (called by vLLM).

        Args:
            sampled_token_ids: New tokens of each request; none where its prompt is not read to its end.
            num_tokens_no_spec: [requests], the length of each one, these tokens included.
            token_ids_cpu: Not read.
            slot_mappings: Not read.
        """
        step, self._step = self._step, None
        if step is None:
            raise RuntimeError("vLLM requested drafts without its model runner's arguments; see `listen`")
        live = [index for index, tokens in enumerate(sampled_token_ids) if tokens]
        if not live:
            return [[] for _ in sampled_token_ids]
        device = step.states.device
        states = step.states[torch.tensor(_rows(sampled_token_ids, step.counts), device=device)]
        last = torch.tensor([sampled_token_ids[index][-1] for index in live], device=device)
        distribution = distribution_after(self.head, self.config, states, last, self.num_tokens, self.parts)
        if self.draws and step.temperature is not None:
            tokens, probs = distribution.draft(_warped(step.temperature[live]), self.num_tokens)
            self._probs = probs.new_zeros(len(sampled_token_ids), *probs.shape[1:])
            self._probs[live] = probs
        else:
            tokens = distribution.greedy(self.num_tokens)
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        for index, draft in zip(live, tokens.tolist()):
            drafts[index] = draft[: max(self.max_length - int(num_tokens_no_spec[index]), 0)]
        return drafts


def listen() -> None:
    """Make vLLM's model runner pass its hidden states to a `HeadProposer`; other drafters are not affected.

    Raises:
        RuntimeError: A version of vLLM whose method takes other arguments.
    """
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


def _directory(options: object) -> Path:
    options = options if isinstance(options, dict) else vars(options or object)
    directory = Path(options.get(OPTION, ""))
    if not options.get(OPTION) or not (directory / "config.json").is_file():
        raise ValueError(f"additional_config: {OPTION!r} must be a directory that MTPHeads.save_pretrained wrote")
    return directory


def _rows(sampled: list[list[int]], counts: list[int]) -> list[int]:
    """Return the row of each request's state just before its newest token; requests without a token have none.

    A request with m drafts has m + 1 rows; where r drafts were rejected, the state is r rows before its last.
    """
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


class _TargetParts(BackboneParts):
    """The unembedding of vLLM's target model, its only part for heads."""

    @functools.cached_property
    def unembed(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The map from states [..., d] to logits [..., V]: the backbone's own, which gathers shards and scales."""
        return self._unembed

    def _unembed(self, states: torch.Tensor) -> torch.Tensor:
        logits = untyped(self.model).compute_logits(states.reshape(-1, states.shape[-1]))
        if logits is None:
            raise RuntimeError("tensor_parallel_size: vLLM gathers logits on one rank here; use unembedding='own'")
        return logits.view(*states.shape[:-1], -1)


def register() -> None:
    """Repair sampled requests with drafts of this process's vLLM, on CPUs and for every drafter.

    To be called before the engine starts, in its process or in the one that forks it; or by vLLM in every process, as
    an entry point of the group `vllm.general_plugins` of a package of yours. Nothing is replaced where vLLM is right.
    """
    if not importlib.import_module(_PLATFORMS).current_platform.is_cpu():
        return
    sampler = importlib.import_module(_SAMPLER)
    original = getattr(sampler, _EXPAND, None)
    if original is None:  # another version, which does it otherwise
        return

    def first(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # at the first call, as vLLM installs its kernels for CPUs later than plugins are called
        setattr(sampler, _EXPAND, original)
        repair_sampler(x.device)
        return getattr(sampler, _EXPAND)(x, *args, **kwargs)

    setattr(sampler, _EXPAND, first)


def repair_sampler(device: torch.device) -> None:
    """Replace the wrong functions of vLLM's rejection sampler on CPUs, with a warning.

    The CPU kernel of 0.32 that expands values of requests (`_expand_kernel_impl` in `vllm.utils.cpu_triton_utils`)
    writes into an int64 copy, which is dropped: the sampler reads uninitialised memory for temperatures, `top_k` and
    `top_p`. And in a step without drafts, as after a prompt, `top_k` takes the maximum of an empty tensor.
    """
    sampler = importlib.import_module(_SAMPLER)
    original = getattr(sampler, _EXPAND, None)
    if original is None:  # another version, which does it otherwise
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
