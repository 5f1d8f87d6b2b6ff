"""Signatures: equal values have equal signatures in every process, and different values have different ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmjax.engine.device.batch import BatchLayout, Bucket
from llmjax.engine.programs import signature
from llmjax.engine.programs.signature import SourcesChanged, digest, environment_digest, sources_digest
from llmjax.kernels.qtensor import QTensor
from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.sampling.state import set_bias

pytestmark = pytest.mark.jax_api

LAYOUT = BatchLayout(bucket=Bucket(tokens=4, rows=4, decode=True), num_slots=4, pages_per_sequence=8, num_groups=1)
FORMAT = RowFormat(size_in=64, codes=Codes(bits=4), group_size=32, scale="f16")
MATRIX = QTensor(
    words=jax.ShapeDtypeStruct((2, 9, 16), jnp.uint32), columns=None, format=FORMAT, size_out=32, dtype=jnp.dtype("f4")
)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def as_told(value: Any) -> str:
    """Plain values in words, with their types and mappings in order."""
    if isinstance(value, dict):
        return f"{{{sorted((as_told(key), as_told(part)) for key, part in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}{[as_told(part) for part in value]}"
    return f"{type(value).__name__} {value!r}"


@given(plain, plain)
def test_values_have_one_signature_if_and_only_if_they_are_equal(a: Any, b: Any) -> None:
    assert (digest(a) == digest(b)) == (as_told(a) == as_told(b))


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (1, np.int32(1)),
        (np.int32(1), np.int64(1)),
        ("1", b"1"),
        (["ab", "c"], ["a", "bc"]),
        ([1], (1,)),
        (None, ()),
        (LAYOUT, replace(LAYOUT, num_slots=5)),
        (LAYOUT, replace(LAYOUT, bucket=replace(LAYOUT.bucket, steps=8))),
        (np.zeros(2), np.ones(2)),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        (jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.bfloat16)),
        (jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32, weak_type=True)),
        (MATRIX, replace(MATRIX, activations="int8")),
        (MATRIX, replace(MATRIX, format=replace(FORMAT, group_size=64))),
        (MATRIX, replace(MATRIX, words=jax.ShapeDtypeStruct((2, 9, 16), jnp.int32))),
    ],
)
def test_other_values_have_other_signatures(value: Any, other: Any) -> None:
    assert digest(value) == digest(value) != digest(other)


def test_the_order_of_a_set_or_a_mapping_does_not_matter() -> None:
    names = ["a", "bb", "ccc", "q_proj"]
    assert digest(frozenset(names)) == digest(frozenset(reversed(names)))
    assert digest(dict.fromkeys(names, 1)) == digest(dict.fromkeys(reversed(names), 1))


def test_another_process_finds_the_same_signature() -> None:
    """Hashes of strings differ from process to process, and with them the order of sets."""
    code = (
        "from llmjax.engine.programs.signature import digest;"
        "from llmjax.engine.device.batch import Bucket;"
        "print(digest(frozenset({'a', 'b', 'c', 'd'}), {'x': 1, 'y': Bucket}, 2.5, Bucket(4, 4, True)))"
    )
    found = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] == digest(frozenset("abcd"), {"y": Bucket, "x": 1}, 2.5, Bucket(4, 4, True))


class Foreign:
    """A class of a package whose version is not known."""


def foreign() -> None:
    pass


@pytest.mark.parametrize(
    "value",
    [Foreign, foreign, lambda: None, partial(set_bias), object(), jnp.zeros(1), SimpleNamespace()],
    ids=["class", "function", "lambda", "partial", "object", "array", "namespace"],
)
def test_what_is_not_known_by_its_name_has_no_signature(value: Any) -> None:
    with pytest.raises(TypeError, match="has no signature"):
        digest({"a": [value]})


def test_functions_of_the_package_are_known_by_their_names() -> None:
    assert digest(set_bias) == digest(set_bias) != digest(digest)


@pytest.fixture
def environment() -> Callable[[], str]:
    """The environment's digest, nothing of it remembered."""

    def now() -> str:
        signature._file_digest.cache_clear()
        signature._cpu_features.cache_clear()
        return environment_digest(jax.devices("cpu")[0])

    return now


def test_the_environment_stays_what_it_is(environment: Callable[[], str]) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        there = environment()
    assert environment() == there


def test_engines_that_see_other_cards_have_one_environment(environment: Callable[[], str]) -> None:
    """Engines of ``--data-parallel-size`` see different devices, on CPUs too: what one compiles, the others read."""
    there, seen = environment(), jax.config.values["jax_cuda_visible_devices"]
    jax.config.update("jax_cuda_visible_devices", "1")
    try:
        assert environment() == there
    finally:
        jax.config.update("jax_cuda_visible_devices", seen)


@pytest.mark.parametrize("what", ["flag", "setting", "library", "processor", "version", "cores"])
def test_another_environment_has_another_digest(
    what: str, environment: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = environment()
    other = tmp_path / "other"
    match what:
        case "flag":
            monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        case "setting":
            with jax.default_matmul_precision("float32"):
                assert environment() != before
            return
        case "library":
            other.write_bytes(b"another build")
            monkeypatch.setattr(signature, "LIBRARY", other)
            if signature.library() is None:
                pytest.skip("the C++ library is not built")
        case "processor":
            other.write_text("model name\t: another\nflags\t\t: sse2\n")
            monkeypatch.setattr(signature, "CPUINFO", other)
        case "version":
            monkeypatch.setattr(signature, "version", lambda name: "0")
        case "cores":
            monkeypatch.setattr(signature, "usable_cores", lambda: 1000)
    assert environment() != before


def test_every_source_counts_and_links_are_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package, linked = tmp_path / "package", tmp_path / "linked"
    package.mkdir()
    linked.mkdir()
    (package / "part").symlink_to(linked)
    monkeypatch.setattr(signature, "IMPORTED", time.time() + 3600)

    def now() -> str:
        sources_digest.cache_clear()
        return sources_digest(package)

    (linked / "model.py").write_text("x = 1")
    found = [now()]
    (linked / "model.py").write_text("x = 2")
    found.append(now())
    (linked / "notes.txt").write_text("nothing that is traced")
    assert now() == found[-1]
    (linked / "model.py").rename(linked / "models.py")
    found.append(now())
    assert len(set(found)) == 3


def test_the_package_itself_is_among_the_sources() -> None:
    assert Path(signature.__file__).is_relative_to(signature.PACKAGE)
    assert {"engine", "models", "kernels"} <= {path.name for path in signature.PACKAGE.iterdir()}


def test_sources_that_changed_after_they_were_imported_say_nothing(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text("x = 1")
    os.utime(source, (signature.IMPORTED + 1, signature.IMPORTED + 1))
    with pytest.raises(SourcesChanged, match=r"model\.py has changed"):
        sources_digest(tmp_path)
