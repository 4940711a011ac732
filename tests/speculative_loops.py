"""A speculative loop as a stranger may write it, without a cache, right or with a planted fault of sampled texts."""

import torch
from torch.nn.functional import one_hot, pad
from transformers import LogitsProcessorList

from tokenahead.testing import disturbed


class Loop:
    """A decoding function of chains of drafts from a disturbed copy.

    Args:
        fault: `"accepts"` or `"residual is p"` (at a place of the block), `"acceptance 5 % too high"`, `"bonus of q"`,
            `"bonus is the likeliest"`, `"accepts all late"` (from the fourth cycle on), `"residual is p late"` (in it),
            `"float16"` (of the test), `"rounded"` (to it), `"processors see the prefix"`,
            or `"NAME ignored"` of an option.
        drafts: Tokens of a draft.
        place: Of the block, from 0, for the first two.
        by: How far the copy is off.
        exact: The copy drafts at the place alone, and the model itself at others, so that the place is always reached.
    """

    def __init__(self, fault=None, drafts=3, place=None, by=0.3, exact=False):
        self.fault, self.drafts, self.place, self.by, self.exact = fault, drafts, place, by, exact

    @torch.no_grad()
    def __call__(self, model, input_ids, attention_mask=None, max_new_tokens=20, do_sample=False, **options):
        if odd := {"stop_strings", "prefix_allowed_tokens_fn"} & options.keys():
            raise NotImplementedError(str(odd))
        self.fault_now = self.fault if do_sample else None
        if self.fault_now and self.fault_now.endswith(" ignored"):
            options.pop(self.fault_now.split()[0], None)
        processors = LogitsProcessorList(options.pop("logits_processor", []))
        config, _ = model._prepare_generation_config(None, do_sample=do_sample, **options)
        model._prepare_special_tokens(config, device="cpu")
        (batch, width), m = input_ids.shape, self.drafts
        self.processors = model._get_logits_processor(config, width, input_ids, None, processors, device="cpu")
        self.width, self.rows, self.do_sample = width, torch.arange(batch), do_sample
        self.ids = pad(input_ids, (0, max_new_tokens + m + 1))
        self.mask = pad(attention_mask, (0, max_new_tokens + m + 1), value=1)
        ends = torch.tensor(options.get("eos_token_id", [])).flatten().long()
        text = torch.full((batch, max_new_tokens), config.pad_token_id or 0)
        count, cycle = torch.zeros(batch, dtype=torch.long), 0
        while bool((count < max_new_tokens).any()):
            cycle += 1
            q = []
            for step in range(m):
                is_exact = self.exact and step != self.place
                q += self.laws(model if is_exact else disturbed_copy(model, self.by), [count + step])
                self.ids[self.rows, width + count + step] = self.drawn(q[-1])
            prefix = count if self.fault_now == "processors see the prefix" else None
            p = torch.stack(self.laws(model, [count + step for step in range(m + 1)], prefix), 1)
            accepted, added = self.verified(p, torch.stack(q, 1), count, cycle)
            for step in range(m + 1):
                token = torch.where(step < accepted, self.ids[self.rows, width + count + step], added)
                is_new = (step <= accepted) & (count + step < max_new_tokens)
                text[self.rows[is_new], (count + step)[is_new]] = token[is_new]
            done = (torch.isin(text, ends) & (torch.arange(max_new_tokens) < (count + accepted + 1)[:, None])).any(1)
            count = torch.where(done, max_new_tokens, (count + accepted + 1).clamp(max=max_new_tokens))
            self.ids[:, width : width + max_new_tokens] = text
        is_end = torch.isin(text, ends)
        is_after = is_end.cumsum(1) > is_end.long()
        text = text.masked_fill(is_after, config.pad_token_id or 0)[:, : int((~is_after).sum(1).max())]
        return torch.cat([input_ids, text], 1)

    def laws(self, source, counts, prefix=None):
        """Probabilities [B, V] after each of so many new tokens; processors are shown `prefix` of them."""
        last = self.width + int(counts[-1].max())
        places = (self.mask.cumsum(1) - 1).clamp(min=0)[:, :last]
        logits = source(
            self.ids[:, :last], attention_mask=self.mask[:, :last], position_ids=places, use_cache=False
        ).logits
        return [self.law(logits[self.rows, self.width + count - 1].float(), count, prefix) for count in counts]

    def law(self, logits, count, prefix):
        seen, scores = count if prefix is None else prefix, torch.zeros_like(logits)
        for length in seen.unique().tolist():
            is_seen = seen == length
            scores[is_seen] = self.processors(self.ids[:, : self.width + length], logits.clone())[is_seen]
        return scores.double().softmax(-1) if self.do_sample else one_hot(scores.argmax(-1), scores.shape[-1]).double()

    def drawn(self, probs):
        return probs.multinomial(1)[:, 0]

    def verified(self, p, q, count, cycle):
        """How many drafts are accepted [B], and the token after them [B]."""
        m, fault = self.drafts, self.fault_now
        drafts = torch.stack([self.ids[self.rows, self.width + count + step] for step in range(m)], 1)
        ratio = p[:, :m].gather(2, drafts[..., None]) / q.gather(2, drafts[..., None])
        ratio = ratio[..., 0] * (1.05 if fault == "acceptance 5 % too high" else 1)
        if fault == "accepts":
            ratio[:, self.place] = 1
        if fault == "accepts all late" and cycle > 3:
            ratio = torch.ones_like(ratio)
        dtype = torch.float16 if fault == "float16" else torch.float64
        uniforms = torch.rand(ratio.shape, dtype=dtype)
        if fault == "rounded":
            uniforms, ratio = uniforms.half(), ratio.half()
        accepted = (uniforms < ratio.to(uniforms.dtype)).long().cumprod(1).sum(1)
        residual = (p[:, :m] - q).clamp(min=0)
        if fault == "residual is p":
            residual[:, self.place] = p[:, self.place]
        if fault == "residual is p late" and cycle == 4:
            residual = p[:, :m]
        rest = torch.cat([residual, p[:, m:]], 1)
        if fault == "bonus of q":
            rest[:, m] = q[:, -1]
        if fault == "bonus is the likeliest":
            rest[:, m] = one_hot(p[:, m].argmax(-1), p.shape[-1])
        rest = rest[self.rows, accepted]
        return accepted, self.drawn(torch.where(rest.sum(-1, keepdim=True) > 0, rest, p[self.rows, accepted]))


_COPIES = {}


def disturbed_copy(model, by):
    """The same copy in every call."""
    return _COPIES.setdefault((id(model), by), disturbed(model, by))


class Tilted:
    """Plain sampling in which the probability of a token is off by `error`, up or down by the token before it."""

    def __init__(self, error):
        self.error = error

    @torch.no_grad()
    def __call__(self, model, input_ids, attention_mask=None, max_new_tokens=20, **options):
        ids, signs = input_ids, torch.tensor([[1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1], [-1, 1, 1, -1]]).double()
        for _ in range(max_new_tokens):
            probs = model(ids).logits[:, -1].float().double().softmax(-1)
            sign = signs[ids[:, -1]]
            sign = sign - (probs * sign).sum(1, keepdim=True)  # of mean 0
            sign = sign / (probs * sign.square()).sum(1, keepdim=True).sqrt()  # and variance 1
            token = (probs * (1 + self.error * sign)).clamp(min=0).multinomial(1)
            ids = torch.cat([ids, token], 1)
        return ids
