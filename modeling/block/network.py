"""The network of a block drafter, and its drafts: one forward fills in a block behind features of verified tokens.

    context     c_0 .. c_{n-1}       one vector per verified token, of several hidden states of the backbone
    rows        b  m  m  m           the newest token and mask tokens, at positions n, n + 1, ...

Keys and values of every layer are those of the context and of the rows; the context goes through each layer's own
projections, all of them in one product, and is never changed by a layer. Between blocks only its keys and values are
kept, column t of the drafter's cache those of token t; a block lies behind them, and the next cycle overwrites it:

    cache      ... x y  b  m  m  m       b: the token that verification added; its state does not exist yet
    drafts                d1 d2 d3       (of a block whose first row drafts, d1 comes from b's row)
    verified   ... x y  b  d1            states of b and d1, which the backbone has read, become context
    next       ... x y  b  d1 z  m ...   z is added
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextDecoderLayer
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

from ...configuration.block import BlockDrafterConfig
from ...configuration.cache_names import CACHE
from ...generation.backbone.backbones import takes_dense_masks
from ...generation.backbone.cache import drafter_layout, of_accepted
from ...generation.backbone.wrapped_models import untyped
from ...generation.call.options import DraftOptions
from ...generation.call.sequences import Sequences
from ...generation.contract import (
    CacheView,
    DraftTree,
    HiddenLayers,
    PrefillOutput,
    TargetOutput,
    VerificationResult,
    each_state,
    taken,
)
from ...generation.tensors.masks import cached_arange, check_attention, model_mask, to_device
from ...generation.trees.building import of_real
from ...generation.trees.growth import grow
from ..common.backbone_parts import dtype_of, frozen, output_embeddings
from ..common.learning import DraftModel, States
from ..heads.attached import HeadSession, WindowGrowth
from ..heads.window_distribution import PartialDistribution, WindowDistribution, exact
from .laws import LAWS, BlockLaw, ConfidenceHead


def window_of(config: BlockDrafterConfig, kind: str) -> int | None:
    """Return how far back rows of a kind of layer see, themselves included; None: as far as there are columns."""
    return config.sliding_window if kind == "sliding_attention" else None


def seen_rows(config: BlockDrafterConfig, kind: str, device: torch.device) -> Tensor:
    """Return which rows of its block each row sees in layers of a kind, [S, S] bool."""
    rows, window = cached_arange(config.block_size, device), window_of(config, kind)
    distance = rows[:, None] - rows  # [S, S]
    is_causal = config.sliding_causal if kind == "sliding_attention" else config.causal
    seen = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def sees_all(config: BlockDrafterConfig) -> bool:
    """Return whether every row sees all of its block and its context in every layer."""
    return {*(config.layer_types or ())} == {"full_attention"} and not config.causal


def block_masks(
    config: BlockDrafterConfig, context: Tensor, distance: Tensor, dtype: torch.dtype
) -> dict[str, Tensor | None]:
    """Return what rows of A blocks next to each other see, by kind of layer: [B, 1, A S, L + A S].

    `context` [B, A, L] are the columns before a block, and `distance` [B, A S, L] is how far each is from a row.
    """
    before, same = context.repeat_interleave(config.block_size, 1), torch.eye(context.shape[1], device=context.device)
    masks = dict[str, Tensor | None]()
    for kind in dict.fromkeys(config.layer_types or ()):
        window = window_of(config, kind)
        seen = before if window is None else before & (distance < window)
        within = torch.kron(same.bool(), seen_rows(config, kind, context.device))  # [A S, A S]
        masks[kind] = model_mask(torch.cat([seen, within.expand(len(seen), -1, -1)], -1), config, dtype)
    return masks


class BlockLayer(Qwen3DecoderLayer):
    """A layer over the rows of blocks; keys and values of the context are in the cache before it is called."""

    def __init__(self, config: BlockDrafterConfig, index: int) -> None:
        super().__init__(untyped(config), index)
        self.self_attn.is_causal = False  # without a mask a row sees all of the block
        if config.conv_kernel_size is not None:
            self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def forward(self, hidden_states: Tensor, **options: Any) -> Tensor:
        """Map rows [B, R, d] to [B, R, d]; `options` are keyword arguments of the attention."""
        if self.self_attn.config.conv_kernel_size is None:
            return super().forward(hidden_states, **options)

        def attend(rows: Tensor) -> Tensor:
            return self.self_attn(hidden_states=rows, **options)[0]

        hidden = hidden_states + self.attention_conv(self.input_layernorm(hidden_states), attend)  # [B, R, d]
        return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)


_SHARED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("attention_bias", "attention_dropout", "rms_norm_eps"),
)
"""Fields that configs of Qwen3 and Gemma 4 have by one name."""


class Gemma4BlockLayer(Gemma4TextDecoderLayer):
    """The same with Gemma 4's norms, of values, too, unscaled attention, and a scalar; windows are in the masks."""

    def __init__(self, config: BlockDrafterConfig, index: int) -> None:
        heads = {"global_head_dim": config.head_dim, "num_global_key_value_heads": config.num_key_value_heads}
        theirs = Gemma4TextConfig(
            **{key: getattr(config, key) for key in _SHARED} | heads,
            layer_types=["full_attention"] * config.num_hidden_layers,
            hidden_activation=config.hidden_act,
            hidden_size_per_layer_input=0,
            attention_k_eq_v=config.keys_are_values,
        )
        super().__init__(theirs, index)
        self.self_attn.config, self.self_attn.is_causal = untyped(config), False


