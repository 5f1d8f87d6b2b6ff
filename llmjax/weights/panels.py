"""Which matrices are kept in panels, and how they get there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from llmjax.kernels.cpu import matrices
from llmjax.kernels.cpu.library import library
from llmjax.kernels.cpu.packing import fill_panels
from llmjax.kernels.panels import PanelTensor, panels_shape
from llmjax.weights.memory import HugePages

LAYERS = "layers."  # what names of an encoder's layers begin with


def panels_help(name: str, weight: jax.ShapeDtypeStruct | jax.Array) -> bool:
    """Whether a parameter of an encoder is a matrix that this processor multiplies faster in panels.

    Those of layers are, which all rows of a batch are multiplied with and which nothing else is done to.
    """
    native = library()
    is_matrix = name.startswith(LAYERS) and name.endswith(".weight") and len(weight.shape) == 2
    return is_matrix and weight.dtype == jnp.bfloat16 and native is not None and matrices.takes_panels(native)


def in_panels(weight: jax.Array, memory: HugePages) -> PanelTensor:
    """A matrix in panels on its device, one of jaxlib's own CPUs.

    Args:
        weight: bf16 [out, in].
        memory: where the panels are to be; rows pass by them faster in huge pages.
    """
    rows = np.asarray(weight)
    panels = memory.empty(panels_shape(*rows.shape), rows.dtype)
    fill_panels(rows, panels)
    return PanelTensor(jax.device_put(panels, weight.sharding), *rows.shape)
