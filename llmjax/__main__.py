"""``python -m llmjax``: the console script."""

from llmjax.cli import script

if __name__ == "__main__":
    script()
