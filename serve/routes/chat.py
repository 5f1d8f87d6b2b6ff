"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from llmjax.outputs import CompletionOutput, RequestOutput
from llmjax.parsing.choice import DESCRIBED, reads, tools_variable
from llmjax.parsing.families import JSON_LIST
from llmjax.serve.answers import AnswerFormat, AnswerReader
from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, cache_salt_of, ignored_fields, record_of, server_of
from llmjax.serve.errors import ApiError
from llmjax.serve.forms import answer_form, parsers_for
from llmjax.serve.generation import Job, Tally, check_priority, collect, guarded, run_job
from llmjax.serve.legacy_functions import read_functions, with_function_call
from llmjax.serve.logprobs import TokenNames, chat_logprobs, num_logprobs, prompt_logprobs
from llmjax.serve.prompts import (
    EncodedPrompt,
    Truncation,
    chat_prompt,
    off_loop,
    output_budget,
    read_tools,
    template_source,
    unread_variables,
)
from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.protocol.common import check_logprobs, check_stream, check_truncation, sampling_params
from llmjax.serve.protocol.structured import demands_form
from llmjax.serve.protocol.tools import calls_allowed, forced_tools
from llmjax.serve.sse import EventStream, delta_event, event
from llmjax.serve.thinking import ThinkingBudget, collect_within, run_within


async def chat_completions(request: Request) -> Response | ASGIApp:
    """An answer to a conversation, whole or as a stream."""
    server = server_of(request)
    config = server.config
    body = parse(await read_json(request), ChatRequest, ignored=ignored_fields(request))
    job, form, budget = await _job(server, body, request)
    answer = ChatAnswer(
        server=server,
        body=body,
        job=job,
        form=form,
        budget=budget,
        tally=Tally(job, record_of(request)),
        created=int(time.time()),
    )
    if body.stream:
        return EventStream(answer.events(), keep_alive=config.sse_keep_alive_interval, timeout=config.request_timeout)
    whole = await guarded(request.receive, answer.whole(), timeout=config.request_timeout)
    return Response(whole, media_type="application/json")


