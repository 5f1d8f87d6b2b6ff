"""The resampler against its formula, with several heads and slices of different sizes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from flax import nnx

from llmjax.models.layers.norm import Layer
from llmjax.models.modules.parameter import axes_of, parameters_of, state_of
from llmjax.models.vision.packing import positions_of
from llmjax.models.vision.resampler import Resampler
from llmjax.models.vision.spec import Resampling

QUERIES, HEADS, SIZE, OUT = 3, 2, 10, 16
SLICES = [(2, 3), (4, 1), (3, 3)]


def normed(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6) * weight + bias


def expected(values: dict[str, np.ndarray], patches: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The rows of one slice, head by head."""

    def dense(name: str, x: np.ndarray) -> np.ndarray:
        return x @ values[f"{name}.weight"].T + values.get(f"{name}.bias", 0)

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        return normed(x, values[f"{name}.weight"], values[f"{name}.bias"])

    places = np.array([(row, column) for row in range(rows) for column in range(columns)], float)
    rates = 1 / 10000 ** (np.arange(OUT // 4) / (OUT / 4))
    waves = [f(places[:, axis, None] * rates) for axis in (1, 0) for f in (np.sin, np.cos)]
    x = norm("ln_kv", dense("kv_proj", patches))
    q, k, v = dense("q_proj", norm("ln_q", values["query"])), dense("k_proj", x + np.hstack(waves)), dense("v_proj", x)
    found = []
    for head in np.split(np.arange(OUT), HEADS):
        scores = q[:, head] @ k[:, head].T / np.sqrt(len(head))
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        found.append(shares / shares.sum(-1, keepdims=True) @ v[:, head])
    return dense("proj", norm("ln_post", dense("o_proj", np.hstack(found))))


def test_each_slice_has_its_own_rows() -> None:
    spec = Resampling(queries=QUERIES, heads=HEADS, least=4, norm=Layer(1e-6))
    module = Resampler(spec, SIZE, OUT, dtype=jnp.float32)
    rng = np.random.default_rng(0)
    parameters = parameters_of(module)
    values = {name: rng.standard_normal(each.get_value().shape) for name, each in parameters.items()}
    axes = [axes_of(each) for each in parameters.values()]
    params = {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
    resampler: Resampler = nnx.merge(nnx.split(module)[0], state_of(params, names=list(parameters), axes=axes))
    patches = [rng.standard_normal((rows * columns, SIZE)) for rows, columns in SLICES]
    padding = 5
    segments = np.concatenate([np.repeat(np.arange(len(SLICES)), [len(each) for each in patches]), [-1] * padding])
    positions = np.concatenate([*(positions_of(*each, 1) for each in SLICES), np.zeros((padding, 2), np.int32)])
    x = np.concatenate([*patches, rng.standard_normal((padding, SIZE))])
    found = resampler(jnp.asarray(x, jnp.float32), jnp.asarray(segments), jnp.asarray(positions))
    assert found.shape == (len(x) // spec.least * QUERIES, OUT)
    rows = np.concatenate([expected(values, each, *grid) for each, grid in zip(patches, SLICES, strict=True)])
    np.testing.assert_allclose(np.asarray(found)[: len(rows)], rows, atol=2e-4)
