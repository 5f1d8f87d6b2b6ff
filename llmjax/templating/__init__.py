"""Chat templates, rendered in processes of their own: they come with models and in requests, and nobody has read them.

``pool`` is what the rest of llmjax calls. The other modules run in the worker, which is why they import Jinja alone.
"""
