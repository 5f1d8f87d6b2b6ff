"""Constraints on sampling: forms of output become grammars, and grammars become matchers over a vocabulary."""
