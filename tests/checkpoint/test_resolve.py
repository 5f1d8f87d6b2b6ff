"""Model names: local ones, and Hugging Face ones against a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants as hf_constants
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given
from hypothesis import strategies as st

from llmjax.adapters.locate import locate
from llmjax.checkpoint.gguf.choice import choose_gguf, gguf_patterns
from llmjax.checkpoint.gguf.mmproj import beside
from llmjax.checkpoint.hub import PROJECTORS, HubOptions, from_hugging_face
from llmjax.checkpoint.resolve import resolve
from llmjax.config import EngineConfig
from llmjax.errors import CheckpointError, ConfigError


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())
    return folder


def parts(stem: str, count: int) -> list[str]:
    return [f"{stem}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


# Local models


def test_a_hugging_face_folder_is_itself(tmp_path: Path) -> None:
    make(tmp_path, "config.json", "model.safetensors", "model-Q8_0.gguf")
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve(tmp_path, gguf_file="q8_0") == tmp_path / "model-Q8_0.gguf"


def test_a_gguf_file_is_itself(tmp_path: Path) -> None:
    make(tmp_path, "a.gguf")
    assert resolve(tmp_path / "a.gguf") == tmp_path / "a.gguf"


@pytest.mark.parametrize("others", [(), ("config.json", "README.md"), ("mmproj-F16.gguf",), ("m-mmproj-f16.gguf",)])
def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path, others: tuple[str, ...]) -> None:
    make(tmp_path, "a.gguf", *others)
    assert resolve(tmp_path) == tmp_path / "a.gguf"


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("Q4_0", "m.Q4_0.gguf"),
        ("M-IQ4_XS.GGUF", "m-IQ4_XS.gguf"),
        ("bf16", "sub/m_BF16.gguf"),
        ("sub/m_BF16.gguf", "sub/m_BF16.gguf"),
        ("F16", "F16.gguf"),
        ("mmproj-F16.gguf", "mmproj-F16.gguf"),
    ],
)
def test_one_of_several_gguf_files_by_name_or_quantization(tmp_path: Path, wanted: str, chosen: str) -> None:
    names = ["m-Q4_K_M.gguf", "m.Q4_0.gguf", "m-IQ4_XS.gguf", "sub/m_BF16.gguf", "F16.gguf", "mmproj-F16.gguf"]
    make(tmp_path, *names)
    assert resolve(tmp_path, gguf_file=wanted) == tmp_path / chosen
    # What the hubs are asked to send must contain what is chosen afterwards.
    assert chosen in filter_repo_objects(names, allow_patterns=gguf_patterns(wanted))


@pytest.mark.parametrize(
    ("names", "wanted", "message"),
    [
        (["a-Q4_0.gguf", "b.gguf"], None, "holds several .gguf files; name one with gguf_file: a-Q4_0.gguf, b.gguf"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "holds several files that fit gguf_file 'Q4_0': a-Q4_0.gguf, b-Q4"),
        (["a-IQ4_0.gguf", "b.gguf"], "Q4_0", "holds no gguf_file 'Q4_0': a-IQ4_0.gguf, b.gguf"),
        (["a-Q4_0.gguf"], "Q4", "holds no gguf_file 'Q4'"),
        (
            [*parts("a", 2), "b.gguf"],
            None,
            "holds several .gguf files; name one with gguf_file: a-00001-of-00002.gguf, b",
        ),
        (["a-Q4_0.gguf", "b-Q4_1.gguf"], "*Q4*", "holds several files that fit gguf_file '*Q4*': a-Q4_0.gguf, b-Q4_1"),
        (["a-Q4_0.gguf"], "*Q5*", "holds no gguf_file '*Q5*': a-Q4_0.gguf"),
        (["mmproj-F16.gguf"], None, "holds no .gguf file: mmproj"),
        (["README.md"], None, "holds neither a config.json nor a .gguf file"),
        (["config.json"], "Q4_0", "holds no gguf_file 'Q4_0'"),
    ],
)
def test_an_ambiguous_or_empty_folder(tmp_path: Path, names: list[str], wanted: str | None, message: str) -> None:
    make(tmp_path, *names)
    with pytest.raises(CheckpointError) as caught:
        resolve(tmp_path, gguf_file=wanted)
    assert str(caught.value).startswith(f"{tmp_path} {message}")


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("Q4_K_M", "m-Q4_K_M-00001-of-00003.gguf"),
        ("q4_k_m", "m-Q4_K_M-00001-of-00003.gguf"),
        ("m-Q4_K_M-00002-of-00003.gguf", "m-Q4_K_M-00001-of-00003.gguf"),
        ("M-q4_k_m.gguf", "m-Q4_K_M-00001-of-00003.gguf"),
        ("*Q4_K_M*", "m-Q4_K_M-00001-of-00003.gguf"),
        ("m-q4_?_m", "m-Q4_K_M-00001-of-00003.gguf"),
        ("*Q4_K_M.gguf", "m-Q4_K_M-00001-of-00003.gguf"),
        ("Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
        ("q8_0/*", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
        ("Q8_0/m-Q8_0-00002-of-00002.gguf", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
        ("F16", "m-F16-00001-of-00001.gguf"),
        ("?-BF16.gguf", "m-BF16.gguf"),
    ],
)
def test_a_split_file_is_one_choice(tmp_path: Path, wanted: str, chosen: str) -> None:
    split = [*parts("m-Q4_K_M", 3), *parts("Q8_0/m-Q8_0", 2), *parts("m-F16", 1)]
    names = [*split, "m-BF16.gguf", "mmproj-Q4_K_M.gguf"]
    make(tmp_path, *names)
    assert resolve(tmp_path, gguf_file=wanted) == tmp_path / chosen
    # All parts are asked for, and none of another file.
    stem = chosen.partition("-0000")[0].removesuffix(".gguf")
    expected = {name for name in names if name.startswith(stem)}
    sent = set(filter_repo_objects(names, allow_patterns=gguf_patterns(wanted), ignore_patterns=PROJECTORS))
    assert sent == expected


def test_a_folder_of_one_split_file_needs_no_choice(tmp_path: Path) -> None:
    make(tmp_path, *parts("m", 2))
    assert resolve(tmp_path) == tmp_path / "m-00001-of-00002.gguf"


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ([1, 3], "holds 2 of 3 parts; missing: m-Q4_0-00002-of-00003.gguf"),
        ([3], "holds 1 of 3 parts; missing: m-Q4_0-00001-of-00003.gguf and 1 more"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, there: list[int], message: str) -> None:
    make(tmp_path, *(parts("m-Q4_0", 3)[i - 1] for i in there))
    for wanted in (None, "Q4_0", parts("m-Q4_0", 3)[2]):
        with pytest.raises(CheckpointError) as caught:
            resolve(tmp_path, gguf_file=wanted)
        assert str(caught.value) == f"{tmp_path} {message}"


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./missing.gguf", "org/missing.gguf", "gpt2", "", "a/b/c", "~/x y"]
)
def test_a_name_that_is_neither_here_nor_an_id(model: str) -> None:
    with pytest.raises(CheckpointError, match="is not on this machine, and is not an id of the form organization/name"):
        resolve(model)


def test_a_name_of_a_bundled_config_is_told_apart() -> None:
    with pytest.raises(CheckpointError, match=r"either; --config smollm2 is a bundled configuration$"):
        resolve("smollm2")


def test_a_file_of_another_format(tmp_path: Path) -> None:
    make(tmp_path, "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors is not a .gguf file; .* give the folder"):
        resolve(tmp_path / "model.safetensors")


def test_settings_that_cannot_apply_are_refused(tmp_path: Path) -> None:
    make(tmp_path, "a.gguf")
    with pytest.raises(ConfigError, match="gguf_file 'Q4_0' has no meaning for"):
        resolve(tmp_path / "a.gguf", gguf_file="Q4_0")
    with pytest.raises(ConfigError, match="revision 'main' has no meaning for"):
        resolve(tmp_path, revision="main")
    with pytest.raises(ConfigError, match=r"revision 'main' has no meaning for pypi://a==1/b.gguf"):
        resolve("pypi://a==1/b.gguf", revision="main")


def test_modelscope_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(
        CheckpointError, match=r"modelscope://Qwen/Qwen3-0.6B needs .*; pip install 'llmjax\[modelscope\]'$"
    ):
        resolve("modelscope://Qwen/Qwen3-0.6B")


STEMS = st.from_regex(r"[A-Za-z0-9]{1,5}([-._][A-Za-z0-9]{1,4}){0,2}", fullmatch=True)


FILES = st.builds(lambda stem, count: parts(stem, count) if count else [f"{stem}.gguf"], STEMS, st.integers(0, 3))
WANTED = STEMS | st.builds("{}*{}".format, STEMS, STEMS) | st.builds("*{}".format, STEMS)


@given(files=st.lists(FILES, min_size=1, max_size=6), wanted=WANTED, data=st.data())
def test_the_hub_is_asked_for_all_parts_of_whatever_may_be_chosen(
    files: list[list[str]], wanted: str, data: st.DataObject
) -> None:
    names = list(dict.fromkeys(name for own in files for name in own))
    wanted = data.draw(st.sampled_from([wanted, *names]))
    try:
        chosen = choose_gguf(names, wanted, where="here")
    except CheckpointError:
        return
    whole = next(own for own in files if chosen in own)
    assert chosen == whole[0]
    assert set(whole) <= set(filter_repo_objects(names, allow_patterns=gguf_patterns(wanted)))


# Hugging Face

SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """Repositories as {id: {path: content}}, answered as huggingface_hub asks for them."""

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    error: tuple[int, str] | None = None  # status and X-Error-Code of every answer
    sent: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = handler.path.partition("?")[0].strip("/")
        self.tokens.add(handler.headers.get("Authorization"))
        repo = next((r for r in self.repositories if path.removeprefix("api/models/").startswith(r)), None)
        if self.error or repo is None:
            status, code = self.error or (404, "RepoNotFound")
            return self.send(handler, status, b"", {"X-Error-Code": code})
        files = self.repositories[repo]
        if path.startswith(f"api/models/{repo}/tree/"):
            tree = [{"type": "file", "path": n, "size": len(d), "oid": oid(d)} for n, d in files.items()]
            return self.send(handler, 200, json.dumps(tree).encode(), {})
        if path.startswith("api/models/"):
            info = {"id": repo, "sha": SHA, "siblings": [{"rfilename": name} for name in files]}
            return self.send(handler, 200, json.dumps(info).encode(), {})
        name = path.removeprefix(f"{repo}/resolve/").partition("/")[2]
        if handler.command == "GET":
            self.sent.append(name)
        return self.send(handler, 200, files[name], {"ETag": f'"{oid(files[name])}"', "X-Repo-Commit": SHA})

    def send(self, handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str]) -> None:
        handler.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)


def oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.answer(self)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield hub
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def options(hub: FakeHub, tmp_path: Path) -> HubOptions:
    return HubOptions(cache_dir=str(tmp_path), endpoint=hub.url, progress=False)


def repository(*names: str) -> dict[str, bytes]:
    return {name: name.encode() for name in names}


def test_a_repository_is_fetched_without_copies_of_its_weights(hub: FakeHub, options: HubOptions) -> None:
    wanted = {"config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json", "tokenizer.model"}
    others = ["README.md", "consolidated.safetensors", "original/params.json", "onnx/model.onnx", "pytorch_model.bin"]
    hub.repositories["org/name"] = repository(*wanted, *others)
    folder = from_hugging_face("org/name", None, replace(options, token="hf_abc"))
    assert {path.name for path in folder.iterdir()} == wanted == set(hub.sent)
    assert (folder / "config.json").read_bytes() == b"config.json"
    assert hub.tokens == {"Bearer hf_abc"}
    assert from_hugging_face("org/name", None, replace(options, offline=True)) == folder
    assert resolve("org/name", download_dir=options.cache_dir, offline=True) == folder
    assert len(hub.sent) == len(wanted)


def test_an_adapter_for_pictures_is_fetched_with_its_model(hub: FakeHub, options: HubOptions) -> None:
    wanted = [
        "config.json",
        "model.safetensors",
        "vision-lora/adapter_config.json",
        "vision-lora/adapter_model.safetensors",
    ]
    others = ["speech-lora/adapter_model.safetensors", "vision_model/model.safetensors", "vae/model.safetensors"]
    hub.repositories["org/name"] = repository(*wanted, *others)
    from_hugging_face("org/name", None, options)
    assert sorted(hub.sent) == wanted


def test_of_mistrals_own_layout_there_is_no_other(hub: FakeHub, options: HubOptions) -> None:
    wanted = ["consolidated.safetensors", "params.json", "tekken.json"]
    hub.repositories["org/name"] = repository(*wanted, "README.md", "vae/model.safetensors")
    folder = from_hugging_face("org/name", None, options)
    assert sorted(path.name for path in folder.iterdir()) == sorted(set(hub.sent)) == wanted


@pytest.mark.parametrize("wanted", ["q4_k_m", "m-Q4_K_M.gguf", "M-q4_K_m.gguf"])
def test_one_gguf_file_is_fetched_alone(hub: FakeHub, options: HubOptions, wanted: str) -> None:
    hub.repositories["org/name"] = repository("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-Q4_K_M.gguf", "config.json")
    path = from_hugging_face("org/name", wanted, options)
    assert path.read_bytes() == b"m-Q4_K_M.gguf"
    assert hub.sent == ["m-Q4_K_M.gguf"]
    assert resolve("org/name", gguf_file=wanted, download_dir=options.cache_dir, offline=True) == path


def test_the_encoder_beside_a_gguf_file_is_fetched_in_one_type(hub: FakeHub, options: HubOptions) -> None:
    others = ["m-mmproj-BF16.gguf", *(f"mmproj-{kind}.gguf" for kind in ("BF16", "F32", "Q8_0"))]
    hub.repositories["org/name"] = repository("m-Q4_K_M.gguf", "m-Q8_0.gguf", "mmproj-m-f16.gguf", *others)
    path = from_hugging_face("org/name", "Q4_K_M", options)
    assert sorted(hub.sent) == ["m-Q4_K_M.gguf", "mmproj-m-f16.gguf"]
    assert beside(path) == path.parent / "mmproj-m-f16.gguf"
    with pytest.raises(CheckpointError, match="holds no gguf_file 'Q5_K_M': m-Q4_K_M"):
        from_hugging_face("org/name", "Q5_K_M", options)


def test_a_repository_of_one_gguf_file_needs_no_choice(
    hub: FakeHub, options: HubOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/name"] = repository("m.gguf", "README.md")
    path = from_hugging_face("org/name", None, options)
    assert path.name == "m.gguf"
    monkeypatch.setattr(hf_constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/name", download_dir=options.cache_dir) == path
    with pytest.raises(CheckpointError, match="org/other is not in the local Hugging Face cache: offline mode"):
        resolve("org/other", download_dir=options.cache_dir)


def test_a_repository_of_several_gguf_files_lists_them_and_sends_none(hub: FakeHub, options: HubOptions) -> None:
    hub.repositories["org/name"] = repository("m-Q8_0.gguf", "m-F16.gguf")
    with pytest.raises(CheckpointError, match=r"org/name holds several .gguf files; .*: m-F16.gguf, m-Q8_0.gguf"):
        from_hugging_face("org/name", None, options)
    with pytest.raises(CheckpointError, match=r"org/name holds no gguf_file 'Q4_0': m-F16.gguf, m-Q8_0.gguf"):
        from_hugging_face("org/name", "Q4_0", options)
    assert hub.sent == []


@pytest.mark.parametrize("wanted", ["Q4_K_M", "*q4_k*", "m-Q4_K_M-00002-of-00002.gguf"])
def test_all_parts_of_a_split_file_are_fetched(hub: FakeHub, options: HubOptions, wanted: str) -> None:
    split = parts("Q4_K_M/m-Q4_K_M", 2)
    hub.repositories["org/name"] = repository(*split, *parts("m-Q8_0", 2), "mmproj-Q4_K_M.gguf", "config.json")
    path = from_hugging_face("org/name", wanted, options)
    assert path.read_bytes() == split[0].encode()
    assert (path.parent / Path(split[1]).name).read_bytes() == split[1].encode()
    assert sorted(hub.sent) == split
    assert resolve("org/name", gguf_file=wanted, download_dir=options.cache_dir, offline=True) == path


def test_a_repository_of_one_split_file_needs_no_choice(hub: FakeHub, options: HubOptions) -> None:
    hub.repositories["org/name"] = repository(*parts("m", 2), "README.md")
    assert from_hugging_face("org/name", None, options).name == "m-00001-of-00002.gguf"
    assert sorted(hub.sent) == parts("m", 2)


def test_a_repository_without_one_of_the_parts(hub: FakeHub, options: HubOptions) -> None:
    hub.repositories["org/name"] = repository(*parts("m-Q4_0", 3)[:2])
    with pytest.raises(CheckpointError, match="org/name holds 2 of 3 parts; missing: m-Q4_0-00003-of"):
        from_hugging_face("org/name", "Q4_0", options)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (
            404,
            "RepoNotFound",
            "org/name is not on Hugging Face, or is private and hf_token does not open it; check the name's spelling; "
            "for a private one give hf_token or run 'hf auth login'",
        ),
        (403, "GatedRepo", "org/name is gated; accept its terms on the hub, then give hf_token or run 'hf auth login'"),
        (
            404,
            "RevisionNotFound",
            "org/name has no revision 'v9' on Hugging Face; leave out revision, or give a branch, tag or commit that "
            "the repository's page lists",
        ),
        (
            429,
            "",
            "org/name at revision v9 cannot be fetched: Hugging Face answered 429 (too many requests): try again in "
            "some minutes, or give hf_token, which is allowed more",
        ),
        (
            500,
            "",
            "org/name at revision v9 cannot be fetched: Hugging Face answered 500, a failure on its side: try again "
            "later, or give offline if the model was fetched before",
        ),
    ],
)
def test_refusals_are_one_line(hub: FakeHub, options: HubOptions, status: int, code: str, message: str) -> None:
    hub.error = (status, code)
    with pytest.raises(CheckpointError) as caught:
        from_hugging_face("org/name", None, replace(options, revision="v9"))
    assert str(caught.value) == message


def test_offline_and_not_cached(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve("org/name", download_dir=str(tmp_path), offline=True)
    assert (
        caught.value.message == "org/name is not in the local Hugging Face cache: offline mode forbids to download it"
    )
    assert caught.value.hint == "leave out offline, or fetch it first: llmjax pull"


def test_a_hub_out_of_reach_is_one_line_and_the_cache_still_serves(hub: FakeHub, options: HubOptions) -> None:
    hub.repositories["org/name"] = repository("config.json", "model.safetensors")
    folder = from_hugging_face("org/name", None, options)
    away = replace(options, endpoint="http://127.0.0.1:9")
    assert from_hugging_face("org/name", None, away) == folder
    with pytest.raises(CheckpointError, match="org/other is not in the local Hugging Face cache") as caught:
        from_hugging_face("org/other", None, away)
    assert "\n" not in str(caught.value)


def test_an_adapter_is_fetched_as_a_repository_is(hub: FakeHub, options: HubOptions, tmp_path: Path) -> None:
    hub.repositories["org/name"] = repository("adapter_config.json", "adapter_model.safetensors", "training_args.bin")
    folder = from_hugging_face("org/name", None, options)
    assert sorted(hub.sent) == ["adapter_config.json", "adapter_model.safetensors"]
    config = EngineConfig(model="m", download_dir=options.cache_dir, offline=True)
    assert locate("org/name", config) == folder
    with pytest.raises(CheckpointError, match="org/other is not in the local Hugging Face cache"):
        locate("org/other", config)
    for path in (str(tmp_path), "nowhere", "org/name.gguf", "/org/name"):
        assert locate(path, config) == Path(path).absolute()  # no id, or there is something


@pytest.fixture
def cached(hub: FakeHub, options: HubOptions) -> Path:
    """The snapshot of a repository that has been fetched, whose reference is the library's own."""
    hub.repositories["org/name"] = repository("config.json", "model.safetensors")
    folder = from_hugging_face("org/name", None, options)
    assert (folder.parents[1] / "refs" / "main").read_text() == SHA
    return folder


