"""Tables of what was measured on a card, and the tuner that writes them. The tables here are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from benchmarks import tune_gpu
from benchmarks.tune_gpu import Problem, best, timed
from llmjax.config import EngineConfig
from llmjax.engine.device.batch import make_buckets
from llmjax.kernels.attention import make_pages
from llmjax.kernels.cuda import tuned as tuned_module
from llmjax.kernels.cuda.pages import PageReader
from llmjax.kernels.cuda.plan import ProductPlan
from llmjax.kernels.cuda.prefill import Tiles
from llmjax.kernels.cuda.quantized_linear import MAX_FRAGMENT_ROWS, key_of, plan_of, quantized_linear
from llmjax.kernels.cuda.split import Split
from llmjax.kernels.cuda.tuned import Key, Table, TableError, describe, form_name, path_for, table_in_use
from llmjax.kernels.qtensor import CUDA_TILE, QTensor
from llmjax.kernels.row_format import Codes, RowFormat

FORM = RowFormat(2000, Codes(4), 32, "f16", zero=8)


def write(path: Path, *entries: Any, **more: Any) -> Path:
    path.write_text(json.dumps({"card": "a card", "entries": entries, **more}))
    return path


def made_up(choice: dict[str, Any], *, sizes: tuple[int, ...] = (1, 4096, 2048)) -> dict[str, Any]:
    return {"kernel": "product", "format": form_name(FORM), "sizes": sizes, "choice": choice}


def matrix(size_out: int) -> QTensor:
    words = jnp.full((-(-size_out // CUDA_TILE), FORM.num_words, CUDA_TILE), 0x3C003C00, jnp.uint32)
    return QTensor(words, None, FORM, size_out, jnp.dtype("float32"))


def test_an_entry_serves_sizes_of_its_class(tmp_path: Path) -> None:
    table = Table.read(write(tmp_path / "card.json", made_up({"splits": 4, "chunks": 16, "warps": 2})))
    assert table.card == "a card"
    start = ProductPlan(1, 32, 32, 2, 1, 8)
    for size_out in (2049, 4000, 4096):
        assert table.changed(start, key_of(1, matrix(size_out))) == ProductPlan(1, 32, 16, 2, 4, 2)
    for other in (key_of(1, matrix(2048)), key_of(2, matrix(4096)), Key.of("decode", form_name(FORM), 1, 4096, 2048)):
        assert table.changed(start, other) == start


def test_kernels_take_what_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = matrix(64), jnp.ones((1, 2000))
    sizes = key_of(1, weight).sizes
    table = Table.read(write(tmp_path / "card.json", made_up({"splits": 2, "chunks": 16}, sizes=sizes)))
    seen: list[ProductPlan] = []
    launch_of = tuned_module.Table.changed

    def changed(table: Table, division: Any, key: Key) -> Any:
        seen.append(launch_of(table, division, key))
        return seen[-1]

    monkeypatch.setattr(tuned_module, "table_in_use", lambda: table)
    monkeypatch.setattr(Table, "changed", changed)
    jax.eval_shape(quantized_linear, x, weight)
    assert (seen[0].splits, seen[0].chunks) == (2, 16)
    assert plan_of(1, weight).splits != 2


def test_no_card_no_table() -> None:
    assert table_in_use() is None
    assert path_for("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"
    assert "by arithmetic" in describe("a card that does not exist")


def test_the_table_is_that_of_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines on a CPU do not read the table of a card that is there too."""
    cpu = jax.devices()[0]
    monkeypatch.setattr(jax, "devices", lambda *_: [SimpleNamespace(platform="gpu", device_kind="a card")])
    monkeypatch.setattr(tuned_module, "table_of", lambda card: card)
    assert table_in_use() == "a card"
    with jax.default_device(cpu):
        assert table_in_use() is None


