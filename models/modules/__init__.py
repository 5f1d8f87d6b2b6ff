"""Flax NNX modules, which compute what `llmjax.models.layers` describes. Only what traces a program imports them."""
