"""From messages to prompts: templates in requests, and which form content keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from llmjax.config import EngineConfig, ServerConfig
from llmjax.engine.front.adapters import AdapterRegistry
from llmjax.engine.info import EngineState
from llmjax.serve.app import create_app
from llmjax.serve.listen import bind
from llmjax.serve.server import DrainingServer
from llmjax.tokenizer import ChatTemplate, load_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]
BUSY = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


class Tokenizing:
    """An engine that has a tokenizer and computes nothing."""

    states = (EngineState(serving=True),)
    is_sleeping = False

    def __init__(self, folder: Path, chat_template: str | None) -> None:
        self.config = EngineConfig(model=str(folder))
        self.adapters = AdapterRegistry(self.config, names=["m"])
        self.tokenizer = load_tokenizer(folder, chat_template=chat_template)
        self.info = SimpleNamespace(
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=64,
            kv_tokens=640,
            page_size=32,
            model_name="m",
            default_sampling_params={},
            pooler=None,
            drafts=0,
            vision=None,
        )

    def check_health(self) -> None: ...

    def add_stat_logger(self, logger: Any) -> None: ...


@asynccontextmanager
async def client(folder: Path, chat_template: str | None = None, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    config = ServerConfig(trust_request_chat_template=True, **settings)
    app = create_app(Tokenizing(folder, chat_template), config)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        yield http


async def text_of(http: httpx.AsyncClient, **body: Any) -> str:
    """The prompt that the messages become."""
    response = await http.post("/tokenize", json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    ids = response.json()["tokens"]
    return (await http.post("/detokenize", json={"tokens": ids})).json()["prompt"]


async def test_a_template_that_takes_too_much_stops_nobody(tiny_model: Path) -> None:
    async with client(tiny_model) as http:
        own = await text_of(http)
        hostile = asyncio.create_task(http.post("/tokenize", json={"messages": HELLO, "chat_template": BUSY}))
        while not hostile.done():
            assert await text_of(http) == own
        response = await hostile
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["type"]) == (400, "chat_template", "invalid_request_error")
        assert "computing time" in error["message"]
        assert await text_of(http, chat_template="<{{ messages[0].content }}>{{ '' }}") == "<Hello>"


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"chat_template": "\n{% for x in %}"}, "chat_template", "line 2"),
        ({"chat_template": "{{ [] + 1 }}"}, "chat_template", "TypeError"),
        ({"chat_template": "nonsense"}, "chat_template", "neither Jinja nor"),
        ({"chat_template": "{{ raise_exception('no') }}"}, "messages", "no"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs", "self"),
        ({"chat_template_kwargs": {"documents": 3}}, "documents", "list of objects"),
    ],
)
async def test_bad_templates(tiny_model: Path, change: dict[str, Any], param: str, says: str) -> None:
    async with client(tiny_model) as http:
        response = await http.post("/tokenize", json={"messages": HELLO, **change})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and says in error["message"]


async def test_parts_stay_parts_where_the_template_takes_them(tiny_model: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
    both = (
        "{% for m in messages %}{% if m.content is string %}[{{ m.content }}]"
        "{% else %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endif %}{% endfor %}"
    )
    async with client(tiny_model, both) as http:
        assert await text_of(http, messages=messages) == "[ab]"
        assert await text_of(http) == "[Hello]"
        assert await text_of(http, messages=messages, chat_template="{{ messages[0].content }}") == "a\nb"


async def test_documents_are_what_the_template_reads(tiny_model: Path) -> None:
    template = "{% for d in documents %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"
    body = {"messages": HELLO, "documents": [{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]}
    async with client(tiny_model, template) as http:
        rendered = (await http.post("/v1/chat/completions/render", json=body)).json()
        text = (await http.post("/detokenize", json={"tokens": rendered["token_ids"]})).json()["prompt"]
        assert text == "[a: b][c: d]Hello"
    async with client(tiny_model) as http:
        error = (await http.post("/v1/chat/completions/render", json=body)).json()["error"]
        assert error["param"] == "documents" and "does not read" in error["message"]


async def test_a_broken_template_is_told_at_the_start(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Tokenizing(tiny_model, None)
    engine.tokenizer.chat_template = ChatTemplate({"default": "\n{% for x in %}"})
    config = ServerConfig(port=0)
    with bind(config) as sock:
        server = DrainingServer(create_app(engine, config), config, sock=sock)  # type: ignore[arg-type]
        await server._check_chat_templates()
    assert "chats will be refused: chat template: line 2" in caplog.text


SPELLED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% for t in [m.content] %}{{ t | trim | tojson }}{% endfor %}"
    "{% endfor %}<|im_end|>{% for d in documents or [] %}{{ d.text }}{% endfor %}"
)


@pytest.mark.parametrize("split", [False, True])
async def test_special_tokens_that_users_spell(tiny_model: Path, split: bool) -> None:
    """They become such tokens, unless the operator says that they stay text; those of the template and of the model's
    own messages always do."""
    tokenizer = load_tokenizer(tiny_model)
    start, end = (tokenizer.token_to_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    fake = "a <|im_end|><<|im_start|>|im_start|> b"
    messages = [{"role": role, "content": fake} for role in ("user", "assistant")]
    async with client(tiny_model, SPELLED, split_special_tokens=split) as http:

        async def tokens(**body: Any) -> list[int]:
            response = await http.post("/tokenize", json=body)
            assert response.status_code == 200, response.text
            ids: list[int] = response.json()["tokens"]
            return ids

        ids = await tokens(messages=messages, chat_template_kwargs={"documents": [{"text": fake}]})
        own = 1 if split else 3  # messages and documents that are heeded
        assert ids.count(start) == 2 + own and ids.count(end) == 1 + own
        assert tokenizer.decode(ids, skip_special_tokens=False).count(fake) == 3
        ids = await tokens(prompt=fake)
        assert (start in ids, end in ids) == (not split, not split)
        assert tokenizer.decode(ids, skip_special_tokens=False).removeprefix("<s>") == fake
        assert (ids[0] == tokenizer.bos_token_id) == (tokenizer.encode("")[:1] == [tokenizer.bos_token_id])
        assert await tokens(prompt="plain") == tokenizer.encode("plain")


async def test_a_text_that_begins_with_what_begins_texts_gets_it_twice(tiny_model: Path) -> None:
    """The token that begins texts is added although it is there; a rendered chat has ``add_special_tokens: false``."""
    tokenizer = load_tokenizer(tiny_model)
    begins = tokenizer.encode("")
    text = tokenizer.decode(begins, skip_special_tokens=False)
    async with client(tiny_model) as http:
        ids = (await http.post("/tokenize", json={"prompt": text + "a"})).json()["tokens"]
        bare = (await http.post("/tokenize", json={"prompt": text + "a", "add_special_tokens": False})).json()["tokens"]
    assert ids == begins + bare
