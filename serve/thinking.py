"""A budget of reasoning tokens: what thinks longer is told that it has ended, and goes on with the answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from llmjax.outputs import CompletionOutput, RequestOutput
from llmjax.sampling.params import RequestOutputKind, SamplingParams
from llmjax.serve.answers import AnswerFormat
from llmjax.serve.generation import Job, JobOutput, Tally, merged, run_job
from llmjax.serve.interfaces import Engine
from llmjax.serve.prompts import EncodedPrompt


@dataclass(frozen=True, kw_only=True)
class ThinkingBudget:
    """How long a model may think.

    Args:
        tokens: how many an answer may have before its reasoning must be over, counting those that open it.
        end: what closes the reasoning.
        end_ids: its token ids.
    """

    tokens: int
    end: str
    end_ids: list[int]


async def run_within(
    engine: Engine, job: Job, form: AnswerFormat, budget: ThinkingBudget
) -> AsyncGenerator[JobOutput, None]:
    """Deltas of the continuations of a prompt, each in engine requests of its own."""
    (params,) = job.params
    seeds = [None if params.seed is None else params.seed + i for i in range(params.n)]
    jobs = [replace(job, params=[params.clone(n=1, seed=seed)]) for seed in seeds]
    async with aclosing(merged([_run_one(engine, one, form, budget) for one in jobs])) as parts:
        async for index, part in parts:
            part.output.outputs[0].index = index
            yield part


async def _run_one(
    engine: Engine, job: Job, form: AnswerFormat, budget: ThinkingBudget
) -> AsyncGenerator[JobOutput, None]:
    """One continuation, in two engine requests: the second goes on where the first has used up the budget, with the end
    of reasoning put in between if it was not over. Its prompt is in the prefix cache.

    The seed's noise depends on positions, so that an answer that was not cut is the one of a single request.
    """
    (prompt,), (params,) = job.prompts, job.params
    most = params.max_tokens or 1
    limit = min(budget.tokens, most)
    written_ids: list[int] = []
    text = ""
    if limit:
        reader = form.reader()
        first = params.clone(**_share(params, before=0, tokens=limit))
        async with aclosing(run_job(engine, replace(job, params=[first]))) as parts:
            async for part in parts:
                (choice,) = part.output.outputs
                written_ids += choice.token_ids
                text += choice.text
                if choice.finish_reason == "length" and len(written_ids) < most:
                    choice.finish_reason = None
                reader.read(choice)
                yield part
        if choice.finish_reason is not None:
            return
        reasons = reader.reasons
    else:
        reasons = form.begins_with_reasoning
    if reasons:
        text += budget.end
        end_ids = budget.end_ids[: most - len(written_ids)]
        written_ids += end_ids
        end = CompletionOutput(index=0, text=budget.end, token_ids=end_ids)
        if len(written_ids) == most:
            end.finish_reason = "length"
        yield JobOutput(0, RequestOutput(job.id, None, [], [end], finished=len(written_ids) == most))
    if len(written_ids) < most:
        second = params.clone(
            **_share(params, before=len(written_ids), tokens=most - len(written_ids)), prompt_logprobs=None
        )
        rest = replace(
            job,
            prompts=[EncodedPrompt(prompt.token_ids + written_ids)],
            params=[second],
            written=len(written_ids),
            reading=None if job.reading is None else job.reading.after(text),
        )
        async with aclosing(run_job(engine, rest)) as parts:
            async for part in parts:
                part.output.num_cached_tokens = 0  # of the request's own prompt the first has told
                yield part


async def collect_within(
    engine: Engine, job: Job, form: AnswerFormat, budget: ThinkingBudget, tally: Tally
) -> RequestOutput:
    """The whole of what ``run_within`` gives."""
    whole: RequestOutput | None = None
    answers: dict[int, CompletionOutput] = {}
    async with aclosing(run_within(engine, job, form, budget)) as parts:
        async for part in parts:
            tally.add_cached(part)
            (choice,) = part.output.outputs
            tally.add_tokens(choice)
            whole = whole or part.output
            answer = answers.setdefault(choice.index, choice)
            if answer is choice:
                continue
            answer.text += choice.text
            answer.token_ids += choice.token_ids
            answer.finish_reason, answer.stop_reason = choice.finish_reason, choice.stop_reason
    assert whole is not None
    whole.outputs = [answers[index] for index in sorted(answers)]
    return whole


def _share(params: SamplingParams, *, before: int, tokens: int) -> dict[str, object]:
    """What changes in the parameters for ``tokens`` tokens that follow ``before`` others."""
    least = min(max(params.min_tokens - before, 0), tokens)
    return {"max_tokens": tokens, "min_tokens": least, "output_kind": RequestOutputKind.DELTA}
