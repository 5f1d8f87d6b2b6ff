"""Many streams at once that ask for everything: errors, pages that stay held, gaps between tokens, memory.

    python -m benchmarks.mixed_streams [--config smollm2] [--streams 64] [--seconds 300] [--speculation off,on]

A server of its own, in a process of its own, gets chats, completions, responses and messages with forms, tools,
log-probabilities, several continuations, stop strings, penalties and filters, and clients that leave half way. Every
answer is checked: how it ends, how many continuations and tokens it has, that forms are kept, and that the events of
responses and messages come in order and tell what their end tells. Engine flags are passed on. The status is 1 if an
answer was wrong or a page is held when all have ended.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.machine import this_machine
from llmjax.bench.client import OpenAIClient, RequestFailed
from llmjax.bench.metrics import Distribution
from llmjax.bench.options import options_of
from llmjax.bench.own_server import own_server
from llmjax.bench.report import check_writable, write_json
from llmjax.cli.parser import Parser, add_config_flags, add_settings, configs_of
from llmjax.config import EngineConfig, setting
from llmjax.errors import ConfigError, LLMJaxError
from llmjax.settings import settings_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LAST: Mapping[str, Sequence[str]] = {
    RESPONSES: ("response.completed", "response.incomplete", "response.failed"),
    MESSAGES: ("message_stop",),
}
# Why a message has ended, in the words of chats.
STOP_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 4}
SPECULATION: Mapping[str, Mapping[str, Any] | None] = {"off": None, "on": DRAFTS}
START_SECONDS = 600.0
ANSWER_SECONDS = 300.0  # after which an answer counts as one that never ends
MEMORY_SECONDS = 5.0  # between two looks at it
MOST_SHOWN = 20  # errors
TOWNS = ("Ulm", "Oslo", "Rome", "Bern", "Graz", "Bonn", "Wien", "Nice")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "strict": True, "parameters": PERSON}}
DATES = r"[0-9]{4}-[0-9]{2}-[0-9]{2}(, [0-9]{4}-[0-9]{2}-[0-9]{2}){2}"
STOPS = ["\n\n", "the end", "."]


@dataclass
class Answer:
    """What has come of one answer, by the number of the continuation."""

    texts: dict[int, list[str]] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)  # of calls
    reasons: dict[int, str] = field(default_factory=dict)
    times: dict[int, list[float]] = field(default_factory=dict)  # of chunks that bring something
    logprobs: int = 0  # tokens that have some
    tokens: int = 0
    events: int = 0
    block: int | None = None  # of a message, that is open
    disorder: str | None = None  # what is wrong with the events themselves

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """The next event of the stream."""
        kind = event.get("type")
        if kind is None:
            self._take_chunk(event, now)
        elif kind.startswith("response."):
            self._take_of_response(kind, event, now)
        else:
            self._take_of_message(kind, event, now)
        self.events += 1

    def _take_of_response(self, kind: str, event: Mapping[str, Any], now: float) -> None:
        if event["sequence_number"] != self.events:
            self._note(f"event {self.events} has the number {event['sequence_number']}")
        match kind:
            case "response.output_text.delta" | "response.reasoning_text.delta":
                self.logprobs += len(event.get("logprobs") or ())
                self._say(now, text=event["delta"])
            case "response.function_call_arguments.delta":
                self._say(now, arguments=event["delta"])
            case "response.completed" | "response.incomplete" | "response.failed":
                self._end_response(event["response"])

    def _end_response(self, response: Mapping[str, Any]) -> None:
        items = response["output"]
        parts = [part for item in items if item["type"] in ("message", "reasoning") for part in item["content"] or ()]
        calls = [item for item in items if item["type"] == "function_call"]
        whole, arguments = "".join(part["text"] for part in parts), "".join(call["arguments"] for call in calls)
        if (whole, arguments) != ("".join(self.texts.get(0, ())), "".join(self.arguments.get(0, ()))):
            self._note(f"its end tells {whole!r} and {arguments!r}, its deltas told something else")
        self.tokens = (response.get("usage") or {}).get("output_tokens", self.tokens)
        match response["status"]:
            case "completed":
                self.reasons[0] = "tool_calls" if calls else "stop"
            case "incomplete" if response["incomplete_details"]["reason"] == "max_output_tokens":
                self.reasons[0] = "length"
            case status:
                self.reasons[0] = f"{status}: {response.get('error')}"

    def _take_of_message(self, kind: str, event: Mapping[str, Any], now: float) -> None:
        match kind:
            case "content_block_start":
                if self.block is not None:
                    self._note(f"block {event['index']} begins inside of block {self.block}")
                self.block = event["index"]
            case "content_block_delta":
                if self.block != event["index"]:
                    self._note(f"a delta of block {event['index']} in block {self.block}")
                delta = event["delta"]
                self._say(
                    now, text=delta.get("text") or delta.get("thinking") or "", arguments=delta.get("partial_json", "")
                )
            case "content_block_stop":
                if self.block != event["index"]:
                    self._note(f"block {event['index']} ends, and {self.block} is open")
                self.block = None
            case "message_delta":
                reason = event["delta"]["stop_reason"]
                self.reasons[0] = STOP_REASONS.get(reason, str(reason))
                self.tokens = event["usage"]["output_tokens"]
            case "message_stop" if self.block is not None:
                self._note(f"block {self.block} does not end")

    def _note(self, disorder: str) -> None:
        """The first thing that is wrong counts."""
        self.disorder = self.disorder or disorder

    def _say(self, now: float, *, text: str = "", arguments: str = "") -> None:
        """What the one answer of a response or a message goes on with."""
        self.texts.setdefault(0, []).append(text)
        self.arguments.setdefault(0, []).append(arguments)
        if text or arguments:
            self.times.setdefault(0, []).append(now)

    def _take_chunk(self, event: Mapping[str, Any], now: float) -> None:
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        for choice in event.get("choices") or ():
            index, delta = choice["index"], choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning") or ""
            calls = "".join(call["function"]["arguments"] for call in delta.get("tool_calls") or ())
            scores = choice.get("logprobs") or {}
            self.logprobs += len(scores.get("content") or scores.get("token_logprobs") or ())
            self.texts.setdefault(index, []).append(text)
            self.arguments.setdefault(index, []).append(calls)
            if text or calls:
                self.times.setdefault(index, []).append(now)
            if choice.get("finish_reason"):
                self.reasons[index] = choice["finish_reason"]

    @property
    def gaps(self) -> list[float]:
        """Seconds between the chunks of each continuation."""
        return [b - a for times in self.times.values() for a, b in itertools.pairwise(times)]

    def whole(self) -> list[str]:
        """The texts of continuations that ended by themselves."""
        return ["".join(self.texts.get(index, ())) for index, reason in self.reasons.items() if reason == "stop"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a request asks for.

    Args:
        fields: beside the prompt, the length and the stream.
        wrong: what is wrong with an answer; None: nothing is.
        leaves: the client does so half way.
    """

    path: str = CHAT
    fields: Mapping[str, Any] = field(default_factory=dict)
    wrong: Callable[[Answer], str | None] = lambda _: None
    leaves: bool = False


