"""What one request body may hold, worked out from what the model's context can hold."""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.config import ServerConfig
from llmjax.serve.interfaces import Engine

# A default larger than this would let the parsing of one body, which nothing can interrupt, be felt in every stream.
MOST_BYTES = 8 * 2**20
PICTURE_BYTES = 32 * 2**20  # where images may be in a body, as text
# Beside the prompt: tools, schemas, metadata.
EXTRA_BYTES = 2**20
BYTES_PER_ID = 8  # "151643, "
ESCAPED = 6  # JSON may write one byte as \u0041

# What a JSON parser makes of a body costs by the piece: about 50 ns a plain value, some 500 ns an object, array or key.
EXTRA_VALUES = 2**18
MOST_NODES = 2**15
MOST_DEPTH = 128
ANY_VALUES = 2**20  # a prompt of a million token ids


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Bounds that hold before anything is parsed.

    Args:
        bytes: size of the body.
        values: values in it: numbers, strings, objects …
        nodes: objects, arrays and keys in it.
        depth: objects and arrays around a value.
    """

    bytes: int
    values: int = EXTRA_VALUES
    nodes: int = MOST_NODES
    depth: int = MOST_DEPTH

    @classmethod
    def of(cls, engine: Engine, config: ServerConfig) -> BodyLimits:
        """The operator's limit, or what takes every prompt that fits the context: one text of the longest tokens with
        every byte escaped, or a full batch as token ids."""
        context = engine.info.max_model_len
        text = 0 if engine.tokenizer is None else context * engine.tokenizer.max_token_bytes * ESCAPED
        ids = context * engine.config.max_num_seqs * BYTES_PER_ID
        # Lists of texts are longer than what runs at once: the server works through them.
        lists = MOST_BYTES if engine.info.pooler is not None else 0
        images = PICTURE_BYTES if engine.info.vision is not None else 0
        fitting = min(max(text, ids, lists) + EXTRA_BYTES, MOST_BYTES) + images
        size = fitting if config.max_request_bytes is None else config.max_request_bytes
        return cls(bytes=size, values=context + EXTRA_VALUES)

    @classmethod
    def of_any(cls, config: ServerConfig) -> BodyLimits:
        """The operator's limit, or the largest there is: what holds before it is known which model a body is for."""
        return cls(bytes=config.max_request_bytes or MOST_BYTES + PICTURE_BYTES, values=ANY_VALUES)
