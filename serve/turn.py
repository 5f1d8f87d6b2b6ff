"""A turn of a conversation, whichever API asks for it: checks, prompt, form of the answer, and the engine's outputs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from llmjax.constraints.thinking import ThinkingBudget
from llmjax.outputs import CompletionOutput, RequestOutput
from llmjax.parsing.choice import DESCRIBED, reads, switches_of_thinking, tools_variable
from llmjax.parsing.events import Event
from llmjax.parsing.families import JSON_LIST
from llmjax.serve.answers import AnswerFormat, AnswerReader
from llmjax.serve.context import RequestRecord, Server
from llmjax.serve.custom_tools import NO_TOOLS, CustomTools
from llmjax.serve.errors import ApiError
from llmjax.serve.forms import answer_form, held_to_tools, parsers_for
from llmjax.serve.generation import Job, JobOutput, Tally, collect, run_job
from llmjax.serve.interfaces import Engine
from llmjax.serve.prompts import (
    EncodedPrompt,
    Truncation,
    chat_prompt,
    off_loop,
    output_budget,
    read_tools,
    template_source,
    unread_variables,
    wanted_tokens,
)
from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.protocol.common import (
    beam_search_params,
    check_beam_search,
    check_stream,
    check_truncation,
    sampling_params,
)
from llmjax.serve.protocol.structured import demands_form
from llmjax.serve.protocol.tools import calls_allowed, forced_tools
from llmjax.serve.transfer import transfer_of


@dataclass(frozen=True)
class Said:
    """What an output brings.

    Args:
        finish_reason: OpenAI's word for why the answer has ended; None: it has not.
    """

    events: list[Event]
    finish_reason: str | None
    choice: CompletionOutput


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What is to be generated, and how it is read.

    Args:
        form: how the answers are to be read.
        tally: counts the tokens.
    """

    engine: Engine
    job: Job
    form: AnswerFormat
    tally: Tally

    @property
    def round_tokens(self) -> int:
        """Tokens that have been generated, those of earlier turns apart."""
        return self.tally.completion_tokens

    def outputs(self) -> AsyncGenerator[JobOutput, None]:
        """What is new, as it comes; its tokens are the caller's to count."""
        return run_job(self.engine, self.job, self.tally)

    async def whole(self) -> RequestOutput:
        """The last output of all, with its tokens counted."""
        (output,) = await collect(self.engine, self.job, self.tally)
        return output

    def said(self, part: JobOutput, reader: AnswerReader) -> Said:
        """What an output adds to the one answer, which ``reader`` reads; its tokens are counted."""
        (choice,) = part.output.outputs
        self.tally.add_tokens(choice)
        return self._read(choice, reader)

    async def all_said(self) -> Said:
        """All of it at once."""
        (choice,) = (await self.whole()).outputs
        reader = self.form.reader()
        return await off_loop(lambda: self._read(choice, reader), size=len(choice.text))

    def _read(self, choice: CompletionOutput, reader: AnswerReader) -> Said:
        counted = reader.reasoning_tokens
        events = reader.read(choice)
        self.count_reasoning(reader.reasoning_tokens - counted)
        return Said(events, reader.finish_reason(choice), choice)

    def count_reasoning(self, tokens: int) -> None:
        """Adds to the tokens of reasoning, where they can be counted."""
        if self.form.counts_reasoning:
            self.tally.reasoning_tokens = (self.tally.reasoning_tokens or 0) + tokens


