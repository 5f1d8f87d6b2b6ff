"""Recurrent layers: states that each token rewrites, read and written by page of tokens."""

from __future__ import annotations
