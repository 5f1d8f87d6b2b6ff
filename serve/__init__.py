"""The HTTP server: OpenAI's API over an engine. ``python -m serve``, ``serve.run.run``, ``serve.app.create_app``."""
