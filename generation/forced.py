"""Tokens that a constraint forces are drafted without asking the drafter: brackets, and the keys of a JSON schema.

Where the call's constraints leave exactly one token, it is certain, and its draft is never rejected; where a grammar
leaves one text, but several ways to cut it into tokens, the usual one is a guess, which is verified as any look-up. So
a cycle begins with all tokens that are forced after the sequences. Where these are as many as the drafter would draft,
it is not called; else it drafts, under the same constraints, and what is forced after its draft is added to it. At the
places of forced tokens and guesses these are proposed with certainty, whatever the drafter has drawn there.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from .call.constraints import DraftMasks
from .call.options import DraftOptions
from .call.sequences import Sequences, Speculation
from .contract import CacheView, DraftSession, DraftTree, PrefillOutput, TargetOutput, VerificationResult

MOST = 16
"""Tokens by which drafts may be longer than the drafter's own."""


def with_forced(session: DraftSession, options: DraftOptions, longest: int | None) -> DraftSession:
    """Return a session that drafts what is forced by itself, or the very session where nothing can be.

    Drafts of fixed shapes, of measured lengths, or that are made in the verifying call, stay as they are. `longest` is
    what the drafter can draft; None: any number.
    """
    is_plain = options.cache != "static" and options.schedule != "adaptive" and options.speculates
    if not (is_plain and options.processors) or session.lookahead or session.is_deterministic:
        return session
    if not options.processing.constraints.may_force(options.prompt.device):
        return session
    return ForcedSession(session, options, longest)


class ForcedSession(DraftSession):
    """What is forced, and the drafts of another session; arguments as for `with_forced`."""

    def __init__(self, session: DraftSession, options: DraftOptions, longest: int | None = 0) -> None:
        self.session, self.options, self.longest = session, options, longest
        self.num_tokens = session.num_tokens + MOST
        self.hidden_layers, self.reads_cache = session.hidden_layers, session.reads_cache
        self.supports_confidence_threshold = session.supports_confidence_threshold
        self.priors = ()  # what is forced is accepted, so that drafts are as long as they can be
        self.size = options.backbone.config.get_text_config().vocab_size

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        self.session.begin(outputs, view)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        own = min(length, self.session.num_tokens)
        masks = self.options.masks(tokens, is_warped=False) if length else None
        if masks is None:
            return self.session.propose(tokens, own)
        run, counts = self._forced(masks, tokens.done, length)  # [B, r], by sequence
        if all(count >= own or done for count, done in zip(counts, tokens.done)):
            self.session.propose(tokens, 0)
            return self._chain(run, None, counts)
        if self.longest is None and self.options.draft_tree is None:  # what is forced takes none of its own drafts away
            own = min(length, own + max(counts))
        tree = self.session.propose(tokens, own)
        if not tree.is_chain or tree.auxiliary is not None or tree.columns is not None:
            return tree
        return self._joined(run, counts, tree) if any(counts) else self._continued(tree, tokens, length)

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        self.session.advance(outputs, result)

    def finish(self, statistics: Speculation) -> None:
        self.session.finish(statistics)

    def coverage(self, tokens: Tensor) -> float | None:
        return self.session.coverage(tokens)

    def _forced(self, masks: DraftMasks, done: list[bool], length: int) -> tuple[Tensor, list[int]]:
        """Return at most `length` tokens that are forced one after the other, and how many each sequence has."""
        run, going, device = list[Tensor](), [not each for each in done], masks.tokens.ids.device
        counts = [0] * len(done)
        while len(run) < length:
            tokens = masks.forced(self.size)
            going = [each and token is not None for each, token in zip(going, tokens)]
            if not any(going):
                break
            run.append(torch.tensor([token or 0 for token in tokens], device=device))  # [B]
            masks.extend(run[-1])
            counts = [count + each for count, each in zip(counts, going)]
        return torch.stack(run, 1) if run else masks.tokens.ids[:, :0], counts

    def _chain(self, drafts: Tensor, probs: Tensor | None, counts: list[int]) -> DraftTree:
        is_even = len(set(counts)) == 1 and counts[0] == drafts.shape[1]
        return DraftTree.chain(drafts, probs, None if is_even else torch.tensor(counts, device=drafts.device))

    def _joined(self, run: Tensor, counts: list[int], tree: DraftTree) -> DraftTree:
        """Return what is forced, and then the rest of a chain that does not contradict it.

        The rest was drawn given the very tokens that are forced, and what it was drawn from depends on no others.
        """
        drafts, width = tree.tokens, max(tree.tokens.shape[1], run.shape[1])
        forced = torch.tensor(counts, device=run.device)  # [B]
        drafted = torch.full_like(forced, drafts.shape[1]) if tree.num_nodes is None else tree.num_nodes
        run, drafts = (pad(each, (0, width - each.shape[1])) for each in (run, drafts))  # [B, w]
        places = torch.arange(width, device=run.device)
        is_forced = places < forced[:, None]  # [B, w]
        differs = ((run != drafts) & is_forced).any(1) | (drafted < forced)  # [B]
        probs = None
        if tree.probs is not None:
            probs = pad(tree.probs, (0, 0, 0, width - tree.probs.shape[1]))  # [B, w, V]
            probs = torch.where(is_forced[..., None], certain(run, probs), probs)
        return DraftTree.chain(torch.where(is_forced, run, drafts), probs, torch.where(differs, forced, drafted))

    def _continued(self, tree: DraftTree, tokens: Sequences, length: int) -> DraftTree:
        """Return a chain with what is forced after it, where all sequences draft equally many tokens."""
        masks = self.options.masks(tokens, is_warped=False)
        if tree.num_nodes is not None or masks is None or not tree.tokens.shape[1]:
            return tree
        for token in tree.tokens.unbind(1):
            masks.allowed((len(token), self.size), token.device)  # which says whether the token is legal
            masks.extend(token)
        run, counts = self._forced(masks, tokens.done, length - tree.tokens.shape[1])
        if not any(counts):
            return tree
        probs = None if tree.probs is None else torch.cat([tree.probs, certain(run, tree.probs)], 1)
        counts = [tree.tokens.shape[1] + count for count in counts]
        return self._chain(torch.cat([tree.tokens, run], 1), probs, counts)


def certain(tokens: Tensor, probs: Tensor) -> Tensor:
    """Return distributions [B, r, V] of tokens [B, r] that are certain, as other ones are."""
    return one_hot(tokens, probs.shape[-1]).to(probs)