@pytest.mark.parametrize(
    "content,reason",
    [
        ("{", "Expecting"),
        ("[]", "not a table"),
        ('{"card": "x"}', "'entries'"),
        ('{"card": "x", "entries": [{}]}', "'choice'"),
        ('{"card": "x", "entries": [{"choice": {"warps": "4"}}]}', "not a number"),
        ('{"card": "x", "entries": [{"choice": {"warps": -1}}]}', "not a number"),
    ],
)
def test_a_broken_table_is_an_error(content: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(content)
    with pytest.raises(TableError, match=reason) as error:
        Table.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_field_that_a_kernel_lacks_is_an_error(tmp_path: Path) -> None:
    table = Table.read(write(tmp_path / "card.json", made_up({"wraps": 4})))
    with pytest.raises(TableError, match=r"product has no wraps"):
        table.changed(ProductPlan(1, 32, 32, 2, 1, 8), key_of(1, matrix(4096)))


def test_the_tuner_goes_downhill() -> None:
    """To the least of a sum of distances, past what cannot run, and no further for noise."""
    fields = {"warps": (1, 2, 4, 8), "chunks": (16, 32, 64), "stages": (1, 2)}
    start = {"warps": 1, "chunks": 64, "stages": 1}
    problem = Problem(Key("k", "f", ()), start, fields, lambda choice, times: lambda: None)
    tried = []

    def seconds(choices: Any) -> list[float]:
        tried.extend(map(dict, choices))
        return [taken({**problem.start, **choice}) for choice in choices]

    def taken(full: Any) -> float:
        if full["chunks"] == 32:
            return float("inf")
        return 1 + abs(full["warps"] - 4) + abs(full["chunks"] - 16) - 0.01 * full["stages"]

    found = best(problem, seconds)
    assert found.choice == {"warps": 4, "chunks": 16}
    assert found.seconds == pytest.approx(0.99)
    assert found.seconds_at_start == pytest.approx(51.99)
    assert len(tried) < 20


@pytest.mark.slow
def test_the_tuner_measures_what_an_engine_of_defaults_asks_for() -> None:
    """Keys of its buckets, at small sizes of everything else."""
    form = tune_gpu.FORMATS["q4_k"](64)
    small = {name: getattr(tune_gpu.SMALL, name) for name in ("matrices", "layers", "experts", "heads", "caches")}
    sizes = replace(tune_gpu.Sizes(), **small, formats=("q4_k",), context=32)
    known = {problem.key for make in tune_gpu.PROBLEMS.values() for problem in make(sizes, True)}

    config, asked = EngineConfig(), set()
    weight = jax.eval_shape(partial(tune_gpu.quantized, form, 64, tile=CUDA_TILE))
    heads, kv_heads, head_dim, _ = sizes.heads[0]
    make = partial(make_pages, num_pages=2, page_size=config.page_size, num_kv_heads=kv_heads, head_dim=head_dim)
    pages = jax.eval_shape(partial(make, dtype=jnp.dtype("int8")))
    most = {name: getattr(config, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    for bucket in make_buckets(**most):
        queries = [jax.ShapeDtypeStruct((n, heads, head_dim), jnp.bfloat16) for n in (bucket.rows, bucket.tokens)]
        reader = PageReader.of(pages, queries[0])
        asked.add(Split.key(queries[0], pages, reader))
        if not bucket.decode:
            asked.add(Tiles.key(queries[1], pages, reader))
        if bucket.tokens <= MAX_FRAGMENT_ROWS:
            asked.add(key_of(bucket.tokens, weight))
    assert asked <= known
    assert len(asked) > 15


def test_a_table_grows_and_keeps_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = jax.devices()[0].device_kind
    path = write(tmp_path / "card.json", made_up({"warps": 2}), card=card)
    arguments = ["--small", "--only", "decode", "--output", str(path)]
    assert tune_gpu.main(arguments) == 0
    table = Table.read(path)
    assert {key.kernel for key in table.choices} == {"product", "decode"}
    for entry in json.loads(path.read_text())["entries"][1:]:
        assert 0 < entry["microseconds"] <= entry["microseconds_by_arithmetic"]
    before = path.stat().st_mtime_ns
    assert tune_gpu.main([*arguments, "--missing"]) == 0
    assert path.stat().st_mtime_ns == before
    write(path, card="another card")
    with pytest.raises(SystemExit):
        tune_gpu.main(arguments)
    assert "a table for another card" in capsys.readouterr().err


def test_what_does_not_lower_is_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    def run(choice: Any, times: int) -> Any:
        if choice.get("warps") == 8:
            raise NotImplementedError("no such form\nmore")
        return lambda: jnp.zeros(1)

    seconds = timed(Problem(Key("k", "f", ()), {"warps": 4}, {"warps": (8,)}, run, layers=2), tune_gpu.SMALL, Console())
    failed, found = seconds([{"warps": 8}, {}])
    assert failed == float("inf")
    assert 0 < found < float("inf")
    assert "cannot run: no such form\n" in capsys.readouterr().out


def test_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, reason in (([], "NVIDIA GPU"), (["--small"], "--output"), (["--only", "x"], "unknown: x")):
        with pytest.raises(SystemExit):
            tune_gpu.main(arguments)
        assert reason in capsys.readouterr().err


def test_the_tuner_tries_what_the_lowering_has() -> None:
    """Stages mean nothing to the one, heads something else."""
    start = {"mosaic": 0, "shares": 64, "heads": 16, "stages": 2}
    fields = {"mosaic": (0, 1), "shares": (64, 128)}
    lowerings = ({"stages": (1, 2, 3), "heads": (16, 32)}, {"heads": (8, 16)})
    problem = Problem(Key("k", "f", ()), start, fields, lambda choice, times: lambda: None, lowerings=lowerings)
    tried = []

    def seconds(choices: Any) -> list[float]:
        tried.extend(choices)
        full = [{**start, **choice} for choice in choices]
        return [3 - each["mosaic"] * (1 + (each["heads"] == 8)) - each["shares"] / 1000 for each in full]

    assert best(problem, seconds).choice == {"mosaic": 1, "shares": 128, "heads": 8}
    assert not any("stages" in choice for choice in tried)
    assert {choice["heads"] for choice in tried if "heads" in choice} == {8, 16}
    assert problem.shortened(1).values("heads", {"mosaic": 1}) == (8,)
