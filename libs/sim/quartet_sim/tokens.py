"""Tokens without a tokenizer: text in, output out.

Four bytes of text are one token, whose id is those bytes as a little-endian u32. So a text prompt, its ids, and the
answer to it (pieces of exactly four ASCII bytes) share one key space: a conversation that comes back as text finds
its own KV wherever its bytes still align.
"""

import sys
from array import array
from hashlib import shake_128
from math import log
from typing import Final

from xxhash import xxh3_64_intdigest

from quartet_core.openai import Inference

_TOKEN_BYTES: Final = 4

_WORDS: Final = (
    "the and for are but not you all any can had her was one our out day get has him his how man new now old see two "
    "way who did its let put say she too use act add age ago aid aim air arm art ask bad bag bar bed bet big bit box "
    "bus buy car cat cow cup cut dog dry due ear eat egg end eye far few fit fix fly fun gas got hat hit hot ice job "
    "key kid law lay leg lie lot low map may mix net nor odd off oil own pay pen pet pie pin ran raw red rid row run "
    "sat sea set sit six sky son sum sun tax tea top toy try war wet"
)

PIECES: Final = tuple(f" {word}" for word in _WORDS.split()) * 2
"""The text of an output token by output byte: 128 words, twice over, so that any byte chooses one."""

PIECE_IDS: Final = tuple(int.from_bytes(piece.encode(), "little") for piece in PIECES)
"""Their token ids."""

_NATURAL_MEAN_TOKENS: Final = 200.0


def text_ids(text: bytes) -> "array[int]":
    """Token ids of a text prompt; the last token is padded with zero bytes."""
    ids = array("I", text + bytes(-len(text) % _TOKEN_BYTES))
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def prompt_ids(inference: Inference) -> "array[int]":
    """Token ids of a request's prompt: the client's own, or those of its text."""
    if inference.prompt_ids is not None:
        return array("I", inference.prompt_ids)
    return text_ids(inference.prompt_text)


def fingerprint(prompt: bytes) -> int:
    """What the answer to a prompt (its ids as bytes) depends on: not the worker, its block size, nor the salt."""
    return xxh3_64_intdigest(prompt)


def output(fingerprint: int, tokens: int) -> bytes:
    """The first ``tokens`` output tokens of a prompt, a byte each: an index into ``PIECES`` and ``PIECE_IDS``."""
    return shake_128(fingerprint.to_bytes(8, "little")).digest(tokens)


def natural_tokens(fingerprint: int) -> int:
    """After how many tokens the model would end its answer by itself: exponential, 200 in the mean, at least 1.

    A stand-in with the long tail of real answers; a client that sets ``max_tokens`` is given exactly that.
    """
    chance = (xxh3_64_intdigest(b"end", fingerprint) + 1) / 2**64
    return 1 + int(-_NATURAL_MEAN_TOKENS * log(chance))