def _not_json(answer: Answer) -> str | None:
    return next((f"not the form: {text!r}" for text in answer.whole() if not _is_person(text)), None)


def _wrong_calls(answer: Answer) -> str | None:
    called = [index for index, reason in answer.reasons.items() if reason == "tool_calls"]
    texts = ["".join(answer.arguments[index]) for index in called]
    return next((f"not the arguments: {text!r}" for text in texts if not _is_person(text)), None)


def _is_person(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and value.keys() == {"name", "age"} and value["age"] in range(100)


def _no_calls(answer: Answer) -> str | None:
    ended = set(answer.reasons.values())
    return _wrong_calls(answer) or (None if ended <= {"tool_calls", "length"} else f"no call: {answer.reasons}")


def _no_dates(answer: Answer) -> str | None:
    return next((f"not the form: {text!r}" for text in answer.whole() if not re.fullmatch(DATES, text)), None)


def _no_logprobs(answer: Answer) -> str | None:
    return None if answer.logprobs >= answer.tokens - len(answer.reasons) else f"{answer.logprobs} of {answer.tokens}"


def _has_stops(answer: Answer) -> str | None:
    return next((f"goes on after a stop: {text!r}" for text in answer.whole() if any(s in text for s in STOPS)), None)


_FORM = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
}
_TOOLS = {"tools": [WEATHER], "parallel_tool_calls": False}
_UNKEPT = {"store": False}  # what is kept would be seen in the memory
_RESPONSE_FORM = {"text": {"format": {"type": "json_schema", "name": "person", "strict": True, "schema": PERSON}}}
_RESPONSE_TOOLS = {
    "tools": [{"type": "function", "name": "get_weather", "strict": True, "parameters": PERSON}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
}
_MESSAGE_TOOLS = {
    "tools": [{"name": "get_weather", "strict": True, "input_schema": PERSON}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}
_MESSAGE_FORM = {"output_config": {"format": {"type": "json_schema", "schema": PERSON}}}
_RESPONSE_SCORES = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
KINDS: Mapping[str, Kind] = {
    "chat": Kind(),
    "completion": Kind(path=TEXT),
    "greedy": Kind(path=TEXT, fields={"temperature": 0}),
    "filters": Kind(fields={"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02}),
    "penalties": Kind(fields={"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.1}),
    "biases": Kind(path=TEXT, fields={"logit_bias": {"40": 2, "41": -100}, "bad_words": ["the"], "min_tokens": 5}),
    "stop strings": Kind(path=TEXT, fields={"stop": STOPS}, wrong=_has_stops),
    "logprobs": Kind(fields={"logprobs": True, "top_logprobs": 3}, wrong=_no_logprobs),
    "two": Kind(fields={"n": 2}),
    "two with logprobs": Kind(path=TEXT, fields={"n": 2, "logprobs": 2, "stop": STOPS}, wrong=_has_stops),
    "JSON": Kind(fields=_FORM, wrong=_not_json),
    "filtered JSON": Kind(fields={**_FORM, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "n": 2}, wrong=_not_json),
    "expression": Kind(path=TEXT, fields={"structured_outputs": {"regex": DATES}, "logprobs": 1}, wrong=_no_dates),
    "tools": Kind(fields=_TOOLS, wrong=_wrong_calls),
    "forced tools": Kind(fields={**_TOOLS, "tool_choice": "required"}, wrong=_no_calls),
    "response": Kind(path=RESPONSES, fields=_UNKEPT),
    "response with logprobs": Kind(path=RESPONSES, fields=_UNKEPT | _RESPONSE_SCORES, wrong=_no_logprobs),
    "response in JSON": Kind(path=RESPONSES, fields=_UNKEPT | _RESPONSE_FORM, wrong=_not_json),
    "response with tools": Kind(path=RESPONSES, fields=_UNKEPT | _RESPONSE_TOOLS, wrong=_no_calls),
    "message": Kind(path=MESSAGES),
    "message with stop strings": Kind(path=MESSAGES, fields={"stop_sequences": STOPS}, wrong=_has_stops),
    "message in JSON": Kind(path=MESSAGES, fields=_MESSAGE_FORM, wrong=_not_json),
    "message with tools": Kind(path=MESSAGES, fields=_MESSAGE_TOOLS, wrong=_no_calls),
    "leaves a response": Kind(path=RESPONSES, fields=_UNKEPT, leaves=True),
    "leaves a message": Kind(path=MESSAGES, leaves=True),
    "leaves a chat": Kind(leaves=True),
    "leaves a form": Kind(fields=_FORM, leaves=True),
    "leaves two": Kind(path=TEXT, fields={"n": 2, "logprobs": 1}, leaves=True),
}


@dataclass(frozen=True, kw_only=True)
class MixedOptions:
    """How much is asked."""

    streams: int = setting(64, "requests at a time", section="mixed")
    seconds: float = setting(300.0, "that are measured, of each run")
    warm_up: float = setting(60.0, "seconds of the same before")
    tokens: int = setting(64, "of each answer at most")
    speculation: Sequence[str] = setting(tuple(SPECULATION), "runs without drafts and with them")
    output_json: str | None = setting(None, "file for all figures as JSON")

    def __post_init__(self) -> None:
        for name in ("streams", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")
        if self.seconds <= 0 or self.warm_up < 0:
            raise ConfigError("--seconds must be above 0, and --warm-up not below it")
        if unknown := set(self.speculation) - set(SPECULATION):
            raise ConfigError(f"--speculation: {min(unknown)!r} is none of {', '.join(SPECULATION)}")


@dataclass(frozen=True, kw_only=True)
class Run:
    """One server. Times in seconds, memory in bytes."""

    speculation: str
    requests: dict[str, int]
    tokens: int
    errors: list[str]
    gap_median: float
    gap_p99: float
    pages_held: int
    memory: list[int]

    @property
    def good(self) -> bool:
        return not self.errors and not self.pages_held


class Load:
    """Clients that ask one thing after another."""

    def __init__(self, client: OpenAIClient, model: str, *, tokens: int, seed: int) -> None:
        self._client = client
        self._model = model
        self._tokens = tokens
        self._random = random.Random(seed)
        self._kinds = itertools.cycle(self._random.sample(list(KINDS), len(KINDS)))
        self.requests: Counter[str] = Counter()
        self.gaps: list[float] = []
        self.errors: list[str] = []
        self.tokens = 0

    async def run(self, streams: int, seconds: float) -> None:
        """Keeps a number of requests under way for some time, and waits for the last of them."""
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.ask(next(self._kinds))

        await asyncio.gather(*(client() for _ in range(streams)))

    async def ask(self, name: str) -> None:
        """One request, whatever comes of it."""
        kind, answer = KINDS[name], Answer()
        leaves_after = self._random.randint(1, self._tokens // 2 + 1) if kind.leaves else None
        self.requests[name] += 1
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                stream = self._client.stream(kind.path, self._body(kind), last=LAST.get(kind.path, ()))
                async with aclosing(stream) as events:
                    async for event in events:
                        answer.take(event, time.perf_counter())
                        if leaves_after is not None and sum(map(len, answer.times.values())) >= leaves_after:
                            break
            if leaves_after is None and (wrong := self._wrong(kind, answer)) is not None:
                self.errors.append(f"{name}: {wrong}")
        except RequestFailed as error:
            self.errors.append(f"{name}: {error}")
        except TimeoutError:
            self.errors.append(f"{name}: no end after {ANSWER_SECONDS:g} s")
        self.gaps += answer.gaps
        self.tokens += answer.tokens

    def _wrong(self, kind: Kind, answer: Answer) -> str | None:
        if answer.disorder is not None:
            return answer.disorder
        count = kind.fields.get("n", 1)
        if set(answer.reasons) != set(range(count)) or not set(answer.reasons.values()) <= {
            "stop",
            "length",
            "tool_calls",
        }:
            return f"ends {answer.reasons} of {count}"
        if not 0 < answer.tokens <= count * self._tokens:
            return f"{answer.tokens} tokens of at most {count * self._tokens}"
        return kind.wrong(answer)

    def _body(self, kind: Kind) -> dict[str, Any]:
        town, number = self._random.choice(TOWNS), self._random.randint(2, 999)
        question = f"Tell me about {number} people of {town}. " + "Repeat what I say. " * self._random.randint(0, 4)
        chat = {"messages": [{"role": "user", "content": question}], "max_tokens": self._tokens}
        usage = {"stream_options": {"include_usage": True}}
        if kind.path == RESPONSES:
            fields: dict[str, Any] = {"input": question, "max_output_tokens": self._tokens}
        elif kind.path == TEXT:
            fields = {"prompt": question, "max_tokens": self._tokens, **usage}
        else:
            fields = chat | (usage if kind.path == CHAT else {})
        return {"model": self._model, **fields, "seed": self._random.randrange(2**31), "stream": True, **kind.fields}


def main(argv: list[str]) -> int:
    """Measures, prints the table and what was wrong.

    Raises:
        LLMJaxError: a setting is wrong, or a server does not start.
    """
    parser = Parser(prog="python -m benchmarks.mixed_streams", description="Many streams that ask for everything.")
    add_settings(parser, settings_of(MixedOptions).values(), section="mixed")
    add_config_flags(parser)
    values = parser.parse(argv)
    options = options_of(MixedOptions, values)
    check_writable(options.output_json)
    config = configs_of(values).engine
    config = config.with_room(seqs=options.streams)
    runs = [asyncio.run(measure(config, options, name)) for name in options.speculation]
    report(runs, options)
    return 0 if all(run.good for run in runs) else 1


async def measure(config: EngineConfig, options: MixedOptions, speculation: str) -> Run:
    """A server under all of it, with drafts or without."""
    drafts = SPECULATION[speculation]
    config = config.replace(speculative_config=None if drafts is None else dict(drafts))
    async with own_server(config, seconds=START_SECONDS) as server:
        client = OpenAIClient(server.url, timeout=ANSWER_SECONDS)
        try:
            model = await client.first_model()
            await Load(client, model, tokens=options.tokens, seed=1).run(options.streams, options.warm_up)
            load = Load(client, model, tokens=options.tokens, seed=2)
            memory = [resident(server.pid)]
            watching = asyncio.create_task(_watch(server.pid, memory))
            await load.run(options.streams, options.seconds)
            watching.cancel()
            await load.ask("greedy")  # whose last step counts the pages that are held then
            pages = await held_pages(client)
            memory.append(resident(server.pid))
        finally:
            await client.close()
    gaps = Distribution.of(load.gaps, (99,))
    if gaps is None:
        raise LLMJaxError(f"nothing was streamed: {load.errors[:3]}")
    return Run(
        speculation=speculation,
        requests=dict(load.requests),
        tokens=load.tokens,
        errors=load.errors,
        gap_median=gaps.median,
        gap_p99=gaps.percentiles[99],
        pages_held=pages,
        memory=memory,
    )


async def _watch(pid: int, memory: list[int]) -> None:
    while True:
        await asyncio.sleep(MEMORY_SECONDS)
        memory.append(resident(pid))


async def held_pages(client: OpenAIClient) -> int:
    """Pages that requests hold."""
    usage = total = 0.0
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            if sample.name == "vllm:kv_cache_usage_perc":
                usage = sample.value
            elif sample.name == "vllm:cache_config_info":
                total = float(sample.labels["num_gpu_blocks"])
    return math.ceil(usage * total)


def resident(pid: int) -> int:
    """Bytes of memory that a process and its children have (Linux's /proc; 0 elsewhere)."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = " ".join(task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:  # it has just ended
        return 0
    return 4096 * pages + sum(resident(int(child)) for child in children.split())


def report(runs: Sequence[Run], options: MixedOptions) -> None:
    """Prints the table, what was wrong, and writes the file that is asked for.

    Raises:
        ConfigError: the file cannot be written.
    """
    machine, date = this_machine(), datetime.now(UTC).date().isoformat()
    title = f"{options.streams} mixed streams, {options.seconds:g} s each; {machine}; {date}"
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for column in ("drafts", "requests", "tokens", "errors", "gap, median ms", "99 %", "ratio", "pages held"):
        table.add_column(column, justify="right")
    table.add_column("MiB at the beginning, middle, end", justify="right")
    for run in runs:
        memory = [run.memory[0], run.memory[len(run.memory) // 2], run.memory[-1]]
        table.add_row(
            run.speculation,
            f"{sum(run.requests.values()):,}",
            f"{run.tokens:,}",
            f"{len(run.errors)}",
            f"{1e3 * run.gap_median:.1f}",
            f"{1e3 * run.gap_p99:.1f}",
            f"{run.gap_p99 / run.gap_median:.2f}",
            f"{run.pages_held}",
            " ".join(f"{size / 2**20:,.0f}" for size in memory),
        )
    console = Console(width=160)
    console.print(table)
    for run in runs:
        for error in run.errors[:MOST_SHOWN]:
            console.print(f"drafts {run.speculation}: {error}", markup=False)
    if options.output_json is not None:
        content = {"date": date, "machine": asdict(machine), "runs": [asdict(run) for run in runs]}
        write_json(Path(options.output_json), content)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LLMJaxError as error:
        sys.exit(f"mixed_streams: error: {error}")
