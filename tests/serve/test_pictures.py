"""A server of a model that sees, asked through the clients that people have; and pictures that are none."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from llmjax.config import ServerConfig
from tests.models.vision.test_video import file_of
from tests.serve.pictures import QUESTION, asked, golden, png, seeing, url_of, user

pytestmark = pytest.mark.jax_api


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a picture, and a way out of it."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "in").mkdir()
    for path in ("in/a.png", "outside.png"):
        (folder / path).write_bytes(png(golden("image0")))
    (folder / "in" / "link.png").symlink_to(folder / "outside.png")
    return folder


@pytest.fixture(scope="module")
def server(start_server: Any, compile_cache_dir: str, folder: Path) -> Iterator[Any]:
    config = seeing(compile_cache_dir, limit_mm_per_prompt={"image": 3, "video": 1})
    options = {"allowed_local_media_path": str(folder / "in"), "trust_request_chat_template": True}
    running, stop = start_server(config, ServerConfig(port=0, **options))
    yield running
    running.wait_idle()
    stop()


def answer(server: Any, messages: list[Any], **options: Any) -> tuple[str, dict[str, Any]]:
    response = asked(server, messages, **options)
    assert response.status_code == 200, response.text
    found = response.json()
    return found["choices"][0]["message"]["content"], found["usage"]


def test_videos_are_seen(server: Any, folder: Path) -> None:
    """From a data: URL and a file; what is none, too many, or not to be read, is said of the part."""
    made = np.random.default_rng(5).integers(0, 256, (12, 36, 48, 3)).astype(np.uint8)
    file = file_of(made, fps=4)
    (folder / "in" / "a.mkv").write_bytes(file)
    ask = {"type": "text", "text": QUESTION}

    def message(*urls: str) -> list[Any]:
        return [{"role": "user", "content": [*({"type": "video_url", "video_url": {"url": u}} for u in urls), ask]}]

    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'video' %}<|vision_start|><|video_pad|>"
        "<|vision_end|>{% elif p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    said, usage = answer(server, message(url_of(file, "video/x-matroska")), chat_template=template)
    again = answer(server, message(f"file://{folder}/in/a.mkv"), chat_template=template)
    assert (said, usage["prompt_tokens"]) == (again[0], again[1]["prompt_tokens"])
    # Three seconds at two frames a second, two frames in each of 3 x 4 rows, and the tokens around them.
    assert usage["prompt_tokens"] > 3 * 12 + 2
    assert again[1]["prompt_tokens_details"]["cached_tokens"] > 3 * 12
    with server.http() as http:  # the same in the other APIs
        part = {"type": "input_video", "video_url": url_of(file)}
        inputs = [{"role": "user", "content": [part, {"type": "input_text", "text": QUESTION}]}]
        response = http.post(
            "/v1/responses", json={"input": inputs, "chat_template": template, "max_output_tokens": 16}
        )
        assert response.json()["usage"]["input_tokens"] == usage["prompt_tokens"], response.text
        source = {"type": "base64", "media_type": "video/x-matroska", "data": url_of(file).partition(",")[2]}
        blocks = [{"type": "video", "source": source}, ask]
        body = {"messages": [{"role": "user", "content": blocks}], "chat_template": template}
        counted = http.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": usage["prompt_tokens"]}, counted.text
    for urls, reason in [
        ([url_of(b"nothing" * 99)], "cannot be decoded"),
        ([url_of(file)] * 2, "it may have 1"),
        ([f"file://{folder}/outside.mkv"], "no such file below"),
    ]:
        response = asked(server, message(*urls), chat_template=template)
        assert response.status_code == 400 and reason in response.text, response.text
        assert "messages.0.content" in response.json()["error"]["param"]


def test_every_api_sees_the_same_picture(server: Any) -> None:
    import anthropic

    url, model = url_of(png(golden("image0"))), "seeing"
    with server.client() as client:
        chat = client.chat.completions.create(model=model, messages=user(url), max_tokens=4, temperature=0)
        parts = [{"type": "input_image", "image_url": url, "detail": "high"}, {"type": "input_text", "text": QUESTION}]
        inputs: Any = [{"role": "user", "content": parts}]
        response = client.responses.create(model=model, input=inputs, max_output_tokens=16, temperature=0)
        kept = client.responses.input_items.list(response.id).data[0]
        goes_on = client.responses.create(
            model=model, input="And?", previous_response_id=response.id, max_output_tokens=16, temperature=0
        )
    said, usage = chat.choices[0].message.content, chat.usage
    assert said is not None and usage is not None and response.usage is not None and goes_on.usage is not None
    assert response.output_text.startswith(said)
    assert response.usage.input_tokens == usage.prompt_tokens
    assert kept.content[0].image_url == url  # type: ignore[union-attr,index]
    assert goes_on.usage.input_tokens > usage.prompt_tokens
    own = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    source: Any = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    blocks: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    asked_in_blocks: Any = [{"role": "user", "content": blocks}]
    message = own.messages.create(model=model, max_tokens=4, messages=asked_in_blocks, extra_body={"temperature": 0})
    assert message.content[0].text == said  # type: ignore[union-attr]
    count = own.messages.count_tokens(model=model, messages=asked_in_blocks)
    assert count.input_tokens == usage.prompt_tokens
    with server.http() as http:
        assert http.get("/v1/models").json()["data"][0]["input_modalities"] == ["text", "image", "video"]


def test_pictures_in_results_of_tools(server: Any) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(golden("image0"))).decode()}
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    counted = []
    for content in ([{"type": "image", "source": source}], "nothing"):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        messages = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        body = {"model": "seeing", "max_tokens": 4, "messages": messages}
        with server.http() as http:
            response = http.post("/v1/messages", json=body)
        assert response.status_code == 200, response.text
        counted.append(response.json()["usage"]["input_tokens"])
    assert counted[0] > counted[1]


def test_the_same_picture_is_prepared_and_encoded_once(server: Any) -> None:
    url = url_of(png(golden("image1")))
    first, usage = answer(server, user(url, text="A question that nobody has asked before."))
    again, cached = answer(server, user(url, text="A question that nobody has asked before."))
    assert (first, cached["prompt_tokens"]) == (again, usage["prompt_tokens"])
    assert cached["prompt_tokens_details"]["cached_tokens"] > 0
    other, _ = answer(
        server, user(url_of(png(golden("image1")[::-1])), text="A question that nobody has asked before.")
    )
    assert other != first
    three = answer(server, user(url, url, url_of(png(golden("image2")))))[1]
    assert three["prompt_tokens"] > usage["prompt_tokens"]


@pytest.mark.parametrize("kind", ["JPEG", "GIF", "BMP", "WEBP"])
def test_formats(server: Any, kind: str) -> None:
    assert answer(server, user(url_of(png(golden("image0"), format=kind), "image/any")))[1]["completion_tokens"]


def test_files_below_the_folder(server: Any, folder: Path) -> None:
    url = url_of(png(golden("image0")))
    assert answer(server, user(f"file://{folder}/in/a.png"))[0] == answer(server, user(url))[0]
    for path in ("outside.png", "in/link.png", "in/../outside.png", "in/none.png", "in", "in/a%00.png"):
        response = asked(server, user(f"file://{folder}/{path}"))
        assert response.status_code == 400
        assert "there is no such file" in response.json()["error"]["message"]


def bomb() -> bytes:
    """A picture of 50,000 pixels a side in a few kilobytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(6251) * 1000)
    header = struct.pack(">IIBBBBB", 50000, 50000, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
BAD = {
    "no data": ("", "must be a URL"),
    "no URL": ("hello", "is not a data:"),
    "no base64": ("data:image/png;base64,%%%", "not valid base64"),
    "no comma": ("data:image/png;base64", "must be of the form"),
    "empty": (url_of(b""), "the file is empty"),
    "not an image": (url_of(b"hello, I am a text"), "image"),
    "SVG": (url_of(SVG, "image/svg+xml"), "image"),
    "truncated": (url_of(png(np.zeros((64, 64, 3), np.uint8))[:60]), "image"),
    "bomb": (url_of(bomb()), "image"),
    "too long": (url_of(png(np.zeros((1, 3000, 3), np.uint8))), ""),
    "a file": ("file:///etc/passwd", "there is no such file"),
    "another host's file": ("file://host/etc/passwd", "no host"),
    "http": ("http://169.254.169.254/latest", "downloads no images"),
}


@pytest.mark.parametrize("name", BAD)
def test_pictures_that_are_none(server: Any, name: str) -> None:
    """A 400 that names the part, in bounded time; the server answers others as before."""
    url, reason = BAD[name]
    response = asked(server, user(url_of(png(golden("image0"))), url))
    error = response.json()["error"]
    assert response.status_code == 400, response.text
    assert error["param"].startswith("messages.0.content.1")
    assert reason in error["message"] and "\n" not in error["message"]
    assert asked(server, user(url_of(png(golden("image0"))))).status_code == 200


def test_requests_that_are_refused(server: Any) -> None:
    url = url_of(png(golden("image0")))
    for messages, reason in [
        (user(*[url] * 4), "the request has 4 images; it may have 3"),
        (user(*["data:,"] * 5000), "5000 images"),
        (user(*["data:,"] * 10_000), "40006 entries: a request may hold"),
        (user(url, text="<|image_pad|>"), "2 image placeholders, but there are 1 images"),
        (user(text="<|image_pad|>"), "1 image placeholders, but there are 0 images"),
        ([{"role": "system", "content": user(url)[0]["content"]}, *user()], "a message of role system"),
        ([{"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}], "there is no file"),
        ([{"role": "user", "content": [{"type": "image_url", "uuid": ""}]}], "1 to 256 characters"),
        ([{"role": "user", "content": [{"type": "image_url", "uuid": "never sent"}]}], "'never sent' is kept"),
        ([{"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": url}}]}], "audio_url"),
    ]:
        response = asked(server, messages)
        assert response.status_code == (404 if "file_1" in str(messages) else 400)
        assert reason in response.json()["error"]["message"]
    response = asked(server, user(url), truncate_prompt_tokens=8)
    assert response.status_code == 400 and "does not go with images" in response.json()["error"]["message"]


def test_a_uuid_alone_is_a_picture_that_was_sent_before(server: Any) -> None:
    part = {"type": "image_url", "image_url": {"url": url_of(png(golden("image2")))}, "uuid": "mine"}
    ask = {"type": "text", "text": QUESTION}
    first = answer(server, [{"role": "user", "content": [part, ask]}])
    for again in ({"type": "image_url", "uuid": "mine"}, {"type": "image_url", "image_url": None, "uuid": "mine"}):
        assert answer(server, [{"role": "user", "content": [again, ask]}])[0] == first[0]


def test_pictures_and_texts_in_files(server: Any) -> None:
    """Uploaded, and in the request, by every API; the same picture is the same tokens."""
    data = png(golden("image0"))
    seen = answer(server, user(url_of(data)))
    with server.client() as client:
        file = client.files.create(file=("a.png", data), purpose="vision")  # type: ignore[arg-type]
    ask = {"type": "text", "text": QUESTION}
    for part in (
        {"type": "input_image", "file_id": file.id},
        {"type": "file", "file": {"file_id": file.id}},
        {"type": "file", "file": {"file_data": url_of(data), "filename": "a.png"}},
        {"type": "document", "source": {"type": "file", "file_id": file.id}},
    ):
        assert answer(server, [{"role": "user", "content": [part, ask]}])[0] == seen[0]
    text = base64.b64encode(b"notes").decode()
    counts = []
    with server.http() as http:
        for part in (
            {"type": "input_file", "file_data": text, "filename": "n"},
            {"type": "input_text", "text": "n\nnotes"},
        ):
            body = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 16}
            response = http.post("/v1/responses", json=body)
            assert response.status_code == 200, response.text
            counts.append(response.json()["usage"]["input_tokens"])
            listed = http.get(f"/v1/responses/{response.json()['id']}/input_items").json()["data"][0]["content"]
            assert listed == [part]
        pdf = base64.b64encode(b"%PDF-1.4").decode()
        blocks = [{"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": pdf}}]
        refused = http.post("/v1/messages", json={"max_tokens": 4, "messages": [{"role": "user", "content": blocks}]})
    assert counts[0] == counts[1]
    assert refused.status_code == 400 and "PDF files are not read" in refused.text


