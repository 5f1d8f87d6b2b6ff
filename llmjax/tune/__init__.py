"""Measures this machine for a model, and chooses settings by it: what ``llmjax tune`` does."""
