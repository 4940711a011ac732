"""The part of `benchmarks/serving.py` that runs in vLLM's own interpreter, with this library's repair of its sampler.

    python serving_engine.py cases.json results.json

Reads what to serve and what to ask, serves one directory after the other, and writes texts, drafts and counts. Cases
that are among the results already, without an error, are left out.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

DRAFTS: list[tuple[str, int, list[int]]] = []
"""Of the engine at work: request, its length when the draft was made, the drafted tokens."""
_LENGTHS: dict[str, int] = {}


def declare_images() -> None:
    """Puts torchvision in reach, which vLLM's files of some families import and no text needs.

    PyPI has builds for CUDA alone, whose operators cannot be loaded with PyTorch for CPUs: two of them, which
    torchvision asks for when it is imported, are declared here and do nothing.
    """
    import torch

    folder = Path(sys.prefix) / "torchvision"
    if folder.is_dir():
        sys.path.append(str(folder))
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def route_in_pytorch() -> None:
    """Replaces what LongCat's routing to zero experts calls: two kernels that vLLM has for GPUs alone."""
    import torch
    from vllm.model_executor.layers.fused_moe.router import zero_expert_router

    def choose(hidden_states: Any, gating_output: Any, e_score_correction_bias: Any, topk: int, **options: Any) -> Any:
        scores = gating_output.float().softmax(-1)
        chosen = (scores + e_score_correction_bias).topk(topk, -1).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if options["renormalize"] else weights
        return weights, chosen.to(options.get("indices_type") or torch.int32)

    def pass_on(expert_indices: Any, expert_scales: Any, num_experts: int, hidden_states: Any, **_: Any) -> Any:
        return hidden_states * expert_scales.masked_fill(expert_indices < num_experts, 0).sum(-1, keepdim=True)

    zero_expert_router.fused_topk_bias = choose
    zero_expert_router.zero_experts_compute_triton = pass_on


def look_at_classes_here() -> None:
    """Let vLLM inspect classes in this process; to leave CUDA alone it starts one for each, which takes ten seconds."""
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def listen() -> None:
    """Notes every draft, whoever makes it, and where in its request's text it stands."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.propose_draft_token_ids

    @functools.wraps(original)  # HeadProposer looks at the signature
    def propose(self: Any, scheduler_output: Any, sampled_token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = original(self, scheduler_output, sampled_token_ids, *args, **kwargs)
        sampled = sampled_token_ids if isinstance(sampled_token_ids, list) else sampled_token_ids.tolist()
        rows = drafts if isinstance(drafts, list) else drafts.tolist()
        for request, tokens, draft in zip(self.input_batch.req_ids, sampled, rows):
            length = _LENGTHS.get(request, self.requests[request].num_prompt_tokens)
            _LENGTHS[request] = length + sum(token >= 0 for token in tokens)
            DRAFTS.append((request, _LENGTHS[request], [int(token) for token in draft]))
        return drafts

    GPUModelRunner.propose_draft_token_ids = propose


def serve(case: dict[str, Any]) -> dict[str, Any]:
    """Texts of every prompt alone (unless that is not asked) and of all together; drafts and counts of the former."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    began = time.process_time()
    common = dict(skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8)
    llm = LLM(**common | case["engine"], disable_log_stats=False)
    prompts = [{"prompt_token_ids": ids} for ids in case["prompts"]]
    asked = case.get("sampling") or [{"temperature": 0}] * len(prompts)
    common = dict(max_tokens=case["new_tokens"], detokenize=False, ignore_eos=True)
    params = [SamplingParams(**common, **options) for options in asked]
    del DRAFTS[:]
    _LENGTHS.clear()
    alone, drafts = [], []
    for prompt, wanted in zip(prompts, params) if case.get("is_alone", True) else ():
        start = len(DRAFTS)
        alone += _texts(llm.generate([prompt], wanted, use_tqdm=False))
        drafts.append([(length, draft) for _, length, draft in DRAFTS[start:]])
    counts = _counts(llm)
    together = _texts(llm.generate(prompts, params, use_tqdm=False))
    counts = counts if case.get("is_alone", True) else _counts(llm)
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    seconds = time.process_time() - began
    return {"alone": alone, "together": together, "drafts": drafts, "counts": counts, "seconds": seconds}


def _texts(outputs: list[Any]) -> list[list[int]]:
    ordered = sorted(outputs, key=lambda output: int(output.request_id))
    return [list(output.outputs[0].token_ids) for output in ordered]


def _counts(llm: Any) -> dict[str, Any]:
    found = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_"):
            value = metric.values if hasattr(metric, "values") else metric.value
            found[metric.name.removeprefix("vllm:spec_decode_num_")] = value
    return found


def main(cases: str, results: str) -> None:
    """Serves all cases; one that fails is written down with its error."""
    from tokenahead.model_cards.vllm import register

    declare_images()
    register()
    route_in_pytorch()
    look_at_classes_here()
    listen()
    written = Path(results)
    found = json.loads(written.read_text()) if written.exists() else {}
    for case in json.loads(Path(cases).read_text()):
        if "error" not in found.get(case["name"], {"error": ""}):
            continue
        print(f"{time.strftime('%H:%M:%S')} {case['name']}", flush=True)
        try:
            found[case["name"]] = serve(case)
        except Exception as error:  # noqa: BLE001 - the other cases go on
            cause = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            found[case["name"]] = {"error": f"{type(cause).__name__}: {cause}"}
        written.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
