"""Files of requests, by their uuid and by the id under which they were uploaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmjax.serve.errors import ApiError
from llmjax.serve.files import FileStore
from llmjax.serve.protocol.pictures import Attachment
from llmjax.serve.sources import Kept, Sources
from tests.serve.pictures import url_of


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(files=FileStore(tmp_path, most_bytes=2**20, lifetime=60.0))


async def test_a_uuid_is_its_keys_own(sources: Sources) -> None:
    """A picture can be had again by its uuid, by the key that has sent it and in the place of one of its kind."""
    named = Attachment("p.uuid", None, uuid="a")
    sent = Attachment("p", url_of(b"first"), uuid="a")
    assert await sources.read(sent, owner="one") == b"first"
    assert await sources.read(named, owner="one") == b"first"
    for owner, asked in [
        ("two", named),
        ("", named),
        ("one", Attachment("p.uuid", None, uuid="b")),
        ("one", Attachment("p.uuid", None, "video", uuid="a")),
    ]:
        with pytest.raises(ApiError, match=r"^`p\.uuid`: no .* that this API key has sent: send it again$") as caught:
            await sources.read(asked, owner=owner)
        assert (caught.value.status, caught.value.param) == (400, "p.uuid")
    other = Attachment("p", url_of(b"other"), uuid="a")
    assert await sources.read(other, owner="two") == b"other"
    assert await sources.read(named, owner="one") == b"first"
    assert await sources.read(other, owner="one") == b"other"
    assert await sources.read(named, owner="one") == b"other"


async def test_an_uploaded_file_is_its_keys_own(sources: Sources) -> None:
    path = sources.files.new_path()
    path.write_bytes(b"content")
    file = sources.files.keep(path, owner="one", filename="a.txt", purpose="user_data")
    asked = Attachment("p.file_id", None, "file", file_id=file.id)
    assert await sources.read(asked, owner="one") == b"content"
    with pytest.raises(ApiError, match="there is no file") as caught:
        await sources.read(asked, owner="two")
    assert (caught.value.status, caught.value.param) == (404, "p.file_id")


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmjax.serve.sources.KEPT_BYTES", 10)
    monkeypatch.setattr("llmjax.serve.sources.MOST_KEPT", 3)
    kept: Kept[memoryview] = Kept()
    for name in (b"a", b"b", b"c"):
        kept.put(name, memoryview(b"xyz"))
    assert kept.get(b"a") is not None
    kept.put(b"d", memoryview(b"xy"))  # a fourth
    assert [kept.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    kept.put(b"a", memoryview(b"123456"))  # in its place
    assert bytes(kept.get(b"a") or b"") == b"123456"
    assert (kept.get(b"c"), kept.get(b"d") is not None) == (None, True)
    kept.put(b"a", memoryview(b"x" * 11))  # more than all: the old one is not it
    assert kept.get(b"a") is None
