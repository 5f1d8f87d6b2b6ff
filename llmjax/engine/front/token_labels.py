"""Labels that are tokens of the vocabulary: finds their ids with the model's tokenizer."""

from __future__ import annotations

from llmjax import models
from llmjax.checkpoint import Checkpoint
from llmjax.checkpoint.label_rows import LABELS
from llmjax.errors import CheckpointError
from llmjax.tokenizer import load_tokenizer


def with_token_labels(checkpoint: Checkpoint) -> Checkpoint:
    """A model with the labels' matrix that its config asks to be made of tokens; itself, where it asks for none.

    Raises:
        CheckpointError: a token is not in the vocabulary.
        TokenizerError: there is no tokenizer beside the weights, and tokens are named by their texts.
    """
    labels = models.token_labels(checkpoint.config)
    if labels is None:
        return checkpoint
    pooler = checkpoint.model_config().pooler
    if pooler is None or pooler.task != "classify":
        return checkpoint
    if LABELS in checkpoint.tensors:
        raise CheckpointError(f"{checkpoint.path}: classifier_from_token is set, but there is a labels' matrix already")
    tokenizer = None
    if any(isinstance(token, str) for token in labels.tokens):
        tokenizer = load_tokenizer(checkpoint.path, gguf=checkpoint.gguf)
    ids: list[int] = []
    for token in labels.tokens:
        token_id = token if isinstance(token, int) else None if tokenizer is None else tokenizer.token_to_id(token)
        if token_id is None:
            raise CheckpointError(f"{checkpoint.path}: classifier_from_token: {token!r} is not a token of the model")
        ids.append(token_id)
    return checkpoint.with_label_rows(ids)
