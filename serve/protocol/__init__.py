"""Request bodies as pydantic models. Responses are plain dicts, which is faster; tests hold them to openai's types."""
