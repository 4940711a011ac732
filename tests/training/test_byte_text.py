"""Bytes to ids and back, and writing them as they come."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.internals import RawWriter, TerminalWriter, decode, encode, escaped, writer_for
from tokenahead import EvaByteTokenizer

TOKENIZER = EvaByteTokenizer()


@given(st.binary(max_size=40))
def test_every_byte_survives(data):
    ids = encode(TOKENIZER, escaped(data))
    assert ids == [1, *(byte + 64 for byte in data)] and decode(TOKENIZER, ids) == data


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_text_is_encoded_as_the_tokenizer_does(text):
    assert encode(TOKENIZER, escaped(text.encode())) == TOKENIZER(text)["input_ids"]


def test_special_tokens_are_read_beside_broken_bytes_and_not_written():
    ids = encode(TOKENIZER, escaped(b"\xff<|eot_id|>\xfe"), add_special_tokens=False)
    assert ids == [319, 11, 318] and decode(TOKENIZER, ids) == b"\xff\xfe"


def test_added_tokens_are_written_as_their_text():
    tokenizer = EvaByteTokenizer()
    tokenizer.add_tokens(["word"])
    ids = encode(tokenizer, "a word")
    assert ids == [1, 161, 96, 320] and decode(tokenizer, ids) == b"a word"


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_terminal_sees_whole_characters_and_no_control_codes(size):
    screen, data = io.StringIO(), "né\U0001f600\t\x1b[2J\n".encode() + b"\xff\xc3"
    writer = TerminalWriter(screen)
    for start in range(0, len(data), size):
        writer.write(data[start : start + size])
    writer.close()
    assert screen.getvalue() == "né\U0001f600\t\ufffd[2J\n\ufffd\ufffd\n"


def test_a_file_gets_the_bytes_at_once_after_what_was_printed_before():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    file.write("before ")
    writer = writer_for(file)
    writer.write(b"\xff\n")
    assert isinstance(writer, RawWriter) and file.buffer.getvalue() == b"before \xff\n"
    writer.close()
    assert file.buffer.getvalue() == b"before \xff\n"


def test_a_stream_without_bytes_gets_text():
    assert isinstance(writer_for(io.StringIO()), TerminalWriter)
