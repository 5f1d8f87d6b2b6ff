"""``python -m llmjax``: the console script."""

import sys

from llmjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