def test_keywords_of_the_processor(server: Any) -> None:
    """A request's own; they make other rows of the same picture, and what is not known is named."""
    url = url_of(png(golden("image2")))
    plain, small = (
        answer(server, user(url), mm_processor_kwargs=keywords)[1]["prompt_tokens"]
        for keywords in ({}, {"max_pixels": 1600})
    )
    assert small == plain - (144 - 32) // 4
    for keywords, reason in [
        ({"max_pixles": 1}, "'max_pixles' is not known to this model's processor"),
        ({"max_pixels": "x"}, "must be an integer"),
        ({"max_pixels": 10**9, "min_pixels": 10**8}, "messages.0.content.0"),
        ("x", "mm_processor_kwargs"),
    ]:
        response = asked(server, user(url), mm_processor_kwargs=keywords)
        assert response.status_code == 400 and reason in response.text, response.text
    assert answer(server, user(url))[1]["prompt_tokens"] == plain


def test_large_pictures_of_every_mode(server: Any) -> None:
    base = Image.fromarray(golden("image0"))
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        picture = base.convert("L").point(lambda x: x) if mode == "I;16" else base.convert(mode)
        file = io.BytesIO()
        picture.save(file, format="PNG")
        assert asked(server, user(url_of(file.getvalue()))).status_code == 200, mode
    assert asked(server, user(url_of(png(np.zeros((1, 1, 3), np.uint8)), "text/plain"))).status_code == 200
    file = io.BytesIO()
    base.convert("CMYK").save(file, format="JPEG")
    assert asked(server, user(url_of(file.getvalue()))).status_code == 200
    file = io.BytesIO()
    base.save(file, format="GIF", save_all=True, append_images=[base.rotate(90)] * 3)
    assert asked(server, user(url_of(file.getvalue()))).status_code == 200


def test_streams_and_aborted_requests_leave_nothing(server: Any) -> None:
    url = url_of(png(golden("image2")))
    with server.client() as client:
        stream = client.chat.completions.create(model="seeing", messages=user(url), max_tokens=100, stream=True)
        next(iter(stream))
        stream.close()
    server.wait_idle()
    assert asked(server, user(url)).status_code == 200
