"""Texts that cannot fit are refused before they are encoded, and long ones stop no other thread."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from llmjax.errors import PromptTooLong
from llmjax.tokenizer import SpecialTokens, Tokenizer
from llmjax.tokenizer import tokenizer as tokenizer_module
from llmjax.tokenizer.backend import LONG_TEXT, HuggingFaceBackend
from llmjax.tokenizer.pieces import ByteLevelPieces

SPECIAL = "<|special|>"  # the longest token, 11 bytes
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("q", "u"), ("i", "c"), ("ic", "k"), ("Ġ", "qu"), ("Ġqu", "ick")]


def pipeline() -> tokenizers.Tokenizer:
    """Byte-level BPE."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(merge) for merge in MERGES)]
    made = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return made


def wrapped(library: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(HuggingFaceBackend(library), ByteLevelPieces(), special=SpecialTokens())


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return wrapped(pipeline())


def test_long_texts_have_the_librarys_ids(tokenizer: Tokenizer) -> None:
    library = pipeline()
    for text in ("the quick the " * LONG_TEXT, "é中😀" * LONG_TEXT, f"a{SPECIAL}b" * LONG_TEXT):
        for parse in (True, False):
            library.encode_special_tokens = not parse
            assert tokenizer.encode(text, parse_special=parse) == library.encode(text).ids


def test_longest_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.max_token_bytes == len(SPECIAL)
    normalizing = pipeline()
    normalizing.normalizer = normalizers.NFKC()
    assert wrapped(normalizing).max_token_bytes == 4 * len(SPECIAL)


def test_what_no_token_is_long_enough_for_is_not_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object, **__: object) -> list[int]:
        raise AssertionError("encoded")

    monkeypatch.setattr(tokenizer.backend, "encode", encode)
    tokenizer.check_length("é" * 38, max_tokens=7)  # 76 bytes
    with pytest.raises(PromptTooLong, match="context of 7") as error:
        tokenizer.check_length("é" * 39, max_tokens=7, field="messages")
    assert error.value.field == "messages"


def test_counting_ends_when_it_is_enough(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "SLICE_CHARS", 100)
    seen: list[int] = []
    encode = tokenizer.backend.encode

    def noted(text: str, **options: bool) -> list[int]:
        seen.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer.backend, "encode", noted)
    with pytest.raises(PromptTooLong, match="at least 267 tokens"):  # 3 slices of 100, less 11 at each cut
        tokenizer.check_length("x" * 2200, max_tokens=200)
    assert seen == [100, 100, 100]


@given(text=st.lists(st.sampled_from(["the", " quick", " ", "é", SPECIAL, "x"]), max_size=200).map("".join))
def test_what_fits_is_never_refused(text: str) -> None:
    tokenizer = wrapped(pipeline())
    tokenizer.check_length(text, max_tokens=len(tokenizer.encode(text)))


@given(
    text=st.lists(st.sampled_from(["the", " quick", " ", "é", "x", "\n"]), max_size=300).map("".join),
    tokens=st.integers(0, 40),
)
def test_ends_are_the_whole_texts(text: str, tokens: int) -> None:
    tokenizer = wrapped(pipeline())
    whole = tokenizer.encode(text)
    kept = min(tokens, len(whole))
    left = tokenizer.encode_end(text, tokens=tokens, side="left")
    right = tokenizer.encode_end(text, tokens=tokens, side="right")
    assert left[len(left) - kept :] == whole[len(whole) - kept :]
    assert right[:kept] == whole[:kept]


MEMORY = """
import os, threading
from pathlib import Path
import tokenizers
from llmjax.tokenizer import SpecialTokens, Tokenizer
from llmjax.tokenizer.backend import HuggingFaceBackend
from llmjax.tokenizer.pieces import ByteLevelPieces

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
library = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, []))
library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = Tokenizer(HuggingFaceBackend(library), ByteLevelPieces(), special=SpecialTokens())
tokenizer.encode("a b c d " * 100)
before = resident()
thread = threading.Thread(target=tokenizer.encode, args=("a b c d " * 2**18,))
thread.start()
thread.join()
print((resident() - before) >> 20)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc's allocator")
def test_what_a_long_text_took_is_given_back() -> None:
    """Else the allocator keeps some 300 MB after two million tokens."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100


def test_other_threads_run_meanwhile(tokenizer: Tokenizer) -> None:
    """With the interpreter lock held no tick would come, however long it takes."""
    thread = threading.Thread(target=tokenizer.encode, args=("the quick brown " * 2**16,))
    ticks = 0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 20
