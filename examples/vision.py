"""A question about a picture, in this process."""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw

from llmjax import LLM, SamplingParams


def drawn() -> Image.Image:
    """A red disk on white, for those that have no picture at hand."""
    picture = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(picture).ellipse((40, 40, 184, 184), fill="red")
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="HuggingFaceTB/SmolVLM-256M-Instruct", help="a model that sees")
    parser.add_argument("--image", type=Path, metavar="FILE", help="the picture (default: one that is drawn)")
    parser.add_argument("--question", default="What color is the disk?", help="what to ask")
    parser.add_argument("--max-tokens", type=int, default=32, metavar="N", help="longest answer (default: 32)")
    arguments = parser.parse_args()

    picture = drawn() if arguments.image is None else arguments.image
    content = [{"type": "image", "image": picture}, {"type": "text", "text": arguments.question}]
    llm = LLM(model=arguments.model)
    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    output = llm.chat([{"role": "user", "content": content}], params)[0]
    print(f"{len(output.prompt_token_ids)} tokens in the prompt")
    print(output.outputs[0].text)


if __name__ == "__main__":
    main()
