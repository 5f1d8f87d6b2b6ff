"""Which weights are kept how, and that what is quantized at load is what the reference quantizers write."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llmjax.checkpoint import open_checkpoint
from llmjax.errors import CheckpointError, ConfigError
from llmjax.models import abstract_model, model_config
from llmjax.quantization.plan import QuantizationPlan, SavePlan
from llmjax.quantization.rounding import InSituRows
from llmjax.quantization.schemes import SCHEMES, scheme_named
from llmjax.weights.ggml import reference
from llmjax.weights.ggml.types import GGML_TYPES, dequantize
from llmjax.weights.packing import RowSource, pack, put
from tests.checkpoints import GOLDEN

MODEL = model_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
)
BLOCKS = {block.name.lower(): block for block in GGML_TYPES.values()}


@dataclasses.dataclass(frozen=True)
class Plain:
    """A stored matrix of floats."""

    name: str
    values: np.ndarray
    type_name: str = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def row_source(self) -> RowSource | None:
        return None

    def read(self, dtype: np.dtype) -> np.ndarray:
        return self.values.astype(dtype)


def matrix(name: str = "model.layers.0.mlp.up_proj.weight", rows: int = 24, columns: int = 512) -> Plain:
    return Plain(name, np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32))


def plan(quantization: str | None, rules: dict[str, str] | None = None) -> QuantizationPlan:
    return QuantizationPlan.of(quantization, rules or {}, MODEL)


def kept_as(quantization: str | None, tensor: Plain, rules: dict[str, str] | None = None) -> str:
    source = plan(quantization, rules).keep(tensor).source
    return source.scheme.name if isinstance(source, InSituRows) else "plain"


@pytest.mark.parametrize("scheme", sorted(reference.QUANTIZERS))
def test_weights_are_those_of_the_reference_quantizer(scheme: str) -> None:
    tensor = matrix()
    stored = reference.quantize(tensor.values, scheme)
    source = InSituRows(tensor, scheme_named(scheme))
    packed = put(source, pack(source, tile=16), dtype=jnp.float32, activations="float", device=jax.devices("cpu")[0])
    expected = dequantize(stored, BLOCKS[scheme], np.dtype(np.float32))
    np.testing.assert_array_equal(packed.dequantize(), expected)
    np.testing.assert_array_equal(expected, gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[scheme.upper()]))


@pytest.mark.parametrize("scheme", ["int8", "int8_g128", "w8a8", "int4", "int4_g64", "fp8"])
def test_uniform_schemes_are_as_exact_as_their_bits(scheme: str) -> None:
    tensor = matrix()
    kept = plan(scheme).keep(tensor)
    assert kept.source is not None
    packed = put(
        kept.source, pack(kept.source, tile=1), dtype=jnp.float32, activations="float", device=jax.devices("cpu")[0]
    )
    error = np.abs(np.asarray(packed.dequantize()) - tensor.values).max()
    assert 0 < error < {"int4": 0.4, "int4_g64": 0.4, "fp8": 0.25}.get(scheme, 0.02)
    assert kept.activations == ("int8" if scheme == "w8a8" else "auto")


def test_quantized_weights_can_become_another_scheme() -> None:
    first = InSituRows(matrix(), scheme_named("int8"))

    @dataclasses.dataclass(frozen=True)
    class Quantized(Plain):
        type_name: str = "INT8"

        def row_source(self) -> RowSource | None:
            return first

    tensor = Quantized("w.weight", first.tensor.read(np.dtype(np.float32)))
    again = InSituRows(tensor, scheme_named("q8_0")).quantized_rows(8, 24)
    weights = np.empty((16, 512), np.float32)
    first.quantized_rows(8, 24).dequantize(weights)
    expected = scheme_named("q8_0").quantize(weights)
    np.testing.assert_array_equal(again.codes, expected.codes)
    np.testing.assert_array_equal(again.scales, expected.scales)


def test_names_of_schemes_and_mixes() -> None:
    up, head = matrix(), matrix("model.embed_tokens.weight")
    assert (kept_as(None, up), kept_as("none", up)) == ("plain", "plain")
    assert (kept_as("q4k", up), kept_as("q4k", head)) == ("q4_k", "q4_k")
    assert (kept_as("Q4_K_M", up), kept_as("Q4_K_M", head)) == ("q4_k", "q6_k")
    assert (kept_as("q2k", head), kept_as("q2_k", head)) == ("q2_k", "q6_k")
    assert (kept_as("int4", up), kept_as("int4", head)) == ("int4", "int8")
    assert (kept_as("fp8", up), kept_as("fp8", head)) == ("fp8", "fp8")
    assert {scheme.lower() for scheme in SCHEMES} == set(SCHEMES)


@pytest.mark.parametrize(
    ("quantization", "stored"),
    [
        ("gptq", "gptq"),
        ("gptq_marlin", "gptq"),
        ("AWQ", "awq"),
        ("awq_marlin", "awq"),
        ("compressed-tensors", "compressed-tensors"),
        ("gguf", "gguf"),
        ("fp8", "fbgemm_fp8"),
        ("mxfp4", "mxfp4"),
    ],
)
def test_names_of_formats_say_what_is_stored(quantization: str, stored: str) -> None:
    assert QuantizationPlan.of(quantization, {}, MODEL, stored=stored).default == "stored"


def test_names_of_formats_that_the_checkpoint_has_not() -> None:
    with pytest.raises(ConfigError, match="'gptq' is a checkpoint's format, but this one is stored as awq"):
        QuantizationPlan.of("gptq", {}, MODEL, stored="awq")
    with pytest.raises(ConfigError, match="'gguf' is a checkpoint's format, but this one is not quantized"):
        QuantizationPlan.of("gguf", {}, MODEL)
    for scheme in ("fp8", "mxfp4"):  # schemes as well
        assert QuantizationPlan.of(scheme, {}, MODEL, stored="gptq").default == scheme


def test_rules_come_first() -> None:
    rules = {r"layers\.0\.mlp": "q8_0", "mlp": "none", "lm_head": "int4"}
    assert kept_as("q4k", matrix(), rules) == "q8_0"
    assert kept_as("q4k", matrix("model.layers.1.mlp.up_proj.weight"), rules) == "plain"
    assert kept_as("q4k", matrix("lm_head.weight"), rules) == "int4"
    assert kept_as("q4k", matrix(), {"mlp": "q2k"}) == "q2_k"
    assert kept_as("q4k", matrix("model.layers.1.self_attn.q_proj.weight"), rules) == "q4_k"


SMALL = {
    "deepseek-v32-sparse": {"indexer.weights_proj"},
    "glm-moe-dsa": {"indexer.weights_proj"},
    "opt-350m": {"project_in", "project_out"},
    "gemma3n": {
        *("altup.prediction_coefs", "altup.correction_coefs", "laurel.linear_left", "laurel.linear_right"),
        "model.per_layer.projection",
    },
    "gemma4": {"model.per_layer.projection"},
}


@pytest.mark.parametrize("family", SMALL)
@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8", "q8_0", "q4k"])
def test_small_matrices_that_much_depends_on_stay_plain(family: str, scheme: str) -> None:
    """Whether a model is loaded or written, and whatever a rule says."""
    source = open_checkpoint(GOLDEN / family)
    names = {name for name in source.tensors if any(f".{name}".endswith(f".{end}.weight") for end in SMALL[family])}
    assert {end for name in names for end in SMALL[family] if name.endswith(f"{end}.weight")} == SMALL[family]
    loaded = QuantizationPlan.of(scheme, {".*": scheme}, source.model_config())
    assert all(loaded.keep(source.tensors[name]).source is None for name in names)
    if scheme in ("int8", "fp8"):  # others have groups that these rows are too short for
        saved = SavePlan.of(source, scheme, rules={".*": scheme})
        assert not names & saved.layers.keys() and {name.removesuffix(".weight") for name in names} <= {*saved.ignored}


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*/config.json")), ids=lambda path: path.parent.name)
def test_what_models_need_plain_is_not_written_quantized(folder: Path) -> None:
    """But for what other systems store quantized all the same: latent keys and values, which are absorbed here."""
    source = open_checkpoint(folder.parent)
    dtype = jnp.dtype(jnp.float32)
    graph, _ = abstract_model(source.model_config(), dtype=dtype, activation_dtype=dtype)
    quantized = graph.plain & SavePlan.of(source, "int8").layers.keys()
    assert {name for name in quantized if not name.endswith(".kv_b_proj.weight")} == set()


def test_rows_that_fill_no_blocks_fall_back_with_a_word() -> None:
    assert kept_as("q4k", matrix(columns=96)) == "q5_0"
    assert plan("q4k").keep(matrix(columns=96)).misfit == "q4_k; kept as q5_0"
    assert not plan("q4k").keep(matrix()).misfit


@pytest.mark.parametrize(
    ("quantization", "rules", "message"),
    [
        ("q9", {}, "'q9' is unknown"),
        ("q4k", {"(": "q8_0"}, "not a regular expression"),
        ("q4k", {"mlp": "q4_k_m"}, "'q4_k_m' is unknown"),
        ("q4k", {"mlp": 4}, "must map"),
    ],
)
def test_bad_settings_are_refused(quantization: str, rules: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(quantization, rules)


@pytest.mark.parametrize("scheme", ["q4k", "q80", "int8", "fp8"])
def test_weights_that_are_no_numbers_are_refused_by_name(scheme: str) -> None:
    tensor = matrix()
    tensor.values[3, 4] = np.nan
    with pytest.raises(CheckpointError, match="up_proj"):
        InSituRows(tensor, scheme_named(scheme)).quantized_rows(0, 24)
