"""The experts of a layer during calibration, each with the tokens that reach it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.activations import CLAMPED_SWIGLU, gated
from llmjax.kernels.linear import linear
from llmjax.models.layers.layer import LayerSpec
from llmjax.models.layers.moe import AS_GATE, Experts
from llmjax.quantization.calibration.layer import CalibratedLayer, InputStatistics, Stage, Sublayer
from llmjax.quantization.plan import SavePlan

LEAST_ROWS = 16  # fewest rows of a compiled product; numbers of tokens are rounded up to a power of 2


class Expert:
    """One expert, with projections from the layer's stacks.

    Args:
        plan: knows the published names of its tensors.
        layer: the layer that contains the expert.
        number: index of the expert.
        given: the inputs of the expert, float [tokens, in].

    Attributes:
        spec: the spec of the layer.
        sublayer: the stages to calibrate, in order.
        values: f32 weights [out, in] by the projections' names.
    """

    def __init__(self, plan: SavePlan, layer: CalibratedLayer, number: int, given: np.ndarray) -> None:
        part = layer.spec.feed_forward
        assert isinstance(part, Experts)
        self.spec: LayerSpec = layer.spec
        self._plan, self._number, self._stacks = plan, number, f"{layer.prefix}{part.name}.experts."
        self._activation = part.activation if part.gated else AS_GATE[part.activation]
        first = ("gate_proj", "up_proj") if part.gated else ("up_proj",)
        # An input that is not a multiple of the output of ``up`` cannot take scales from it.
        is_multiple = part.gated and not part.bias and part.activation != CLAMPED_SWIGLU
        second = Stage(("down_proj",), None, "up_proj" if is_multiple else None)
        self.sublayer = Sublayer((Stage(first, None, None), second), None)
        stacks, own = layer.values, f"{part.name}.experts"
        self.values = {f"{each}.weight": stacks[f"{own}.{each}.weight"][number] for each in (*first, "down_proj")}
        biases = {each: stacks.get(f"{own}.{each}.bias") for each in first}
        self._biases = {each: None if bias is None else bias[number] for each, bias in biases.items()}
        self._dtype, self._device = layer.dtype, layer.device
        self._tokens = len(given)
        size = max(LEAST_ROWS, 1 << (self._tokens - 1).bit_length())
        padded = np.zeros((size, given.shape[1]), given.dtype)
        padded[: self._tokens] = given
        self._given = jax.device_put(padded, self._device)

    def name(self, name: str) -> str:
        """The published name of a tensor."""
        return self._plan.expert_name(self._stacks + name, self._number)

    def put(self, name: str, values: np.ndarray) -> None:
        """Replaces a weight."""
        self.values[name] = values

    def inputs(self, stage: Stage) -> InputStatistics:
        """Statistics of the inputs of a stage's projections."""
        given = self._given
        if stage.modules == ("down_proj",):
            up, bias_up = self._projection("up_proj")
            gate, bias_gate = self._projection("gate_proj") if "gate_proj" in self._biases else (up, bias_up)
            given = _inner(given, self._tokens, gate, bias_gate, up, bias_up, activation=self._activation)
        return InputStatistics.of([given], tokens=self._tokens)

    def _projection(self, name: str) -> tuple[jax.Array, jax.Array | None]:
        bias = self._biases[name]
        weight = jax.device_put(self.values[f"{name}.weight"].astype(self._dtype), self._device)
        return weight, None if bias is None else jax.device_put(bias, self._device)


def reached(
    plan: SavePlan, layer: CalibratedLayer, rows: list[tuple[np.ndarray, np.ndarray]], missed: list[int]
) -> Iterator[Expert]:
    """Yields the experts that a token reaches, one after the other; a calibrated one is put into the layer.

    Args:
        plan, layer: see `Expert`.
        rows: results of `layer.dispatched` for each sequence.
        missed: gets the numbers of the other experts.
    """
    part = layer.spec.feed_forward
    assert isinstance(part, Experts)
    given, chosen = (np.concatenate(each) for each in zip(*rows, strict=True))
    changed: set[str] = set()
    for number in range(part.count):
        own = (chosen == number).any(axis=1)
        if not own.any():
            missed.append(number)
            continue
        expert = Expert(plan, layer, number, given[own])
        yield expert
        for name, values in expert.values.items():
            stack = f"{part.name}.experts.{name}"
            layer.values[stack][number] = values
            changed.add(stack)
    for stack in changed:
        layer.put(stack, layer.values[stack])


@partial(jax.jit, static_argnames="activation")
def _inner(
    x: jax.Array,
    tokens: int,
    gate: jax.Array,
    bias_gate: jax.Array | None,
    up: jax.Array,
    bias_up: jax.Array | None,
    *,
    activation: str,
) -> jax.Array:
    """The input of ``down``, f32 [N, inner], for the first rows, and zeros for the others."""
    wide = x.astype(jnp.float32)
    inner = gated(activation, linear(wide, gate, bias_gate), linear(wide, up, bias_up))
    return jnp.where((jnp.arange(len(x)) < tokens)[:, None], inner, 0)
