"""EvaByte's tokenizer: 64 literal special tokens (ids 0 to 63) and the 256 bytes of UTF-8 (id = byte + 64).

Size embeddings by the model's config, not by `vocab_size`, which leaves out the 64 specials, as in transformers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, cast

from transformers import AddedToken, BatchEncoding, PreTrainedTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from ...generation.tensors.wrapped_models import Kwargs
from ..common.remote_code import RemoteCodeTokenizerMixin

Template = str | dict[str, str] | list[dict[str, str]] | None
BYTE_OFFSET = 64
"""The id of byte 0."""

SPECIAL_TOKENS: tuple[str, ...] = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<unk>",
    "<sep>",
    "<repo_name>",
    "<file_sep>",
    "<t2v_token>",
    "<v2t_token>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    *(f"<extra_id_{index}>" for index in range(12, BYTE_OFFSET)),
)
"""The literals of ids 0 to 63, in order. `<extra_id_5>` to `<extra_id_11>` are plain text."""

CHAT_TEMPLATE = r"""
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] }}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for turn in turns %}
    {%- if turn['role'] not in ['user', 'assistant'] %}
        {{- raise_exception('Conversation roles must be user or assistant') }}
    {%- endif %}
    {{- '<|start_header_id|>' + turn['role'] + '<|end_header_id|>\n\n' }}
    {%- if turn['role'] == 'assistant' %}
        {%- generation %}{{- turn['content'] + '<|eot_id|>' }}{%- endgeneration %}
    {%- else %}
        {{- turn['content'] + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
"""Jinja text of the chat format; the marked assistant turns are what trainers learn from."""

# The official template says the same without `{% generation %}` marks: a directory that carries it would lose the mask.
_UNMARKED_TEMPLATE_SHA256 = "e7f20b18720fcbdf7a411fe92aa7e944b13b762a7b9afdf269c9972f78f57669"

_BYTE_TOKENS = {chr(byte): byte + BYTE_OFFSET for byte in range(256)}
_RESERVED_IDS = frozenset(range(BYTE_OFFSET))
_ASSISTANT, _OTHERS = -1, -2  # marks of chat tokens: negative, to differ from the padding id
_BASE_TOKENS = (*SPECIAL_TOKENS, *_BYTE_TOKENS)


class EvaByteTokenizer(RemoteCodeTokenizerMixin, PreTrainedTokenizer):
    """Byte-level tokenizer of the EvaByte models: 320 ids, `<bos>` in front of every text, no eos.

    Text is cut at the literals of the special tokens (`split_special_tokens=True` reads them as bytes), the rest is
    UTF-8; so user text that contains a literal such as `<|eot_id|>` injects that id. Decoding joins the bytes and drops
    those that are not UTF-8. A byte's token string is the Latin-1 character of the same number.

    Args:
        bos_token: Begins every text, also the second one of a pair.
        eos_token: Ends a generation. Base models use `<eos>`, chat (SFT) models `<|eot_id|>`.
        unk_token: Named by the format, never produced.
        sep_token: Separator.
        pad_token: Fills short sequences, on the left by default (`padding_side`), as generation needs.
        chat_template: Jinja text; `CHAT_TEMPLATE` by default.
        **kwargs: As for every `PreTrainedTokenizer`. `added_tokens_decoder` and `extra_special_tokens` may add tokens
            from id 320 on; ids 0 to 63 are always the 64 specials, with any flags in a directory.

    Raises:
        ValueError: A named token that is no token, or an `added_tokens_decoder` that contradicts ids 0 to 319.

    Example:
        >>> tokenizer = EvaByteTokenizer(eos_token="<|eot_id|>")
        >>> tokenizer("né")["input_ids"]
        [1, 174, 259, 233]
        >>> tokenizer.decode([1, 174, 259, 233], skip_special_tokens=True)
        'né'
    """

    remote_classes = {"AutoTokenizer": "EvaByteTokenizer"}
    model_input_names = ["input_ids", "attention_mask"]
    padding_side = "left"

    def __init__(
        self,
        bos_token: str | AddedToken = "<bos>",
        eos_token: str | AddedToken = "<eos>",
        unk_token: str | AddedToken = "<unk>",
        sep_token: str | AddedToken = "<sep>",
        pad_token: str | AddedToken = "<pad>",
        chat_template: Template = None,
        **kwargs: Any,
    ) -> None:
        named = {
            "bos_token": bos_token,
            "eos_token": eos_token,
            "unk_token": unk_token,
            "sep_token": sep_token,
            "pad_token": pad_token,
        }
        added = _complete_added_tokens(kwargs.pop("added_tokens_decoder", None) or {})
        known = {token.content for token in added.values()}
        for name, token in named.items():
            if token is not None and str(token) not in known:
                raise ValueError(f"{name}={str(token)!r} is not in the vocabulary; take one of the 64 special tokens")
        kwargs.pop("auto_map", None)  # it names code of the directory that is read, which a saved one would not have
        extra = kwargs.pop("extra_special_tokens", None) or kwargs.pop("additional_special_tokens", None) or ()
        kwargs["extra_special_tokens"] = list(dict.fromkeys([*SPECIAL_TOKENS, *map(str, extra)]))
        kwargs["special_tokens_pattern"] = "bos"
        super().__init__(**named, added_tokens_decoder=added, chat_template=_marked_template(chat_template), **kwargs)

    @property
    def vocab_size(self) -> int:
        """The number of byte tokens, 256, without specials; `len(tokenizer)` counts all ids."""
        return len(_BYTE_TOKENS)

    def get_vocab(self) -> dict[str, int]:
        """Return the token strings and their ids, in the order of ids."""
        vocabulary = {**_BYTE_TOKENS, **self.added_tokens_encoder}
        return dict(sorted(vocabulary.items(), key=lambda item: item[1]))

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of every token, in the order of ids."""
        return [self._bytes_of[token] for token in self._id_of]

    def _update_total_vocab_size(self) -> None:
        # The base class calls this after every change to the added tokens, so the tables below are never stale.
        super()._update_total_vocab_size()
        self._id_of = self.get_vocab()
        self._token_of = {index: token for token, index in self._id_of.items()}
        added = self.added_tokens_encoder
        self._bytes_of = {token: token.encode() for token in added}
        self._bytes_of |= {token: token.encode("latin-1") for token in _BYTE_TOKENS}
        longest_first = sorted(added, key=len, reverse=True)
        self._literals = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def tokenize(self, text: str, **kwargs: object) -> list[str]:
        """Cut text into token strings, without `<bos>`.

        Args:
            text: Text that UTF-8 can encode.
            **kwargs: `split_special_tokens` (bool) reads the literals of special tokens as bytes.

        Returns:
            One string per token: a special's literal, or the Latin-1 character of a byte.

        Raises:
            UnicodeEncodeError: The text holds a lone surrogate.
        """
        if kwargs.get("split_special_tokens", self.split_special_tokens):
            return self._tokenize(text)
        tokens: list[str] = []
        for index, piece in enumerate(self._literals.split(text)):
            tokens.extend([piece] if index % 2 else self._tokenize(piece))  # odd pieces are what the pattern caught
        return tokens

    def _tokenize(self, text: str, **kwargs: object) -> list[str]:
        return list(text.encode("utf-8").decode("latin-1"))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | None | list[int | None]:
        """Return the ids of token strings; None for a string that is no token (`<unk>` is never produced)."""
        if isinstance(tokens, str):
            return self._id_of.get(tokens)
        return list(map(self._id_of.get, tokens))

    def convert_ids_to_tokens(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str | list[str]:
        """Return the token strings of ids.

        Args:
            ids: One id, or several.
            skip_special_tokens: Leaves out ids 0 to 63 and other special tokens (from several ids only).

        Returns:
            A string for one id, a list of strings for several.

        Raises:
            ValueError: An id outside the vocabulary.
        """
        single = isinstance(ids, int)
        indices = [ids] if single else list(map(int, ids))
        if skip_special_tokens and not single:
            skipped = _RESERVED_IDS.union(self.all_special_ids)
            indices = [index for index in indices if index not in skipped]
        try:
            tokens = list(map(self._token_of.__getitem__, indices))
        except KeyError as error:
            limit = max(self._token_of)
            raise ValueError(f"token id {error.args[0]} is outside the vocabulary: ids go from 0 to {limit}") from None
        return tokens[0] if single else tokens

    def _convert_id_to_token(self, index: int) -> str:
        return cast(str, self.convert_ids_to_tokens(index))  # called by stop strings in `generate`

    def convert_tokens_to_string(self, tokens: Iterable[str]) -> str:
        """Return the text of token strings; bytes that are not UTF-8, an unfinished character included, vanish.

        Raises:
            ValueError: A string that is no token.
        """
        try:
            return b"".join(map(self._bytes_of.__getitem__, tokens)).decode("utf-8", errors="ignore")
        except KeyError as error:
            raise ValueError(f"{error.args[0]!r} is no token: pass Latin-1 characters or special tokens") from None

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]] | list[list[dict[str, str]]],
        *args: Any,
        return_assistant_tokens_mask: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Render a conversation in the chat format and, by default, encode it (with no second `<bos>`).

        Args:
            conversation: Messages with `role` and `content`, or a batch of such lists. Only the first may be a system
                message; an empty one is written if there is none.
            *args: As in transformers.
            return_assistant_tokens_mask: Adds `assistant_masks`, 1 on the tokens that the assistant wrote (content and
                `<|eot_id|>`). The base class offers it for Rust tokenizers only.
            **kwargs: As in transformers.

        Returns:
            As in transformers: a `BatchEncoding`, ids (`return_dict=False`) or text (`tokenize=False`).

        Raises:
            jinja2.TemplateError: A role other than user or assistant.
            ValueError: No messages, or an option that a mask cannot be combined with.
            UnicodeEncodeError: A lone surrogate.
        """
        if not return_assistant_tokens_mask:
            return super().apply_chat_template(conversation, *args, **kwargs)
        required = {"tokenize": True, "return_dict": True, "continue_final_message": False}
        for name, value in (required | {"sanitize_control_tokens": False}).items():
            if bool(kwargs.pop(name, value)) is not value:
                raise ValueError(f"return_assistant_tokens_mask=True needs {name}={value}")
        return self._encode_chat_with_mask(conversation, *args, **kwargs)

    def _encode_chat_with_mask(
        self,
        conversation: list[dict[str, str]] | list[list[dict[str, str]]],
        tools: list[Any] | None = None,
        documents: list[dict[str, str]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        *,
        padding: Any = False,
        truncation: Any = False,
        max_length: int | None = None,
        return_tensors: Any = None,
        tokenizer_kwargs: Kwargs | None = None,
        **template_kwargs: Any,
    ) -> BatchEncoding:
        chats, is_batched = _as_batch(conversation)
        texts, spans = render_jinja_template(
            conversations=chats,
            tools=tools,
            documents=documents,
            chat_template=self.get_chat_template(chat_template, tools),
            return_assistant_tokens_mask=True,
            add_generation_prompt=add_generation_prompt,
            **{**self.special_tokens_map, **template_kwargs},
        )
        options = tokenizer_kwargs or {}
        chats = [self._ids_and_marks(text, marked, **options) for text, marked in zip(texts, spans, strict=True)]
        # the base class truncates and pads the marks as if they were ids, so they cannot drift
        sizes = {"padding": padding, "truncation": truncation, "max_length": max_length}
        fit = partial(self, add_special_tokens=False, **sizes, **options)
        encoded = dict(fit([ids for ids, _ in chats]))
        marked = fit([marks for _, marks in chats])["input_ids"]
        encoded["assistant_masks"] = [[int(mark == _ASSISTANT) for mark in marks] for marks in marked]
        if not is_batched and return_tensors is None:
            encoded = {name: values[0] for name, values in encoded.items()}
        return BatchEncoding(encoded, tensor_type=return_tensors)

    def _ids_and_marks(self, text: str, spans: list[tuple[int, int]], **options: object) -> tuple[list[int], list[int]]:
        """Return the ids of a rendered chat and, for each, `_ASSISTANT` or `_OTHERS`; spans are the assistant's."""
        cuts = [0, *(cut for span in spans for cut in span), len(text)]
        ids: list[int] = []
        marks: list[int] = []
        for index, (start, end) in enumerate(pairwise(cuts)):
            piece = [self._id_of[token] for token in self.tokenize(text[start:end], **options)]
            ids.extend(piece)
            marks.extend([_ASSISTANT if index % 2 else _OTHERS] * len(piece))
        return ids, marks


def _complete_added_tokens(tokens: dict[int, AddedToken]) -> dict[int, AddedToken]:
    """Return all tokens that are not bytes: the 64 specials with true flags, and those of `tokens` from id 320 on."""
    added = {index: AddedToken(literal, special=True, normalized=False) for index, literal in enumerate(SPECIAL_TOKENS)}
    for index, token in tokens.items():
        if index < len(_BASE_TOKENS) and str(token) != _BASE_TOKENS[index]:
            raise ValueError(f"added_tokens_decoder: id {index} is {_BASE_TOKENS[index]!r}, not {str(token)!r}")
        if index >= BYTE_OFFSET:
            added[index] = token
    return added


def _marked_template(template: Template) -> Template:
    """Return our template in place of none or of the official unmarked one, else `template`."""
    if template is None:
        return CHAT_TEMPLATE
    if isinstance(template, str) and hashlib.sha256(template.strip().encode()).hexdigest() == _UNMARKED_TEMPLATE_SHA256:
        return CHAT_TEMPLATE
    return template


def _as_batch(conversation: Any) -> tuple[list[Any], bool]:
    """Return a list of conversations and whether it was one; keys whose value is None are left out."""
    if len(conversation) == 0:
        raise ValueError("conversation is empty: pass at least one message")
    is_batched = isinstance(conversation[0], (list, tuple)) or hasattr(conversation[0], "messages")
    chats = conversation if is_batched else [conversation]
    return [
        [
            {key: value for key, value in message.items() if value is not None}
            for message in getattr(chat, "messages", chat)
        ]
        for chat in chats
    ], is_batched
