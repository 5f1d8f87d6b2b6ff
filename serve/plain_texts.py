"""Texts of requests for vectors that are read without what a tokenizer puts around a text."""

from __future__ import annotations

from llmjax.engine.info import PoolerInfo
from llmjax.pooling_params import PoolingParams
from llmjax.tokenizer import Tokenizer


def plain_ids(
    text: str, params: PoolingParams, *, tokenizer: Tokenizer, pooler: PoolerInfo, max_tokens: int
) -> list[int] | None:
    """Token ids of a text behind its prompt, without special tokens: at least as many as are kept of it.

    Args:
        max_tokens: as many as the model takes.

    Returns:
        None: the model has no prompt of that name, as the engine says of the text itself.

    Raises:
        PromptTooLong: there are surely more than the model takes, and they are not to be cut.
    """
    name = pooler.default_prompt if params.prompt_name is None else params.prompt_name
    if name is not None and name not in pooler.prompts:
        return None
    whole = text if name is None else pooler.prompts[name] + text
    whole = whole.lower() if pooler.lowercase else whole
    keep = params.truncate_prompt_tokens
    if keep is None:
        tokenizer.check_length(whole, max_tokens=max_tokens)
        return tokenizer.encode(whole, add_special_tokens=False)
    kept = max_tokens if keep == -1 else min(keep, max_tokens)  # more is an error, as the engine says
    return tokenizer.encode_end(whole, tokens=kept, side="right", add_special_tokens=False)
