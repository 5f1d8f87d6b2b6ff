"""What a request may ask of a model that makes vectors of texts. Names follow vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from llmjax.errors import InvalidRequest
from llmjax.models.layers.pooling import Task

PoolingTask = Literal["embed", "classify", "score", "token_embed", "token_classify"]

# What a model has to be made for.
NEEDS: Mapping[PoolingTask, Task] = MappingProxyType(
    {
        "embed": "embed",
        "token_embed": "embed",
        "classify": "classify",
        "score": "classify",
        "token_classify": "classify",
    }
)


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Parameters of one request.

    Args:
        task: what is made of the text; None: what the model is for. ``token_embed`` and ``token_classify`` make a
            vector of each token.
        dimensions: leading entries of an embedding that are kept, which is then normalized again (Matryoshka
            representations, Kusupati et al. 2022, arXiv:2205.13147).
        normalize: embeddings are divided by their lengths; None: as the model's makers say.
        use_activation: labels get probabilities, not logits; None: as the model's makers say.
        truncate_prompt_tokens: tokens of a text that are kept, special ones included; -1: as many as the model takes;
            None: a longer text is an error.
        prompt_name: which of the model's prompts is put in front of a text; None: the model's default, if it has one.

    Raises:
        InvalidRequest: a value is out of range.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in NEEDS:
            raise InvalidRequest(f"task must be one of {', '.join(NEEDS)}, not {self.task!r}", field="task")
        for name in ("dimensions", "truncate_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidRequest(f"{name} must be an integer, not {value!r}", field=name)
        if self.dimensions is not None and self.dimensions < 1:
            raise InvalidRequest(f"dimensions must be at least 1, not {self.dimensions}", field="dimensions")
        if (keep := self.truncate_prompt_tokens) is not None and keep != -1 and keep < 1:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or at least 1, not {keep}", field="truncate_prompt_tokens"
            )
