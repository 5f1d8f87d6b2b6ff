"""Prefill by Mosaic GPU: simulated against the reference, lowered for Hopper, and compiled where the plug-in is."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.kernels.attention import reference
from llmjax.kernels.cuda import mosaic_prefill
from llmjax.kernels.cuda.flash import QueryRules
from llmjax.kernels.cuda.mosaic_prefill import prefill, refuses
from tests.described_card import H100, compile_for_card, lower_for, needs_plugin
from tests.kernels.attention_case import Case, empty_pages, filled_pages, make_data
from tests.kernels.test_cuda_lowering import ATTENTIONS

pytestmark = pytest.mark.jax_api

ROOT = Path(__file__).parents[2]
BF16 = {"activations": "bfloat16", "cache": "bfloat16"}
# The window begins after the first key; heads are filled up to a power of two.
RAGGED = Case(((20, 150),), heads=3, kv_heads=1, head_dim=64, padding=0, window=70, softcap=20.0, **BF16)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card that programs are for."""
    monkeypatch.setattr(mosaic_prefill, "default_device", lambda: SimpleNamespace(compute_capability="9.0"))


def error(case: Case, *, interpret: object = None) -> float:
    """Error of the kernel, relative to the norm of the reference; rows of one token are left out, as in `attend`. What
    no token has stored is NaN, which the kernel must not read."""
    data = make_data(case)
    pages = filled_pages(case, data.filling, as_bits=False)
    pages = reference.write_kv(pages, data.k, data.v, data.batch.places(case.page_size))
    q, count = jnp.asarray(data.q), jnp.diff(data.batch.query_start)
    assert refuses(q, pages, None) is None
    rules = QueryRules(**data.rules)
    stored = np.zeros(case.all_pages * case.page_size, bool)
    for table, length in zip(np.asarray(data.batch.page_table), np.asarray(data.batch.kv_len), strict=True):
        page, offset = np.divmod(np.arange(length), case.page_size)
        stored[(data.batch.first_page + table[page]) * case.page_size + offset] = True
    stored = stored.reshape(case.all_pages, 1, 1, case.page_size, 1)
    poisoned = pages.with_data(jnp.where(stored, pages.data, jnp.nan))
    out = jax.jit(partial(prefill, rules=rules, interpret=interpret))(q, poisoned, data.batch, count)
    expected = reference.ragged_paged_attention(q, pages, data.batch, **data.rules)
    out, expected = (np.asarray(x, np.float32)[data.real] for x in (out, expected))
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["RAGGED", "replace(RAGGED, window=None, softcap=None)"])
def test_simulated_equals_the_reference(case: str) -> None:
    """Copies, barriers and masks are simulated; products of warpgroups are not (the interpreter lacks their forms).

    Each of its three threads waits in one of XLA's, which has as many as the machine has cores, or as NPROC says.
    """
    program = f"""
from dataclasses import replace
from types import SimpleNamespace
from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
from llmjax.kernels.cuda import mosaic_prefill
from tests.kernels.test_cuda_mosaic import RAGGED, error
mosaic_prefill.default_device = lambda: SimpleNamespace(compute_capability="9.0")
print(error({case}, interpret=InterpretGPUParams()))
"""
    pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    environment = {**os.environ, "NPROC": "8", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout) < 1e-2


@pytest.mark.usefixtures("hopper")
def test_lowers_for_hopper() -> None:
    call, arguments = call_of("mixed")
    assert lower_for(H100, call, *arguments).as_text().count("@mosaic_gpu") == 1


@needs_plugin
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", ["mixed", "head size 64"])
def test_compiles_for_a_described_h100(
    name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With products of warpgroups and bulk copies, and registers for all that it keeps."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    call, arguments = call_of(name)
    compile_for_card(call, *arguments, donated=(), options={}, folder=tmp_path)
    captured = capfd.readouterr()
    text = captured.out + captured.err
    assert "wgmma.mma_async" in text
    assert "cp.async.bulk.tensor" in text
    assert " 0 bytes spill stores" in text


def call_of(name: str) -> tuple:
    q, _, _, pages, batch = ATTENTIONS[name].arguments()
    rules = QueryRules(scale=0.1, window=1000, softcap=30.0)
    assert refuses(q, pages, None) is None

    def call(q, pages, batch):
        return prefill(q, pages, batch, jnp.diff(batch.query_start), rules=rules)

    return call, (q, pages, batch)


@pytest.mark.usefixtures("hopper")
def test_says_what_it_refuses() -> None:
    cases = {
        "queries are float32": {"activations": "float32"},
        "pages int8": {"cache": "int8"},
        "head size 256": {"head_dim": 256},
        "latent": {"head_dim": 576, "value_dim": 512},
        "pages of 3": {"page_size": 3},
        "300 heads": {"heads": 300},
    }
    for reason, changes in cases.items():
        case = replace(RAGGED, **changes)
        pages = empty_pages(case, as_bits=False)
        q = jax.ShapeDtypeStruct((8, case.heads, case.head_dim), jnp.dtype(case.activations))
        assert reason in str(refuses(q, pages, None))


@pytest.mark.usefixtures("hopper")
def test_runs_unless_a_table_asks_for_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmjax.kernels.cuda.pages import PageReader
    from llmjax.kernels.cuda.prefill import Tiles
    from llmjax.kernels.cuda.prefill import prefill as choose

    asked = []
    monkeypatch.setattr(mosaic_prefill, "prefill", lambda q, *_, **__: asked.append(1) or q)
    q, _, _, pages, batch = ATTENTIONS["mixed"].arguments()
    tiles = Tiles.of(len(q), 4, PageReader.of(pages, q))
    for mosaic, interpret, calls in ((0, False, 0), (1, True, 0), (1, False, 1)):
        asked.clear()
        how = {"tiles": replace(tiles, mosaic=mosaic), "interpret": interpret}
        run = partial(choose, sinks=None, rules=QueryRules(1.0, None, None), **how)
        jax.eval_shape(run, q, pages, batch, batch.kv_len)
        assert len(asked) == calls


def test_other_cards_than_hoppers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, _, pages, _ = ATTENTIONS["mixed"].arguments()
    for capability, refused in (("8.0", True), ("9.0", False), ("12.0", True), (None, True)):
        card = SimpleNamespace(**({"compute_capability": capability} if capability else {}))
        monkeypatch.setattr(mosaic_prefill, "default_device", lambda card=card: card)
        assert (f"capability {capability}" in str(refuses(q, pages, None))) is refused


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_equals_the_reference_on_a_hopper_card(head_dim: int, cuda_device: jax.Device) -> None:
    if getattr(cuda_device, "compute_capability", "") != "9.0":
        pytest.skip("no Hopper card")
    case = Case(((512, 2048), (70, 70), (2, 900)), heads=32, kv_heads=8, head_dim=head_dim, **BF16)
    assert error(case) < 1e-2
    assert error(replace(case, window=300, softcap=20.0)) < 1e-2
