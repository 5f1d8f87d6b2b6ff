"""POST /tokenize and /detokenize, in the shapes of vLLM and llama-server."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmjax.serve.body import parse, read_json
from llmjax.serve.context import Server, cache_salt_of, ignored_fields, owner_of, server_of
from llmjax.serve.custom_tools import from_chat
from llmjax.serve.prompts import chat_prompt, completion_prompts, off_loop, read_tools
from llmjax.serve.protocol.llama_server import LlamaTokenizeRequest
from llmjax.serve.protocol.tokens import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest


async def tokenize(request: Request) -> Response:
    """Ids of a text, or of messages after the chat template."""
    server = server_of(request)
    data = await read_json(request)
    if data.get("content") is not None and data.get("prompt") is None and data.get("messages") is None:
        return await _llama_tokenize(server, parse(data, LlamaTokenizeRequest, ignored=ignored_fields(request)))
    if "messages" in data and data.get("prompt") is None:
        chat = parse(data, TokenizeChatRequest, ignored=ignored_fields(request))
        server.check_model(chat.model)
        chat.tools, _ = from_chat(chat.tools or [])
        tools, salt = await read_tools(chat), cache_salt_of(request, None)
        prompt = await chat_prompt(server, chat, tools=tools, owner=owner_of(request), cache_salt=salt)
        with_names = chat.return_token_strs
    else:
        text = parse(data, TokenizeTextRequest, ignored=ignored_fields(request))
        server.check_model(text.model)
        (prompt,) = await completion_prompts(
            server, [text.prompt], add_special_tokens=text.add_special_tokens, echo=False
        )
        with_names = text.return_token_strs
    ids = prompt.token_ids
    names = None
    if with_names:
        tokenizer = server.tokenizer
        names = await off_loop(lambda: [tokenizer.id_to_token(i) for i in ids], size=len(ids))
    body = {
        "count": len(ids),
        "max_model_len": server.engine.info.max_model_len,
        "tokens": ids,
        "token_strs": names,
    }
    return Response(orjson.dumps(body), media_type="application/json")


async def _llama_tokenize(server: Server, body: LlamaTokenizeRequest) -> Response:
    """llama-server's answer: ids or, with pieces, each with its text, or with its bytes if these are not UTF-8."""
    server.check_model(body.model)
    tokenizer, text = server.tokenizer, body.content
    tokenizer.check_length(text, max_tokens=server.engine.info.max_model_len, field="content")

    def piece(id: int) -> str | list[int]:
        raw = tokenizer.token_bytes(id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return list(raw)

    def made() -> list[Any]:
        ids = tokenizer.encode(text, add_special_tokens=body.add_special, parse_special=body.parse_special)
        return [{"id": id, "piece": piece(id)} for id in ids] if body.with_pieces else ids

    tokens = await off_loop(made, size=len(text))
    return Response(orjson.dumps({"tokens": tokens}), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids, special ones included, under vLLM's name and llama-server's."""
    server = server_of(request)
    body = parse(await read_json(request), DetokenizeRequest, ignored=ignored_fields(request))
    server.check_model(body.model)
    server.request_limits.check_ids(body.tokens, field="tokens")
    tokenizer = server.tokenizer
    text = await off_loop(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), size=4 * len(body.tokens))
    return Response(orjson.dumps({"prompt": text, "content": text}), media_type="application/json")


async def tokenizer_info(request: Request) -> Response:
    """The tokenizer: its size, its special tokens and its chat template."""
    server = server_of(request)
    tokenizer = server.tokenizer
    named = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id}
    template = tokenizer.chat_template
    body = {
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "model_max_length": server.engine.info.max_model_len,
        **{f"{name}_token": None if id is None else tokenizer.id_to_token(id) for name, id in named.items()},
        **{f"{name}_token_id": id for name, id in named.items()},
        "eos_token_ids": sorted(tokenizer.eos_token_ids),
        "all_special_ids": sorted(tokenizer.all_special_ids),
        "chat_template": None if template is None else tokenizer.template_source(None, with_tools=False),
    }
    return Response(orjson.dumps(body), media_type="application/json")


TOKEN_ROUTES = [
    Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
]
