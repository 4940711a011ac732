"""The drafts of one call of `generate`."""

from typing import Any

import torch

from tokenahead.extending import DraftOptions, DraftSession, DraftTree, Sequences, TargetOutput, VerificationResult


class GRUSession(DraftSession):
    """Drafts chains from the backbone's state just before b, and b."""

    hidden_layers = -1  # the backbone's last hidden states

    def __init__(self, drafter: Any, options: DraftOptions) -> None:
        self.drafter, self.options, self.num_tokens = drafter, options, options.num_tokens

    def begin(self, outputs: Any, view: Any) -> None:
        """Take the state of the prompt's last token."""
        self.states = outputs.hidden_states[-1][:, -1]  # [B, d]

    def propose(self, sequences: Sequences, length: int) -> DraftTree:
        """Draft `length` tokens after every sequence."""
        token, states, drafts, probs = sequences.last(), self.states, [sequences.ids[:, :0]], []
        masks = self.options.masks(sequences)
        for _ in range(length):
            logits, states = self.drafter.step(token, states)
            token, q = self.options.choose(logits, masks=masks)
            drafts.append(token[:, None])
            probs.append(q)
        q = torch.stack(probs, 1) if probs and self.options.do_sample else None  # [B, m, V]
        return DraftTree.chain(torch.cat(drafts, 1), q)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Take the state of the last accepted token, just before the new b."""
        states = outputs.state()  # [B, m + 1, d], along the accepted path
        self.states = states[torch.arange(len(states)), result.num_accepted.to(states.device)]
