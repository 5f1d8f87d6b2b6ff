"""``llmjax bench vision``: pictures through the engine in this process, with what is spent on each part."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from llmjax.bench.options import as_setup, options_of
from llmjax.bench.random_mm import random_picture, random_text
from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_config_flags, add_model, add_settings, configs_of
from llmjax.config import setting
from llmjax.errors import ConfigError, InvalidRequest
from llmjax.media.files import IMAGE_BYTES, file_content
from llmjax.migration import vllm_bench
from llmjax.sampling.params import SamplingParams
from llmjax.settings import settings_of

if TYPE_CHECKING:
    from llmjax import LLM
    from llmjax.config import EngineConfig
    from llmjax.media.image import PreparedImage

MOST_SIDE = 16384  # pixels


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """What is measured."""

    num_images: Sequence[int] = setting((1, 2, 4), "pictures of a request, one measurement each", section="pictures")
    image_size: Sequence[str] = setting(
        ("256x256", "512x512"), "width and height of random pictures, one measurement each"
    )
    input_vision_file: str | None = setting(
        None, "a picture that is asked about, in place of random ones; the answer is printed"
    )
    prompt: str = setting("Describe this image.", "what is asked about it")
    input_len: int = setting(32, "random tokens beside random pictures")
    output_len: int = setting(32, "tokens of an answer", aliases=("--max-output-len",))
    batch_size: int = setting(1, "requests at once", aliases=("--num-prompts",))
    num_iters: int = setting(3, "batches that are timed, of which the median counts")
    beside: int = setting(0, "text streams whose pace beside the encoder is measured instead")
    output_json: str | None = setting(None, "file for the result as JSON")

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "batch_size", "num_iters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        if self.beside < 0:
            raise ConfigError(f"--beside must not be negative, but is {self.beside}")
        if not self.num_images or min(self.num_images) < 1:
            raise ConfigError("--num-images must be numbers of at least 1")
        self.sizes()

    def sizes(self) -> list[tuple[int, int]]:
        """Widths and heights."""
        found = []
        for text in self.image_size:
            width, _, height = text.lower().partition("x")
            if not (width.isdecimal() and height.isdecimal()) or not (
                0 < int(width) <= MOST_SIDE and 0 < int(height) <= MOST_SIDE
            ):
                raise ConfigError(f"--image-size must be WIDTHxHEIGHT, with sides of 1 to {MOST_SIDE}, not {text!r}")
            found.append((int(width), int(height)))
        return found


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a batch took: medians of the timed batches.

    Attributes:
        size: width and height of the pictures.
        images: pictures of a request.
        rows: feature rows of a request.
        prompt_tokens: tokens of a prompt.
        prepare: seconds to decode and prepare the pictures of a request, in one process.
        first_token: seconds until the batch's last request has its first token.
        encoder: the part of them that is saved where the pictures' rows are there already.
        prompt: the rest of them.
        token: seconds between the tokens of a request.
        requests_per_second, images_per_second: what whole batches come to, without the time to prepare.
    """

    size: str
    images: int
    rows: int
    prompt_tokens: int
    prepare: float
    first_token: float
    encoder: float
    prompt: float
    token: float
    requests_per_second: float
    images_per_second: float


def command_line() -> Parser:
    """The flags of the benchmark."""
    parser = Parser(
        prog="llmjax bench vision", description="Time pictures: how long the encoder, the prompt and the answer take."
    )
    add_model(parser)
    add_settings(parser, settings_of(VisionOptions).values(), section="pictures")
    add_config_flags(parser, rows=vllm_bench.OFFLINE)
    return parser


def main(argv: list[str]) -> int:
    """Runs the benchmark and prints its table.

    Raises:
        LLMJaxError: a setting is wrong, the model cannot be loaded, or it sees no pictures.
    """
    values = command_line().parse(argv)
    options = options_of(VisionOptions, values)
    check_writable(options.output_json)
    config = configs_of(values, model=values.positional_model).engine
    if options.beside:
        return _beside(config, options)
    files = _files(options, seed=config.seed)
    from llmjax import LLM

    llm = LLM.from_config(config)
    try:
        if llm.images is None:
            raise ConfigError(f"{llm.model_name} sees no pictures")
        llm.warm_up()
        if options.input_vision_file is not None:
            asked = _asked(llm, options)
            Console().print(asked, markup=False)
        parts = [_measured(llm, options, files, size, count) for size in files for count in options.num_images]
    finally:
        llm.close()
    Console().print(_table(parts, title=f"{llm.model_name}: {options.batch_size} × {options.output_len} tokens"))
    if options.output_json is not None:
        setup = {"benchmark": "vision", "model_id": llm.model_name, **as_setup(options)}
        write_json(Path(options.output_json), {**setup, "results": [asdict(one) for one in parts]})
    return 0


def _beside(config: EngineConfig, options: VisionOptions) -> int:
    """Measures streams beside the encoder and prints the table."""
    import asyncio

    from llmjax.bench.vision_beside import measured

    paces = [
        asyncio.run(measured(config, files, streams=options.beside, images=max(options.num_images), size=size))
        for size, files in _files(options, seed=config.seed).items()
    ]
    table = Table(title=f"{options.beside} streams, tokens/s", title_justify="left")
    for column in ("pictures", "alone", "beside the encoder", "share", "encoder, s"):
        table.add_column(column, justify="left" if column == "pictures" else "right", no_wrap=True)
    for one in paces:
        cells = (f"{one.alone:.1f}", f"{one.beside:.1f}", f"{one.share:.0%}", f"{one.encoder:.2f}")
        table.add_row(f"{one.images} × {one.size}", *cells)
    Console().print(table)
    if options.output_json is not None:
        setup = {"benchmark": "vision", "model_id": config.model, **as_setup(options)}
        write_json(Path(options.output_json), {**setup, "results": [asdict(one) for one in paces]})
    return 0