def thinking_budget(
    server: Server, body: ChatRequest, form: AnswerFormat, *, template: str, constrained: bool
) -> ThinkingBudget | None:
    """``thinking_token_budget``; None: there is none.

    Args:
        constrained: the answer has a form.

    Raises:
        ApiError: the model does not reason, or the request asks for what an answer in two parts cannot have.
    """
    tokens = body.thinking_token_budget
    if tokens is None:
        return None
    marks = server.formats.parsers(template).reasoning_marks
    if marks is None:
        raise ApiError(
            "`thinking_token_budget`: it is not known how this model marks its reasoning (--reasoning-parser)",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    asked = {
        "n": body.choices > 1,
        "best_of": body.continuations > 1,
        "logprobs": bool(body.logprobs),
        "presence_penalty": bool(body.presence_penalty),
        "frequency_penalty": bool(body.frequency_penalty),
    }
    if clash := next((name for name, given in asked.items() if given), None):
        raise ApiError(
            f"`thinking_token_budget` cannot be combined with `{clash}` yet",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    if constrained:
        raise ApiError(
            "`thinking_token_budget` cannot be combined with a demanded form of the answer yet",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    start, end = marks
    if not form.begins_with_reasoning:
        tokens += len(server.tokenizer.encode(start, add_special_tokens=False))
    return ThinkingBudget(tokens=tokens, end=end, end_ids=server.tokenizer.encode(end, add_special_tokens=False))


async def _job(server: Server, body: ChatRequest, request: Request) -> tuple[Job, AnswerFormat, ThinkingBudget | None]:
    engine = server.engine
    server.check_model(body.model)
    read_functions(body)
    body.check_best_of()
    body.expand_logprobs(engine.info.vocab_size)
    record_of(request).note(body)
    logprobs = body.num_logprobs
    check_logprobs(logprobs, field="top_logprobs", limit=engine.config.max_logprobs)
    check_logprobs(body.prompt_logprobs, field="prompt_logprobs", limit=engine.config.max_logprobs)
    check_stream(body)
    check_truncation(body)
    priority = body.priority or 0
    check_priority(engine, priority)
    asked = body.requested_tokens
    defaults = engine.info.default_sampling_params
    tools = await read_tools(body)
    tools = tools if calls_allowed(body.tool_choice, tools) else []
    source = template_source(server, body, with_tools=bool(tools))
    record_of(request).ignored += unread_variables(body, source)
    thinking: dict[str, Any] = {}
    if body.switches_thinking is not None:
        thinking = dict.fromkeys(switches_of_thinking(source), body.switches_thinking)
        record_of(request).ignored += [] if thinking else ["thinking"]
    prompt = await chat_prompt(
        server,
        body,
        tools=tools,
        variables={**thinking, **effort_variables(body.reasoning_effort, source)},
        truncation=Truncation.of(server, body, room=asked or 1),
    )
    form = answer_format(server, body, prompt, tools=tools, template=source)
    named = body.max_tokens_field
    default = defaults.get("max_tokens")
    budget = output_budget(server, prompt, asked=asked, default=default, field="messages", asked_field=named)
    forced = forced_tools(body.tool_choice, tools) is not None
    parsers = parsers_for(server.formats.parsers(source), forced=forced)
    structured = None
    if tools or demands_form(body):  # their schemas may be large
        structured = await asyncio.to_thread(answer_form, body, form, parsers, tools=tools)
    params = sampling_params(
        body,
        defaults=defaults,
        max_tokens=budget,
        max_tokens_field=named,
        logprobs=logprobs,
        detokenize=True,
        structured_outputs=structured,
    )
    job = Job(
        id=f"chatcmpl-{body.request_id or record_of(request).id}",
        prompts=[prompt],
        params=[params],
        priority=priority,
        cache_salt=cache_salt_of(request, body.cache_salt),
        shown=frozenset() if form.grammar is None else server.formats.shown(form.grammar),
        keep=None if body.best_of is None else body.choices,
    )
    return (
        job,
        form,
        thinking_budget(server, body, form, template=source, constrained=params.structured_outputs is not None),
    )


def switches_of_thinking(template: str) -> list[str]:
    """The variable by which a template is told whether the model is to think, if there is one."""
    if reads(template, "enable_thinking"):
        return ["enable_thinking"]
    return ["thinking"] if "thinking is defined" in template else []


def effort_variables(effort: str | None, template: str) -> dict[str, Any]:
    """``reasoning_effort`` as a template reads it: as such, or as a switch.

    Raises:
        ApiError: the template reads neither.
    """
    if effort is None:
        return {}
    variables: dict[str, Any] = {}
    if reads(template, "reasoning_effort"):
        variables["reasoning_effort"] = effort
    variables |= dict.fromkeys(switches_of_thinking(template), effort != "none")
    if variables:
        return variables
    raise ApiError(
        "`reasoning_effort`: this model's chat template does not read it",
        param="reasoning_effort",
        code="unsupported_parameter",
    )


def answer_format(
    server: Server, body: ChatRequest, prompt: EncodedPrompt, *, tools: list[dict[str, Any]], template: str
) -> AnswerFormat:
    """How the answers to a request are to be read.

    Args:
        tools: that the model may call.

    Raises:
        ApiError: it is not known how the model writes calls.
    """
    parsers = parsers_for(server.formats.parsers(template), forced=forced_tools(body.tool_choice, tools) is not None)
    if tools and not server.config.enable_auto_tool_choice:
        raise ApiError(
            "`tools`: this server lets no model decide on calls (--no-enable-auto-tool-choice)",
            param="tools",
            code="unsupported_parameter",
        )
    if tools and parsers.tools not in (None, DESCRIBED, JSON_LIST) and tools_variable(template) is None:
        raise ApiError(
            f"`tools`: this model's chat template does not read them, and the parser {parsers.tools} is not the one "
            f"for tools described in words, which is {DESCRIBED}",
            param="tools",
            code="unsupported_parameter",
        )
    if tools and parsers.tools is None:
        raise ApiError(
            "`tools`: it is not known how this model writes its calls; the server needs a --tool-call-parser",
            param="tools",
            code="unsupported_parameter",
        )
    grammar = parsers.grammar(with_tools=bool(tools), prompt=prompt.text or "")
    tokenizer = server.tokenizer
    detokenizer = None
    if grammar is not None and parsers.reasoning is not None:
        detokenizer = partial(
            tokenizer.detokenizer,
            skip_special_tokens=body.skip_special_tokens is not False,
            spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
            shown=server.formats.shown(grammar),
            prompt_ids=prompt.token_ids,
        )
    return AnswerFormat(
        grammar=grammar,
        tools=tools,
        parallel=body.parallel_tool_calls is not False,
        include_reasoning=body.include_reasoning is not False,
        detokenizer=detokenizer,
    )


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """Turns the engine's outputs into the response, whole or in chunks."""

    server: Server
    body: ChatRequest
    job: Job
    form: AnswerFormat
    budget: ThinkingBudget | None
    tally: Tally
    created: int

    @property
    def names(self) -> TokenNames:
        return TokenNames(self.server.engine.tokenizer, as_ids=bool(self.body.return_tokens_as_token_ids))

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.job.id,
            "object": kind,
            "created": self.created,
            "model": self.server.engine.info.model_name,
            "system_fingerprint": self.server.fingerprint,
            "choices": choices,
            **self.body.tier,
        }

    def _logprobs(self, choice: CompletionOutput) -> dict[str, Any] | None:
        if not self.body.logprobs or choice.logprobs is None:
            return None
        return chat_logprobs(choice.token_ids, choice.logprobs, names=self.names, top=self.body.top_logprobs or 0)

    async def whole(self) -> bytes:
        """OpenAI's ``ChatCompletion`` as JSON."""
        engine = self.server.engine
        if self.budget is not None:
            output = await collect_within(engine, self.job, self.form, self.budget, self.tally)
        else:
            (output,) = await collect(engine, self.job, self.tally)
        written = num_logprobs(output.prompt_logprobs, *(choice.logprobs for choice in output.outputs))
        read = 0 if self.form.grammar is None else sum(len(choice.text) for choice in output.outputs)
        return await off_loop(lambda: orjson.dumps(self._answer(output)), size=4 * written + read)

    def _answer(self, output: RequestOutput) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in sorted(output.outputs, key=lambda choice: choice.index)]
        answer = {**self._envelope("chat.completion", choices), "usage": self.tally.usage()}
        if self.body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, names=self.names)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self.job.prompts[0].token_ids
        return answer

    def _choice(self, choice: CompletionOutput) -> dict[str, Any]:
        reader = self.form.reader()
        fields = self._as_asked(reader.message(choice))
        self._count_reasoning(reader.reasoning_tokens)
        entry = {
            "index": choice.index,
            "message": {"role": self.server.config.response_role, **fields, "refusal": None},
            "logprobs": self._logprobs(choice),
            "finish_reason": self._reason(reader.finish_reason(choice.finish_reason)),
            "stop_reason": choice.stop_reason,
        }
        return {**entry, "token_ids": choice.token_ids} if self.body.return_token_ids else entry

    def _as_asked(self, fields: dict[str, Any]) -> dict[str, Any]:
        """With a call of a function, where the request has functions and not tools."""
        return with_function_call(fields) if self.body.functions else fields

    def _reason(self, reason: str | None) -> str | None:
        return "function_call" if reason == "tool_calls" and self.body.functions else reason

    def _count_reasoning(self, tokens: int) -> None:
        if self.form.detokenizer is not None:
            self.tally.reasoning_tokens = (self.tally.reasoning_tokens or 0) + tokens

    async def events(self) -> AsyncGenerator[bytes, None]:
        """OpenAI's ``ChatCompletionChunk``s: a role per choice, deltas, a finish per choice, then the usage."""
        first = True
        readers = [self.form.reader() for _ in range(self.body.choices)]
        engine = self.server.engine
        if self.budget is not None:
            running = run_within(engine, self.job, self.form, self.budget)
        else:
            running = run_job(engine, self.job)
        async with aclosing(running) as parts:
            async for part in parts:
                self.tally.add_cached(part)
                if first:
                    first = False
                    for index in range(self.body.choices):
                        yield self._opening(index)
                for choice in part.output.outputs:
                    self.tally.add_tokens(choice)
                    for chunk in self._deltas(choice, readers[choice.index]):
                        yield chunk
        if self.body.include_usage:
            yield event({**self._envelope("chat.completion.chunk", []), "usage": self.tally.usage()})

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk = self._envelope("chat.completion.chunk", [choice])
        if self.body.include_usage:
            chunk["usage"] = self.tally.usage() if self.body.continuous_usage else None
        return chunk

    def _event(self, chunk: dict[str, Any]) -> bytes:
        return delta_event(chunk, obfuscate=self.body.obfuscates)

    def _opening(self, index: int) -> bytes:
        chunk = self._chunk(index, {"role": self.server.config.response_role, "content": "", "refusal": None})
        if self.body.return_token_ids:
            chunk["prompt_token_ids"] = self.job.prompts[0].token_ids
        return self._event(chunk)

    def _deltas(self, choice: CompletionOutput, reader: AnswerReader) -> list[bytes]:
        chunks = []
        counted = reader.reasoning_tokens
        deltas = reader.deltas(choice)
        self._count_reasoning(reader.reasoning_tokens - counted)
        extra: dict[str, Any] = {}
        if self.body.logprobs and choice.logprobs:
            extra["logprobs"] = self._logprobs(choice)
        if self.body.return_token_ids and choice.token_ids:
            extra["token_ids"] = choice.token_ids
        if extra and not deltas:
            deltas = [{"content": ""}]
        for delta in deltas:
            chunks.append(self._event(self._chunk(choice.index, self._as_asked(delta), **extra)))
            extra = {}  # tokens come with the first of what they say
        if choice.finish_reason is not None:
            reason = self._reason(reader.finish_reason(choice.finish_reason))
            end = {"finish_reason": reason, "stop_reason": choice.stop_reason}
            chunks.append(self._event(self._chunk(choice.index, {}, **end)))
        return chunks


CHAT_ROUTES = [Route("/v1/chat/completions", chat_completions, methods=["POST"])]