class BlockConvolution(nn.Module):
    """Causal convolutions along a block, before and after a sublayer; the kernels depend on the row.

    Channel c of row t becomes the sum over taps s of (base_s,c + delta_t,s,group(c)) times that of row t - s; there is
    nothing before row 0. Both kernels come from the sublayer's normed input.
    """

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__()
        self.taps, self.block, width = config.conv_kernel_size or 1, config.block_size, config.hidden_size
        self.groups = width // config.conv_group_size
        base = torch.zeros(2, self.taps, width)
        base[:, 0] = 1  # the identity
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, 2 * self.taps * self.groups, bias=False)

    def forward(self, normed: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what is added to the residual, [B, R, d], from normed rows of blocks that follow each other."""
        blocks = normed.unflatten(1, (-1, self.block))  # [B, A, S, d]
        varied = self.kernel_projection(blocks).unflatten(-1, (2, self.taps, self.groups, 1))  # [B, A, S, 2, T, G, 1]
        base = self.base_kernel.unflatten(-1, (self.groups, -1))  # [2, T, G, g]
        before, after = (base + varied).flatten(-2).unbind(-3)  # [B, A, S, T, d] twice
        inner = sublayer(self._mixed(blocks, before).flatten(1, 2))  # [B, R, d]
        return self._mixed(inner.unflatten(1, (-1, self.block)), after).flatten(1, 2)

    def _mixed(self, blocks: Tensor, kernels: Tensor) -> Tensor:
        """Return blocks [B, A, S, d] mixed along S by kernels [B, A, S, T, d]."""
        padded = nn.functional.pad(blocks, (0, 0, self.taps - 1, 0))  # [B, A, T - 1 + S, d]
        windows = padded.unfold(2, self.taps, 1).flip(-1)  # [B, A, S, d, T], the row itself first
        return (windows.transpose(-1, -2) * kernels).sum(-2)


_PIECE = 4096  # tokens whose states stand side by side at once


class JointProjection(NamedTuple):
    """The maps from the context to keys and values of all layers."""

    weight: Tensor  # [2 n H d_h, d], keys of all layers, then values
    bias: Tensor | None  # [2 n H d_h]
    gains: Tensor  # [n, 1, d_h] of the norms of keys


class Block:
    """A block that was filled in: hidden [B, S, d] after the final norm, and the token [B] of the first row."""

    def __init__(self, network: BlockNetwork, hidden: Tensor, last: Tensor, length: int | None = None) -> None:
        first, whole = network.config.first_row, network.config.num_drafts
        self.network, self.hidden, self.last = network, hidden, last
        self.length = whole if length is None or network.joint_law.needs_window else length
        self.rows = hidden[..., first : first + self.length, :]  # [B, m, d]
        self.anchor = hidden[..., 0, :] if first else None  # [B, d], a row that does not draft

    @cached_property
    def columns(self) -> Tensor:
        """Logits [B, m, v] over the draft vocabulary, before the law."""
        return self.network.draft_logits(self.rows)

    @property
    def logits(self) -> Tensor:
        """Logits [B, m, V] before the law, -inf for tokens that are not drafted."""
        part = self.network.draft_vocabulary
        return self.columns if part is None else part.spread(self.columns, -torch.inf)

    @cached_property
    def law(self) -> WindowDistribution:
        """The distribution of the m tokens after b, over their columns."""
        last, network = self.last.to(self.rows.device), self.network
        known = self.anchor, network.draft_vocabulary, network.embed
        return network.joint_law.distribution(self.rows, self.columns, last, *known)

    @cached_property
    def distribution(self) -> WindowDistribution:
        """The distribution of the m tokens after b."""
        part = self.network.draft_vocabulary
        return self.law if part is None else PartialDistribution(self.law, part)

    def of_tree(self) -> WindowDistribution:
        """Return the distribution with axes [B, 1], which takes many prefixes for every sequence."""
        return Block(self.network, self.hidden[:, None], self.last[:, None], self.length).distribution


class BlockNetwork(DraftModel):
    """The parameters of a block drafter, and its forward for rows, which drafting and training share.

    Embeddings and unembedding are the backbone's, looked up when needed, unless the checkpoint has its own; they are
    always frozen.
    """

    config: BlockDrafterConfig
    config_class = BlockDrafterConfig
    drafts_at_once = True
    _no_split_modules = ["BlockLayer", "Gemma4BlockLayer"]

    def __init__(self, config: BlockDrafterConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"
        self._backbones = []
        width, eps = config.hidden_size, config.rms_norm_eps
        features = len(self.feature_layers) * (config.target_hidden_size or width)
        self.fc, self.hidden_norm = nn.Linear(features, width, bias=False), Qwen3RMSNorm(width, eps)
        layer = Gemma4BlockLayer if config.body == "gemma4" else BlockLayer
        self.layers = nn.ModuleList([layer(config, index) for index in range(config.num_hidden_layers)])
        self.norm, self.rotary_emb = Qwen3RMSNorm(width, eps), Qwen3RotaryEmbedding(untyped(config))
        self.add_draft_ids(config.draft_vocab_size, config.vocab_size)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(config.vocab_size, width).requires_grad_(False)
        if config.mask_embedding:
            self.mask_embedding = nn.Parameter(torch.zeros(width), requires_grad=False)
        if config.own_unembedding:
            self.lm_head = nn.Linear(width, self.draft_size, bias=False).requires_grad_(False)
        law = LAWS[config.law](config, **(config.law_options or {}))
        self.add_module(law.module_name, law)
        if config.has_confidence:
            self.confidence_head = ConfidenceHead(config, law.width if config.confidence_reads_token else 0)
        self.post_init()

    @property
    def feature_layers(self) -> list[int]:
        return list(self.config.feature_layers or ())

    @property
    def joint_law(self) -> BlockLaw:
        """The module that makes the distribution of a block's tokens."""
        return cast(BlockLaw, getattr(self, LAWS[self.config.law].module_name))

    def get_input_embeddings(self) -> nn.Module | None:
        """Return the drafter's own embeddings, or None where it reads the backbone's."""
        return self.embed_tokens if self.config.own_embeddings else None

    def fuse(self, hidden_states: States) -> Tensor:
        """Return the context of tokens, [B, T, d], on the drafter's device, of states by `feature_layers`."""
        chosen = [cast(Tensor, hidden_states[index]) for index in self.feature_layers]
        pieces = zip(*(state.split(_PIECE, dim=1) for state in chosen))
        joined = (torch.cat([each.to(self.fc.weight) for each in some], -1) for some in pieces)
        fused = [self.hidden_norm(self.fc(piece)) for piece in joined]
        return fused[0] if len(fused) == 1 else torch.cat(fused, dim=1)

    def joint_projection(self) -> JointProjection:
        """Return the projections of all layers side by side; gradients reach them."""
        layers = [cast(BlockLayer, layer).self_attn for layer in self.layers]
        values = [each.k_proj if self.config.keys_are_values else each.v_proj for each in layers]
        maps = [each.k_proj for each in layers] + values
        bias = torch.cat([each.bias for each in maps]) if self.config.attention_bias else None
        gains = torch.stack([each.k_norm.weight for each in layers])[:, None]  # [n, 1, d_h]
        return JointProjection(torch.cat([each.weight for each in maps]), bias, gains)

    def extend(self, context: Tensor, positions: Tensor, cache: Cache, joint: JointProjection) -> None:
        """Write keys and values of a context [B, C, d] at positions [B, C] to the cache of every layer."""
        count, width = self.config.num_hidden_layers, self.config.head_dim
        both = nn.functional.linear(context, joint.weight, joint.bias).unflatten(-1, (2, count, -1, width))
        keys, values = both.unbind(2)  # [B, C, n, H, d_h]
        keys = (joint.gains * self._normed(keys)).flatten(2, 3)  # [B, C, n H, d_h]
        values = self._normed(values) if self.config.body == "gemma4" else values
        cos, sin = self.rotary_emb(context, positions)
        turned, _ = apply_rotary_pos_emb(keys, keys[:, :, :0], cos, sin, unsqueeze_dim=2)
        laid = turned.unflatten(2, (count, -1)).permute(2, 0, 3, 1, 4), values.permute(2, 0, 3, 1, 4)
        for index, (key, value) in enumerate(zip(*laid)):  # [B, H, C, d_h] twice
            cache.update(key, value, index)

    def _normed(self, heads: Tensor) -> Tensor:
        """Return heads [..., d_h] of mean square 1."""
        wide = heads.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)).to(heads.dtype)

    def rows(
        self, embeddings: Tensor, positions: Tensor, masks: Mapping[str, Tensor | None], cache: Cache | None
    ) -> Tensor:
        """Run rows [B, R, d] (`embed_rows`) at positions [B or 1, R] behind the context in a cache, with the last norm.

        `masks` [B or 1, 1, R, W] are by kind of layer; None: a row sees all columns and all rows.
        """
        hidden, options = embeddings, {"position_embeddings": self.rotary_emb(embeddings, positions), CACHE: cache}
        for layer, kind in zip(self.layers, self.config.layer_types or ()):
            hidden = layer(hidden, attention_mask=masks[kind], **options)
        return self.norm(hidden)

    def embed_rows(self, last: Tensor) -> Tensor:
        """Return the inputs of blocks [.., S, d]: the embedding of b [..], and of mask tokens."""
        config = self.config
        ids = last[..., None].expand(*last.shape, config.block_size)  # [.., S]
        is_first = cached_arange(config.block_size, last.device) == 0  # [S]
        embedded = self.embed(torch.where(is_first, ids, config.mask_token_id)).to(self.fc.weight)  # [.., S, d]
        if config.mask_embedding:
            embedded = torch.where(is_first.to(embedded.device)[:, None], embedded, self.mask_embedding)
        return embedded if config.input_embedding_scale == 1 else embedded * config.input_embedding_scale

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings of ids, with the scale of a family that has one, and without a norm."""
        table = self.embed_tokens if self.config.own_embeddings else self.backbone.get_input_embeddings()
        if isinstance(table, nn.Embedding) and "embed_norm" in dict(table.named_children()):
            return nn.functional.embedding(ids, table.weight.detach())
        return frozen(table, ids.to(self.device) if self.config.own_embeddings else ids)

    def draft_logits(self, rows: Tensor) -> Tensor:
        """Return logits [.., v] over the draft vocabulary from rows [.., d], in float32 (float64 stays)."""
        unembedding = self.lm_head if self.config.own_unembedding else output_embeddings(self.backbone)
        logits = exact(frozen(unembedding, rows.to(dtype_of(unembedding, rows))).to(rows.device))
        logits, cap = logits * self.config.output_multiplier, self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def block(
        self, context: Tensor, last: Tensor, attention_mask: Tensor | None = None, past_key_values: Cache | None = None
    ) -> Block:
        """Fill in a block after every sequence, behind b, whose id is `last` [B].

        The context [B, C, d] (`fuse`) is that of all verified tokens, or of those that are not in `past_key_values`
        yet, a `DynamicCache` that holds it afterwards. `attention_mask` [B, past + C] is 0 for padding.
        """
        check_attention(self.config, "block drafters")
        cache = DynamicCache() if past_key_values is None else past_key_values
        past, (batch, count, _) = cache.get_seq_length(), context.shape
        real = context.new_ones(batch, past + count) if attention_mask is None else attention_mask.to(context.device)
        if real.shape != (batch, past + count):
            raise ValueError(f"attention_mask has shape {tuple(real.shape)}, not {(batch, past + count)}")
        real = real.bool()
        columns = (real.long().cumsum(1) - 1).clamp(min=0)  # [B, C]
        if count:
            self.extend(context.to(self.fc.weight), columns[:, past:], cache, self.joint_projection())
        embedded = self.embed_rows(last)  # [B, S, d]
        positions = real.sum(1, keepdim=True) + cached_arange(self.config.block_size, real.device)  # [B, S]
        distance = positions[..., None] - columns[:, None]  # [B, S, C]
        hidden = self.rows(
            embedded, positions, block_masks(self.config, real[:, None], distance, embedded.dtype), cache
        )
        cache.crop(-self.config.block_size)
        return Block(self, hidden, last)

    def confidence(self, block: Block, drafts: Tensor | DraftTree) -> Tensor | None:
        """Return logits [B, m]: are drafts, a tree or tokens [B, m], accepted if those before are? None: no head."""
        if not self.config.has_confidence:
            return None
        tree = DraftTree.chain(drafts) if isinstance(drafts, Tensor) else drafts
        rows = taken(block.rows, tree.positions()[:, 1:] - 1)  # [B, m, d]
        if not self.config.confidence_reads_token:
            return self.confidence_head(rows)
        known = torch.cat([block.last[:, None].to(tree.tokens.device), tree.tokens], 1)  # [B, m + 1]
        return self.confidence_head(rows, self.joint_law.embed(known.gather(1, tree.parents + 1)))


class BlockSession(HeadSession):
    """The drafts of one call of an attached `BlockDrafter`."""

    def __init__(self, drafter: BlockNetwork, options: DraftOptions) -> None:
        is_argmax = options.do_sample and drafter.config.draft_sampling == "argmax"
        self.options = replace(options, do_sample=False) if is_argmax else options
        if is_argmax:  # constraints have states
            vars(self.options)["processing"] = options.processing
        pays = drafter.config.law == "independent" and options.block is not None and not self.options.do_sample
        self.grows = options.draft_tree is not None or (pays and takes_dense_masks(options.backbone))
        self.drafter, self.num_tokens, self.vocabulary = drafter, options.num_tokens, drafter.draft_vocabulary
        self.hidden_layers: HiddenLayers = drafter.feature_layers
        self.column = 0 if self.vocabulary is None else int(self.vocabulary.ids[0])
        self.cache = DynamicCache(config=drafter.config)  # layers with a window keep no more than that

    def begin(self, outputs: PrefillOutput, view: CacheView) -> None:
        """Take the context of the prompt; columns of an earlier call in the backbone's cache are ignored."""
        self.view, drafter = view, self.drafter
        self.grows = self.grows and (view.takes_trees or self.options.draft_tree is not None)
        context, limit = drafter.fuse(outputs.hidden_states), self.options.max_length  # [B, L, d]
        span = self.num_tokens + 1 + drafter.config.block_size
        self.layout = drafter_layout(view, context.shape[1], limit, span, "block")
        self.layout.install_layers(self.cache)
        weight, bias, gains = drafter.joint_projection()
        weight, gains = view.held("block.joint", weight.detach()), view.held("block.gains", gains.detach())
        bias = None if bias is None else view.held("block.bias", bias.detach())
        self.joint = JointProjection(weight, bias, gains)
        self.layout.block_offset = -context.shape[1]
        self._extend(context)
        self.layout.block_offset = 0

    def advance(self, outputs: TargetOutput, result: VerificationResult) -> None:
        """Take the context of b and of the accepted drafts."""
        new = self.view.new_tokens
        if self.view.is_fixed:
            states = each_state(outputs.hidden_states, lambda state: of_accepted(state, new.on_device)) or ()
        elif new.longest == 0:
            return
        else:
            states = outputs.first(new.longest)
        self._extend(self.drafter.fuse(states))
        self.layout.keep(new)

    def propose(self, tokens: Sequences, length: int) -> DraftTree:
        """Return a chain or a tree after every sequence, with paths of at most `length` tokens."""
        if length < 1:
            return DraftTree.chain(tokens.ids[:, :0])
        block, masks = self._block(tokens.last(), length), self.options.masks(tokens)
        if self.grows and (masks is None or self.options.draft_tree is not None):
            growth = WindowGrowth(block.of_tree(), block.last[:, None])
            return self._sure(block, grow(growth, self.options, length, masks))
        return self._sure(block, DraftTree.chain(*self._chain(block.distribution, length, masks)))

    def _sure(self, block: Block, tree: DraftTree) -> DraftTree:
        """Return a tree without tokens that will hardly be accepted, and without what is below them.

        The estimate of a token does not depend on the token, so that what is left is distributed as before: a node has
        all children that were drawn, or none.
        """
        least = self.drafter.config.confidence_threshold
        likely = self.drafter.confidence(block, tree) if least else None
        if least is None or likely is None:
            return tree
        is_sure = to_device(likely.sigmoid() >= least, tree.tokens.device)
        real = (is_sure[:, None] | ~tree.mask()[:, 1:, 1:]).all(-1)  # [B, m]
        return of_real(tree, real, not self.view.is_fixed)

    def _extend(self, context: Tensor) -> None:
        """Write a context [B, C, d] to the cache, from the layout's block on."""
        layout = self.layout
        positions = layout.positions(context.shape[1])  # [B, C]
        layout.begin(context.shape[1])
        self.drafter.extend(context, to_device(positions, context.device), self.cache, self.joint)

    def _block(self, last: Tensor, length: int) -> Block:
        """Fill in a block behind the context."""
        drafter, layout, config = self.drafter, self.layout, self.drafter.config
        size, device = config.block_size, drafter.device
        embedded = drafter.embed_rows(last)  # [B, S, d]
        kinds = dict.fromkeys(config.layer_types or ())
        layout.is_maskless = sees_all(config) and not layout.needs_mask(1)
        masks: dict[str, Tensor | None] = dict.fromkeys(kinds)
        for kind in () if layout.is_maskless else kinds:
            rows = seen_rows(config, kind, layout.ends.device)[None]  # [1, S, S]
            depths = cached_arange(size, layout.ends.device)[None]
            seen = layout.visible(size, window_of(config, kind), new=rows, depths=depths)  # [B, S, W]
            masks[kind] = model_mask(to_device(seen, device), config, embedded.dtype)
        layout.begin(size)
        positions = layout.counts[:, None] + cached_arange(size, layout.ends.device)  # [B, S]
        hidden = drafter.rows(embedded, to_device(positions, device), masks, self.cache)
        return Block(drafter, hidden, to_device(last, device), length)