def _asked(llm: LLM, options: VisionOptions) -> str:
    """What the model says about the file."""
    content = [
        {"type": "image", "image": options.input_vision_file},
        {"type": "text", "text": options.prompt},
    ]
    params = SamplingParams(temperature=0, max_tokens=options.output_len)
    (output,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
    return output.outputs[0].text


def _files(options: VisionOptions, *, seed: int) -> dict[str, list[bytes]]:
    """Files of pictures by their size; as many as all batches of a measurement have, but of a given one."""
    if options.input_vision_file is not None:
        path = Path(options.input_vision_file).expanduser()
        try:
            return {path.name: [file_content(path, most=IMAGE_BYTES)]}
        except InvalidRequest as error:
            raise ConfigError(f"--input-vision-file {path}: {error}") from None
    import base64

    rng, count = np.random.default_rng(seed), max(options.num_images) * options.batch_size * (options.num_iters + 1)
    return {
        f"{width}x{height}": [
            base64.b64decode(random_picture(height, width, rng=rng).partition(",")[2]) for _ in range(count)
        ]
        for width, height in options.sizes()
    }


def _measured(llm: LLM, options: VisionOptions, files: dict[str, list[bytes]], size: str, count: int) -> Parts:
    """A measurement: each batch with pictures that are new, and again with other texts, when their rows are known."""
    assert llm.images is not None
    rng, batch = np.random.default_rng(0), options.batch_size
    prepared: list[list[PreparedImage]] = []
    seconds: list[float] = []
    runs: list[tuple[_Run, _Run]] = []
    for number in range(options.num_iters + 1):  # the first one compiles
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        start = number * batch * count
        prepared = [
            llm.images.prepared([files[size][(start + i * count + j) % len(files[size])] for j in range(count)])
            for i in range(batch)
        ]
        took = (time.perf_counter() - begin) / batch
        both = _run(llm, options, prepared, rng), _run(llm, options, prepared, rng)
        if number:
            seconds.append(took)
            runs.append(both)
    new, known = (statistics.median(pair[i].first_token for pair in runs) for i in range(2))
    per_batch = statistics.median(pair[0].seconds for pair in runs)
    return Parts(
        size=size,
        images=count,
        rows=sum(image.num_rows for image in prepared[0]),
        prompt_tokens=runs[0][0].prompt_tokens,
        prepare=statistics.median(seconds),
        first_token=new,
        encoder=max(new - known, 0.0),
        prompt=min(known, new),
        token=statistics.median(pair[0].token for pair in runs),
        requests_per_second=batch / per_batch,
        images_per_second=batch * count / per_batch,
    )


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A batch: seconds until its last request has a first token, of a further token, and of all of it."""

    prompt_tokens: int
    first_token: float
    token: float
    seconds: float


def _run(llm: LLM, options: VisionOptions, prepared: list[list[PreparedImage]], rng: np.random.Generator) -> _Run:
    """Answers a request for each list of pictures, after random tokens that no earlier one had."""
    assert llm.images is not None
    placeholder = list(llm.images.processor.placeholder)
    prompts: list[Any] = []
    for pictures in prepared:
        text = random_text(llm.images.processor, options.input_len, vocab_size=llm.info.vocab_size, rng=rng)
        # What comes first tells prompts apart, so that no prefix is found; where that is the picture, a salt does.
        half = 0 if llm.images.processor.sole else max(1, len(text) // 2)
        ids = [*text[:half], *placeholder * len(pictures), *text[half:]]
        salt = {"cache_salt": rng.bytes(16).hex()} if not half else {}
        prompts.append({"prompt_token_ids": ids, "multi_modal_data": {"image": pictures}, **salt})
    params = SamplingParams(temperature=0.0, max_tokens=options.output_len, ignore_eos=True, detokenize=False)
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    if len(metrics) < len(outputs):
        raise ConfigError("a request came back without its times")
    gaps = [
        (one.finished_time - one.first_token_time) / (options.output_len - 1)
        for one in metrics
        if one.finished_time is not None and one.first_token_time is not None and options.output_len > 1
    ]
    return _Run(
        prompt_tokens=len(outputs[0].prompt_token_ids or ()),
        first_token=max(one.first_token_time - one.arrival_time for one in metrics if one.first_token_time is not None),
        token=statistics.median(gaps) if gaps else 0.0,
        seconds=seconds,
    )


def _table(parts: Sequence[Parts], *, title: str) -> Table:
    table = Table(title=f"{title}; times in ms", title_justify="left", collapse_padding=True, pad_edge=False)
    columns = ("pictures", "rows", "tokens", "prepare", "encoder", "prompt", "first", "token", "req/s", "pics/s")
    for column in columns:
        table.add_column(column, justify="left" if column == "pictures" else "right", no_wrap=True)
    for one in parts:
        times = (one.prepare, one.encoder, one.prompt, one.first_token, one.token)
        cells = (
            f"{one.images} × {one.size}",
            str(one.rows),
            str(one.prompt_tokens),
            *(f"{t * 1e3:.1f}" for t in times),
        )
        table.add_row(*cells, f"{one.requests_per_second:.2f}", f"{one.images_per_second:.2f}")
    return table
