"""EvaByte's tokenizer: 64 literal special tokens (ids 0 to 63) and the 256 bytes of UTF-8 (id = byte + 64).

Size embeddings by the model's config, not by `vocab_size`, which leaves out the 64 specials, as in transformers.
"""

from __future__ import annotations

import hashlib
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from ..common.remote_code import RemoteCodeTokenizerMixin

Template = str | dict[str, str] | list[dict[str, str]] | None
BYTE_OFFSET = 64  # the id of byte 0

SPECIAL_TOKENS: tuple[str, ...] = (
    *["<pad>", "<bos>", "<eos>", "<unk>", "<sep>", "<repo_name>", "<file_sep>", "<t2v_token>", "<v2t_token>"],
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *(f"<extra_id_{index}>" for index in range(12, BYTE_OFFSET)),
)
"""The literals of ids 0 to 63, in order."""

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
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}
"""The bytes of the characters that stand for them in `tokenizers`."""
_VOCABULARY = {token: index for index, token in enumerate(SPECIAL_TOKENS)} | {
    character: byte + BYTE_OFFSET for character, byte in _BYTES.items()
}


class EvaByteTokenizer(RemoteCodeTokenizerMixin, PreTrainedTokenizerFast):
    """Byte-level tokenizer of the EvaByte models: 320 ids, `<bos>` in front of every text, no eos.

    Text is cut at the literals of the special tokens (`split_special_tokens=True` reads them as bytes), the rest is
    UTF-8; so user text that contains a literal such as `<|eot_id|>` injects that id. Decoding joins the bytes and drops
    those that are not UTF-8.

    Args:
        eos_token: Ends a generation. Base models use `<eos>`, chat (SFT) models `<|eot_id|>`.
        chat_template: Jinja text; `CHAT_TEMPLATE` by default.
        **kwargs: As for every tokenizer of transformers; tokens may be added from id 320 on.

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

    def __init__(self, eos_token: str | AddedToken = "<eos>", chat_template: Template = None, **kwargs: Any) -> None:
        usual = {"bos_token": "<bos>", "unk_token": "<unk>", "sep_token": "<sep>", "pad_token": "<pad>"}
        kwargs = usual | kwargs | {"eos_token": eos_token, "chat_template": _marked_template(chat_template)}
        for name in ("auto_map", "vocab", "merges", "post_processor"):  # of the directory that is read
            kwargs.pop(name, None)
        added = {index: t for index, t in (kwargs.pop("added_tokens_decoder", None) or {}).items() if index > 319}
        known = {*_VOCABULARY, *map(str, added.values())}
        for name in (*usual, "eos_token"):
            if kwargs[name] is not None and str(kwargs[name]) not in known:
                raise ValueError(f"{name}={str(kwargs[name])!r} is not in the vocabulary; take one of the 64 specials")
        extra = kwargs.pop("extra_special_tokens", None) or kwargs.pop("additional_special_tokens", None) or ()
        kwargs["extra_special_tokens"] = list(dict.fromkeys([*SPECIAL_TOKENS, *map(str, extra)]))
        backend = Tokenizer(models.BPE(_VOCABULARY, []))
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        bos = str(kwargs["bos_token"])
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, _VOCABULARY[bos])]
        )
        super().__init__(tokenizer_object=backend, added_tokens_decoder=added, **kwargs)

    @property
    def vocab_size(self) -> int:
        """The number of byte tokens, 256, without specials; `len(tokenizer)` counts all ids."""
        return 256

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def token_bytes(self) -> list[bytes]:
        """Return the bytes of every token, in the order of ids."""
        tokens = list(map(str, map(self.backend_tokenizer.id_to_token, range(len(self)))))
        return [bytes([_BYTES[token]]) if token in _BYTES else token.encode() for token in tokens]

    def _decode(self, token_ids: int | list[int], skip_special_tokens: bool = False, **kwargs: object) -> str:
        ids, pieces = [token_ids] if isinstance(token_ids, int) else token_ids, dict(enumerate(self.token_bytes()))
        skipped = {*range(BYTE_OFFSET), *self.all_special_ids} if skip_special_tokens else ()
        return b"".join(pieces[index] for index in ids if index not in skipped).decode(errors="ignore")


def _marked_template(template: Template) -> Template:
    """Return our template in place of none or of the official unmarked one, else `template`."""
    text = template.strip().encode() if isinstance(template, str) else b""
    if template is None or hashlib.sha256(text).hexdigest() == _UNMARKED_TEMPLATE_SHA256:
        return CHAT_TEMPLATE
    return template
