"""The table of every ``general.architecture`` of GGUF files that is supported, with Hugging Face's model for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from llmjax.checkpoint.gguf import encoders, gemma, latent, layer_norms, like_llama, mixtures, recurrent
from llmjax.checkpoint.gguf.architecture import Architecture

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        **like_llama.ARCHITECTURES,
        **layer_norms.ARCHITECTURES,
        **gemma.ARCHITECTURES,
        **mixtures.ARCHITECTURES,
        **latent.ARCHITECTURES,
        **recurrent.ARCHITECTURES,
        **encoders.ARCHITECTURES,
    }
)
