"""Constraints on what is sampled: forms of output as grammars, and grammars as matchers over a vocabulary."""