async def prepare(
    server: Server,
    body: ChatRequest,
    *,
    record: RequestRecord,
    cache_salt: str | None,
    client: str,
    id: str,
    cut: bool = False,
    custom: CustomTools = NO_TOOLS,
    after: Turn | None = None,
) -> Turn:
    """Checks a request and makes of it what the engine needs.

    Args:
        record: what the access log says about the HTTP request.
        cache_salt: what `cache_salt_of` returns.
        client: what `client_of` returns.
        id: the answer's id.
        cut: more tokens than fit the context may be asked for.
        custom: tools of the request that are custom ones.
        after: an earlier turn for the same HTTP request, whose tokens count, too.

    Raises:
        ApiError: a field is wrong.
        LLMJaxError: likewise, or the prompt cannot be made.
    """
    engine = server.engine
    server.check_model(body.model)
    server.check_task("generate")
    body.check_best_of()
    body.expand_logprobs(engine.info.vocab_size)
    record.note(body)
    logprobs = body.num_logprobs
    limits = server.request_limits
    limits.check_logprobs(logprobs, field="top_logprobs")
    limits.check_logprobs(body.prompt_logprobs, field="prompt_logprobs")
    check_beam_search(body)
    check_stream(body)
    check_truncation(body)
    priority = body.priority or 0
    limits.check_priority(priority)
    defaults = engine.info.default_sampling_params
    asked, default = wanted_tokens(body.requested_tokens, defaults.get("max_tokens"))
    tools = await read_tools(body)
    tools = tools if calls_allowed(body.tool_choice, tools) else []
    source = template_source(server, body, with_tools=bool(tools))
    record.ignored += unread_variables(body, source)
    if not thinking_acts(server, body, source):
        record.ignored.append("thinking")
    prompt = await chat_prompt(
        server,
        body,
        tools=tools,
        owner=record.owner,
        cache_salt=cache_salt,
        variables={
            **thinking_variables(server, body, source),
            **document_variables(body, source),
        },
        truncation=Truncation.of(server, body, room=asked or 1),
    )
    record.moved_lines = prompt.moved_lines
    form = answer_format(server, body, prompt, tools=tools, template=source, custom=custom)
    named = body.max_tokens_field
    wanted = {"asked": None, "default": asked} if cut and asked else {"asked": asked, "default": default}
    budget = output_budget(server, prompt, **wanted, field="messages", asked_field=named)
    forced = forced_tools(body.tool_choice, tools) is not None
    parsers = parsers_for(server.formats.parsers(source), forced=forced)
    structured = None
    if tools or demands_form(body):  # their schemas may be large
        structured = await asyncio.to_thread(answer_form, body, form, parsers, tools=tools, custom=custom)
    if tools and not held_to_tools(structured):  # nothing but the model keeps to them
        forms = [custom.get(tool["function"]["name"]) for tool in tools]
        record.ignored += [wanted.path for wanted in forms if wanted is not None]
    if body.use_beam_search and structured is not None:
        raise ApiError(
            f"`{structured.field}` demands a form of the answer, which a beam search does not know",
            param=structured.field,
            code="unsupported_parameter",
        )
    params = sampling_params(
        body,
        defaults=defaults,
        max_tokens=budget,
        max_tokens_field=named,
        logprobs=logprobs,
        detokenize=True,
        structured_outputs=structured,
        kv_transfer=transfer_of(engine, body, id=id),
    )
    job = Job(
        id=id,
        prompts=[prompt],
        params=[params],
        priority=priority,
        cache_salt=cache_salt,
        owner=record.owner,
        client=client,
        model=server.answer_name(body.model),
        adaptation=server.adaptation(body.model, body.lora),
        shown=frozenset() if form.grammar is None else server.formats.shown(form.grammar),
        keep=None if body.best_of is None else body.choices,
        searches=[beam_search_params(body, max_tokens=budget, asked=asked)] if body.use_beam_search else (),
        reading=form.reading(),
        thinking=await thinking_budget(server, body, form, template=source),
    )
    return Turn(
        engine=engine,
        job=job,
        form=form,
        tally=Tally(job, record, before=() if after is None else after.tally.all),
    )


