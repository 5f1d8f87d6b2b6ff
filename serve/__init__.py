"""The HTTP server: OpenAI's API over an engine. ``python -m serve``, ``run.run``, ``app.create_app``."""
