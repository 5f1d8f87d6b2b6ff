"""Flax NNX modules, which compute what `llmjax.models.layers` describes. Only what traces programs imports them."""