async def thinking_budget(
    server: Server, body: ChatRequest, form: AnswerFormat, *, template: str
) -> ThinkingBudget | None:
    """``thinking_token_budget``; None: there is none, as -1 says, too.

    Raises:
        ApiError: the model does not reason, or a beam search is asked for.
    """
    tokens = body.thinking_token_budget
    parsers = server.formats.parsers(template)
    marks = parsers.reasoning_marks
    if tokens is None and marks is not None:
        tokens = body.hinted_budget
    if tokens is None or tokens == -1:
        return None
    if marks is None:
        raise ApiError(
            "`thinking_token_budget`: it is not known how this model marks its reasoning (--reasoning-parser)",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    if body.use_beam_search:  # with `thinking_token_budget` it has been refused before
        raise ApiError(
            "`thinking` cannot have a budget in a beam search (use_beam_search)",
            param="thinking",
            code="unsupported_parameter",
        )
    start, closing = marks
    tokenizer = server.tokenizer
    if not form.begins_with_reasoning:
        tokens += len(tokenizer.encode(start, add_special_tokens=False))
    return ThinkingBudget(
        tokens=tokens,
        inside=form.begins_with_reasoning,
        start=await asyncio.to_thread(server.formats.mark, start),
        end=await asyncio.to_thread(server.formats.mark, parsers.reasoning_end or closing),
        closing=tuple(tokenizer.encode(closing, add_special_tokens=False)),
    )


def thinking_acts(server: Server, body: ChatRequest, template: str) -> bool:
    """Whether what a request says of thinking changes something, if it does say so."""
    if body.switches_thinking is None or switches_of_thinking(template):
        return True
    budget = body.thinking_token_budget is None and body.hinted_budget is not None
    return budget and server.formats.parsers(template).reasoning_marks is not None


def thinking_variables(server: Server, body: ChatRequest, template: str) -> dict[str, Any]:
    """What a request says of thinking, as variables of the template; that there is to be none is nothing new to a model
    that does not think.

    Raises:
        ApiError: the template does not read ``reasoning_effort``.
    """
    switches: dict[str, Any] = {}
    if body.switches_thinking is not None:
        switches = dict.fromkeys(switches_of_thinking(template), body.switches_thinking)
    effort, efforts = body.reasoning_effort, server.config.reasoning_effort_map
    if effort == "none" and not reads_effort(template):
        effort = None if server.formats.parsers(template).reasoning is None else effort
    return {**switches, **effort_variables(efforts.get(effort, effort) if effort else None, template)}


def document_variables(body: ChatRequest, template: str) -> dict[str, Any]:
    """``documents`` as a variable of the template.

    Raises:
        ApiError: the template does not read it.
    """
    if not body.documents:
        return {}
    if not reads(template, "documents"):
        raise ApiError(
            "`documents`: this model's chat template does not read them; put them into a message",
            param="documents",
            code="unsupported_parameter",
        )
    return {"documents": body.documents}


def reads_effort(template: str) -> bool:
    """Whether a template knows how much is to be reasoned, or at least whether."""
    return reads(template, "reasoning_effort") or bool(switches_of_thinking(template))


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
    server: Server,
    body: ChatRequest,
    prompt: EncodedPrompt,
    *,
    tools: list[dict[str, Any]],
    template: str,
    custom: CustomTools = NO_TOOLS,
) -> AnswerFormat:
    """How the answers to a request are to be read.

    Args:
        tools: tools that the model may call.
        custom: those of them that are custom ones.

    Raises:
        ApiError: it is not known how the model writes calls.
    """
    parsers = parsers_for(server.formats.parsers(template), forced=forced_tools(body.tool_choice, tools) is not None)
    if tools and not server.config.enable_auto_tool_choice:
        raise ApiError(
            "`tools`: this server does not let the model choose tools (--no-enable-auto-tool-choice)",
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
    return AnswerFormat(
        grammar=grammar,
        tools=tools,
        custom=frozenset(custom),
        parallel=body.parallel_tool_calls is not False,
        include_reasoning=body.include_reasoning is not False,
        counts_reasoning=grammar is not None and parsers.reasoning is not None,
    )
