"""What is measured of a model, how it is kept, and that engines compute as was chosen."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from llmjax.config import EngineConfig
from llmjax.engine.build import load
from llmjax.engine.ranks.alone import Alone
from llmjax.engine.tuning import choose as chooser
from llmjax.engine.tuning.choose import choices_of, choose, products_of, tune
from llmjax.engine.tuning.kept import Measured, all_here, keep, path_of, read
from llmjax.engine.tuning.measure import NotMeasured, Product, measure
from llmjax.engine.tuning.measure_main import measured_here, random_weight
from llmjax.kernels.choices import BY_XLA, NATIVE, ROWS, TABLE, Choice, Choices, Timing, kind_of
from llmjax.kernels.cpu.library import forced_isa, library
from llmjax.kernels.cpu.matrices import candidates, tabled
from llmjax.kernels.row_format import Codes, RowFormat
from llmjax.platforms import select_platform
from tests.checkpoints import GOLDEN

native = library()
pytestmark = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")

PLAIN = Product("bfloat16", (NATIVE, BY_XLA), (320, 64), None, "bfloat16", "")
FORM = RowFormat(64, Codes(4), 32, "f16", zero=8)


def timings(kind: str, methods: tuple[str, ...], fastest: str) -> tuple[Timing, ...]:
    return tuple(
        Timing(kind, method, (320, 64), rows, 1e-3 if method == fastest else 2e-3)
        for method in methods
        for rows in ROWS
    )


def quantized() -> Product:
    assert native is not None
    empty = Product("", (), (320, 64), FORM, "bfloat16", "float")
    weight = random_weight(empty, 32)
    return dataclasses.replace(empty, kind=kind_of(weight), methods=candidates(weight, native))


def test_every_method_that_there_is_is_measured() -> None:
    found = measured_here([PLAIN, quantized()], seconds=0)
    plain = {(timing.rows, timing.method) for timing in found if timing.kind == "bfloat16"}
    assert plain == {(rows, method) for rows in ROWS for method in (NATIVE, BY_XLA)}
    methods = {timing.method for timing in found if timing.kind != "bfloat16"}
    assert methods >= {TABLE, "float vectors", "float panels"} and "bf16 panels" not in methods
    assert all(timing.seconds > 0 and timing.shape[1] == 64 and timing.shape[0] <= 320 for timing in found)


@pytest.mark.slow
def test_a_process_measures() -> None:
    product = quantized()
    assert product.format is not None
    assert product.format.fields  # derived once: the process gets it all the same
    found = measure([product])
    assert {timing.rows for timing in found} == set(ROWS)
    assert {timing.kind for timing in found} == {product.kind}


def test_a_process_measures_the_instruction_set_that_is_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        seen.append(env.get("LLMJAX_CPU_ISA"))
        raise OSError("no process")

    monkeypatch.setattr("llmjax.engine.tuning.measure.subprocess.run", run)
    monkeypatch.delenv("LLMJAX_CPU_ISA", raising=False)
    with forced_isa("generic"), pytest.raises(NotMeasured, match="no process"):
        measure([PLAIN])
    assert seen == ["generic"]


@pytest.mark.slow
def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(NotMeasured, match="no_such_type"):
        measure([dataclasses.replace(PLAIN, dtype="no_such_type")])


def test_the_kinds_that_have_a_choice_and_weigh_enough_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native is not None
    weights = [
        jnp.zeros((64, 32), jnp.bfloat16),
        jnp.zeros((64, 16), jnp.bfloat16),
        jnp.zeros((64, 16), jnp.bfloat16),
        jnp.zeros((64, 16), jnp.bfloat16),
        jnp.zeros((8, 16), jnp.float32),
        jnp.zeros((64, 16), jnp.float16),  # which C++ alone multiplies
        jnp.zeros(4096, jnp.bfloat16),
    ]
    monkeypatch.setattr(chooser, "WORTH", 4096)
    assert products_of(weights, native) == (Product("bfloat16", (NATIVE, BY_XLA), (64, 16), None, "bfloat16", ""),)
    monkeypatch.setattr(chooser, "WORTH", 1 << 20)
    assert products_of(weights, native) == ()


def test_the_first_answer_stays(tmp_path: Path) -> None:
    path = path_of(tmp_path, [PLAIN])
    assert read(path) is None
    first = Measured.now(timings("bfloat16", PLAIN.methods, NATIVE))
    later = Measured.now(timings("bfloat16", PLAIN.methods, BY_XLA))
    assert keep(path, first) == first
    assert keep(path, later) == first == read(path)
    assert keep(path, later, again=True) == later == read(path)
    assert list(all_here(tmp_path)) == [later]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_questions_have_files_of_their_own(tmp_path: Path) -> None:
    others = [dataclasses.replace(PLAIN, **change) for change in ({"shape": (320, 128)}, {"methods": (NATIVE,)})]
    assert len({path_of(tmp_path, products) for products in ([PLAIN], *([one] for one in others), [])}) == 4


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"machine": "a", "processor": "b", "date": "c", "timings": [{"kind": "d"}]}']
)
def test_a_damaged_file_is_measured_again(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = path_of(tmp_path, [PLAIN])
    path.parent.mkdir()
    path.write_text(content)
    assert read(path) is None and "is not used" in caplog.text
    assert not path.exists()


def test_what_others_may_have_written_is_not_used(tmp_path: Path) -> None:
    path = path_of(tmp_path, [PLAIN])
    keep(path, Measured.now(()))
    path.chmod(0o666)
    assert read(path) is None


def test_other_machines_answers_are_not_shown(tmp_path: Path) -> None:
    path = path_of(tmp_path, [PLAIN])
    keep(path, Measured.now(()))
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "machine": "another"}))
    assert list(all_here(tmp_path)) == []


def test_a_choice_is_made_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert native is not None
    platform = select_platform(EngineConfig(device="cpu"))
    weights, asked = [jnp.zeros((64, 16), jnp.bfloat16)], []

    def measured(products: Any) -> tuple[Timing, ...]:
        asked.append(products)
        table = tabled(1, weights[0], native)
        return timings("bfloat16", PLAIN.methods, BY_XLA if table == NATIVE else NATIVE)

    monkeypatch.setattr(chooser, "WORTH", 1)
    monkeypatch.setattr(chooser, "measure", measured)
    chosen = choose(weights, platform, tmp_path)
    assert chosen.made and choose(weights, platform, tmp_path) == chosen and len(asked) == 1
    assert choose(weights, platform, None) == Choices() and len(asked) == 1

    def fails(products: Any) -> tuple[Timing, ...]:
        raise NotMeasured("no core")

    monkeypatch.setattr(chooser, "measure", fails)
    assert choose([jnp.zeros((64, 24), jnp.bfloat16)], platform, tmp_path) == Choices()
    assert "those of the table: NotMeasured: no core" in caplog.text


def test_the_table_stays_where_nothing_is_clearly_faster() -> None:
    assert native is not None
    kind = quantized().kind
    assert choices_of(timings(kind, (TABLE, "float panels"), TABLE), native) == Choices()
    (choice,) = choices_of(timings(kind, (TABLE, "float panels"), "float panels"), native).made
    assert choice == Choice(kind, ((ROWS[-1], "float panels"),))


def test_an_engine_computes_as_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of another choice are other programs, and ``tune`` measures what the engine would."""
    assert native is not None
    monkeypatch.setattr(chooser, "WORTH", 1)
    config = EngineConfig(
        model=str(GOLDEN / "llama"),
        dtype="float32",
        max_num_batched_tokens=16,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**20,
        compilation_cache_dir=str(tmp_path),
    )
    signatures, layers = set(), []
    for fastest in (NATIVE, BY_XLA):
        monkeypatch.setattr(chooser, "measure", lambda products, by=fastest: timings("float32", PLAIN.methods, by))
        measured = tune(config)
        assert measured is not None and read(next((tmp_path / "measured").iterdir())) == measured
        monkeypatch.setattr(chooser, "measure", lambda products: pytest.fail("measured twice"))
        _, compiler = load(config, Alone())
        assert compiler.choices == choices_of(measured.timings, native)
        spec = compiler.spec(compiler.largest)
        signatures.add(compiler.cache.signature(spec))
        layers.append(spec.lower("step").as_text().count("llmjax_mlp"))
    assert len(signatures) == 2
    assert layers[0] > 0 and layers[1] == 0  # a layer is one call of C++ only where that multiplies