@pytest.mark.parametrize("away", [{"offline": True}, {"endpoint": "http://127.0.0.1:9"}], ids=["offline", "no network"])
@pytest.mark.parametrize("reference", [f"{SHA}\n", f" {SHA}\r\n", None])
def test_a_reference_as_others_leave_it(
    cached: Path, options: HubOptions, away: dict[str, Any], reference: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    main = cached.parents[1] / "refs" / "main"
    main.unlink() if reference is None else main.write_text(reference)
    assert from_hugging_face("org/name", None, replace(options, **away)) == cached
    assert ("no refs/main" in caplog.text) == (reference is None)


def test_snapshots_without_a_reference_must_be_one_and_whole(cached: Path, options: HubOptions) -> None:
    offline = replace(options, offline=True)

    def found() -> Path | None:
        try:
            return from_hugging_face("org/name", None, offline)
        except CheckpointError as error:
            assert "is not in the local Hugging Face cache" in str(error)
            return None

    (cached.parents[1] / "refs" / "main").unlink()
    with pytest.raises(CheckpointError):
        from_hugging_face("org/name", None, replace(offline, revision="v1"))
    second = cached.with_name("f" * 40)
    second.mkdir()
    (second / "config.json").write_text("{}")
    assert found() == cached  # the other one has no weights
    (second / "model.safetensors").symlink_to("../../blobs/nothing")
    assert found() == cached  # or they are not there
    (second / "model.safetensors").unlink()
    (second / "model-1.safetensors").write_text("")
    index = second / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert found() == cached  # or some are not
    (second / "model-2.safetensors").write_text("")
    assert found() is None  # which of them is meant?
    (cached.parents[1] / "refs" / "main").write_text("../../../elsewhere\n")
    assert found() is None


@pytest.mark.real_model
def test_the_real_models_are_whole(smollm2_path: Path, gemma3_path: Path) -> None:
    for path, size in ((smollm2_path, 98_362_432), (gemma3_path, 253_113_024)):
        assert path.stat().st_size == size
        with path.open("rb") as file:
            assert file.read(4) == b"GGUF"
