"""The one error that model definitions raise on purpose."""

from __future__ import annotations


class UnsupportedModel(ValueError):
    """A model's configuration is unknown, unsupported or contradictory; the message names the key and its value."""
