"""llama-server's requests as the completions that the server answers anyway."""

from __future__ import annotations

from collections.abc import Sequence

from llmjax.serve.context import Server
from llmjax.serve.prompts import check_queue, completion_prompts, off_loop
from llmjax.serve.protocol.completions import CompletionRequest
from llmjax.serve.protocol.llama_server import (
    Bias,
    LlamaCompletionRequest,
    LlamaInfillRequest,
    LlamaSampling,
    Prompt,
)
from llmjax.tokenizer.infill import InfillTokens, encode_suffix

RANDOM_SEEDS = (-1, 2**32 - 1)
# A request's fields by those of the completion that is made of it, for errors.
NAMES = {
    "logprobs": "n_probs",
    "repetition_penalty": "repeat_penalty",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
}
NAMES_OF_GAP = {"suffix": "input_suffix", "prompt": "input_prefix", **NAMES}


async def completion_of(server: Server, body: LlamaCompletionRequest, ignored: list[str]) -> CompletionRequest:
    """The completion that a request comes to, but for how many tokens it may have.

    Args:
        ignored: takes the names of fields without effect.

    Raises:
        ApiError: a field is wrong.
        LLMJaxError: likewise.
    """
    server.check_model(body.model)
    server.check_task("generate")
    prompts = body.prompts
    check_queue(server, prompts=len(prompts), choices=1)
    return await sampled(server, body, [await _encoded(server, prompt) for prompt in prompts], ignored)


async def filling_of(server: Server, body: LlamaInfillRequest, ignored: list[str]) -> CompletionRequest:
    """The completion that fills a gap; arguments and errors as for `completion_of`."""
    server.check_model(body.model)
    server.check_task("generate")
    tokenizer, limit = server.tokenizer, server.engine.info.max_model_len
    tokens, after = InfillTokens.of(tokenizer), body.prompt or ""
    extra = [(file.filename, file.text) for file in body.input_extra or ()]
    texts = {
        "prompt": body.input_prefix,
        "suffix": body.input_suffix,
        "input_extra": "".join(text for _, text in extra),
    }

    def encoded() -> list[int]:
        for field, text in texts.items():
            tokenizer.check_length(text, max_tokens=limit, field=field)
        ids = tokens.prompt(tokenizer, body.input_prefix, encode_suffix(tokenizer, body.input_suffix), extra=extra)
        return [*ids, *tokenizer.encode(after, add_special_tokens=False)]

    ids = await off_loop(encoded, size=len(after) + sum(map(len, texts.values())))
    made = await sampled(server, body, [ids], ignored)
    made.stop_token_ids = None if body.ignore_eos else sorted(tokens.ends)
    return made


async def sampled(
    server: Server, body: LlamaSampling, prompts: list[str | list[int]], ignored: list[str]
) -> CompletionRequest:
    """The completion of some prompts that is sampled as a request says; arguments and errors as for `completion_of`."""
    body.check()
    ignored += body.without_effect()
    temperature = body.sampled("temperature")
    return CompletionRequest.model_construct(
        model=body.model,
        prompt=prompts,
        stream=body.stream,
        temperature=None if temperature is None else max(0.0, temperature),  # below 0 is greedy, too
        top_k=body.sampled("top_k"),
        top_p=body.sampled("top_p"),
        min_p=body.sampled("min_p"),
        repetition_penalty=body.sampled("repeat_penalty"),
        presence_penalty=body.sampled("presence_penalty"),
        frequency_penalty=body.sampled("frequency_penalty"),
        repeat_last_n=body.repeat_last_n,
        seed=None if body.seed in RANDOM_SEEDS else body.seed,
        stop=[text for text in ([body.stop] if isinstance(body.stop, str) else body.stop or []) if text],
        ignore_eos=body.ignore_eos,
        logit_bias=await _by_token(server, body.biases),
        logprobs=body.n_probs or None,
        guided_grammar=body.grammar or None,
        guided_json=body.json_schema,
        skip_reading_prefix_cache=True if body.cache_prompt is False else None,
        lora=body.lora,
        return_prompt_text=server.engine.tokenizer is not None,
    )


async def _encoded(server: Server, prompt: Prompt) -> str | list[int]:
    """A prompt as a text or as token ids; special tokens begin it where it begins with a text."""
    parts = prompt.parts
    texts = [part for part in parts if isinstance(part, str)]
    if len(parts) == len(texts) == 1:
        return texts[0]
    at_start = isinstance(parts[0], str)
    first = await completion_prompts(server, texts[:1], add_special_tokens=at_start)
    encoded = iter([*first, *await completion_prompts(server, texts[1:], add_special_tokens=False)])
    ids: list[int] = []
    for part in parts:
        ids += next(encoded).token_ids if isinstance(part, str) else [part]
    return ids


async def _by_token(server: Server, biases: Sequence[Bias]) -> dict[str, float] | None:
    """What is added to the logits of tokens, by their ids; a text stands for each of its tokens."""
    texts = [token for token, _ in biases if isinstance(token, str)]

    def tokens() -> dict[str, float]:
        found: dict[str, float] = {}
        for token, bias in biases:
            ids: Sequence[int] = [token] if isinstance(token, int) else []
            if isinstance(token, str):
                server.tokenizer.check_length(token, max_tokens=server.engine.info.max_model_len, field="logit_bias")
                ids = server.tokenizer.encode(token, add_special_tokens=False)
            found |= {str(id): bias for id in ids}
        return found

    return await off_loop(tokens, size=sum(map(len, texts)) + len(biases)) if biases else None
