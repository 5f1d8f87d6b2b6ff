"""Pulling from hosts on loopback: what comes, what is checked of it, and what stays when something breaks."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from llmjax.checkpoint import download
from llmjax.checkpoint.pulled import PulledModel, PulledModels
from llmjax.errors import CheckpointError
from llmjax.pulled import registry
from llmjax.pulled.names import parse_name
from llmjax.pulled.order import Fetched, Order
from llmjax.pulled.process import fetched
from llmjax.pulled.progress import Step
from tests.pulled.hosts import Hosts, serving, sha256, tiny_gguf
from tests.waiting import until_async

FILES = {
    name: json.dumps(content).encode()
    for name, content in {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
        },
        "tokenizer_config.json": {},
    }.items()
}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with serving() as hosts:
        monkeypatch.setenv("HF_ENDPOINT", hosts.url)
        monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")
        yield hosts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")


def pulled(name: str, root: Path, hosts: Hosts, **more: Any) -> tuple[list[Step], Fetched]:
    """What a process tells of a pull, and what comes of it."""

    async def main() -> tuple[list[Step], Fetched]:
        order = Order(name=parse_name(name, registry=hosts.url), root=root, registry=hosts.url, **more)
        *steps, last = [each async for each in fetched(order)]
        assert isinstance(last, Fetched)
        return [step for step in steps if isinstance(step, Step)], last

    return asyncio.run(main())


def files_of(root: Path) -> set[str]:
    return {path.name for path in root.rglob("*") if path.is_file() and path.parent.name != ".locks"}


def test_a_model_of_the_registry_is_fetched_and_checked(hosts: Hosts, model: bytes, tmp_path: Path) -> None:
    params = {"temperature": 0.5, "repeat_penalty": 1.1, "stop": ["</s>"], "top_k": "many"}
    layers = {"model": model, "template": b"{{ .Prompt }}", "params": json.dumps(params).encode(), "license": b"MIT"}
    hosts.publish("library/tiny:1b", layers)
    steps, found = pulled("tiny:1b", tmp_path, hosts)
    digest = sha256(model)
    assert Path(found.model).read_bytes() == model and Path(found.model).suffix == ".gguf"
    assert found.sampling == {"temperature": 0.5, "repetition_penalty": 1.1}
    assert found.ignored == ("template", "license", "params.stop", "params.top_k")
    assert steps[0] == Step("pulling manifest")
    assert Step(f"pulling {digest[:12]}", f"sha256:{digest}", len(model), len(model)) in steps
    assert steps[-1].status.startswith("ignoring template, license, params.stop, params.top_k")
    before = len(hosts.asked)
    assert pulled("tiny:1b", tmp_path, hosts)[1] == found
    assert [path for path in hosts.asked[before:] if digest in path] == []


def test_another_version_takes_the_place_of_the_one_before(hosts: Hosts, model: bytes, tmp_path: Path) -> None:
    hosts.publish("library/tiny:latest", {"model": model})
    first = pulled("tiny", tmp_path, hosts)[1].model
    later = tiny_gguf(tmp_path / "later.gguf", scale=2.0)
    hosts.publish("library/tiny:latest", {"model": later})
    second = pulled("tiny", tmp_path, hosts)[1].model
    assert Path(second).read_bytes() == later and not Path(first).exists()


def test_a_gguf_file_of_the_hub(hosts: Hosts, model: bytes, tmp_path: Path) -> None:
    hosts.repositories["org/name"] = {f"m-{kind}.gguf": model for kind in ("Q4_K_M", "Q8_0")} | {"README.md": b"x"}
    steps, found = pulled("hf.co/org/name:Q8_0", tmp_path, hosts)
    assert Path(found.model).name == "m-Q8_0.gguf" and Path(found.model).read_bytes() == model
    digest = sha256(model)
    assert Step.of_file(digest, total=len(model), completed=len(model)) in steps
    assert steps[-1] == Step("verifying sha256 digest")
    assert not any("Q4_K_M" in path for path in hosts.asked)
    assert Path(pulled("org/name", tmp_path, hosts)[1].model).name == "m-Q4_K_M.gguf"  # the usual one


def test_a_folder_of_the_hub_and_its_next_version(hosts: Hosts, tmp_path: Path) -> None:
    hosts.repositories["org/name"] = {**FILES, "model.safetensors": bytes(8) + b" " * 5000}
    with pytest.raises(CheckpointError, match="org/name cannot be served"):
        pulled("org/name", tmp_path, hosts)
    assert files_of(tmp_path) == set()  # what cannot be served does not stay
    weights = len(b"{}").to_bytes(8, "little") + b"{}"
    hosts.repositories["org/name"] = {**FILES, "model.safetensors": weights}
    first = Path(pulled("org/name", tmp_path, hosts)[1].model)
    assert {path.name for path in first.iterdir()} == {*FILES, "model.safetensors"}
    hosts.repositories["org/name"]["config.json"] += b" "
    second = Path(pulled("org/name", tmp_path, hosts, known=True)[1].model)
    assert second != first and not first.exists()
    assert (second / "config.json").read_bytes() == hosts.repositories["org/name"]["config.json"]
    assert sum(path.is_file() for path in tmp_path.rglob("blobs/*")) == len(FILES) + 1


def test_a_hub_that_sends_other_bytes_is_found_out(hosts: Hosts, model: bytes, tmp_path: Path) -> None:
    hosts.repositories["org/name"] = {"m.gguf": model}
    hosts.other["/m.gguf"] = bytes([*model[:-1], model[-1] ^ 1])
    with pytest.raises(CheckpointError, match=f"sha256 is .*, expected {sha256(model)}; the file was removed"):
        pulled("org/name", tmp_path, hosts)
    hosts.other.clear()
    assert Path(pulled("org/name", tmp_path, hosts)[1].model).read_bytes() == model


def test_a_download_that_breaks_off_goes_on(hosts: Hosts, model: bytes, tmp_path: Path) -> None:
    hosts.publish("library/tiny:latest", {"model": model})
    digest = sha256(model)
    hosts.cut[digest] = 100
    with pytest.raises(CheckpointError, match="bytes are kept, run again to resume"):
        pulled_here("tiny", tmp_path, hosts)
    assert any(name.endswith(".partial") for name in files_of(tmp_path))
    hosts.cut.clear()
    assert Path(pulled("tiny", tmp_path, hosts)[1].model).read_bytes() == model


def pulled_here(name: str, root: Path, hosts: Hosts) -> registry.FromRegistry:
    """The same from the registry without a process, and without pauses between attempts."""
    parsed = parse_name(name, registry=hosts.url)
    folder = root / parsed.folder
    folder.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download.RetryPolicy, "__init__", lambda policy: policy.__dict__.update(attempts=2, pause=0.0))
        return registry.pull_from_registry(parsed, folder, base_url=hosts.url, tell=lambda step: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "sha256:" + "0" * 64}, "HTTP 404"),
        ({"size": 10}, "sends more than the 10 bytes"),
        ({"size": 10**18}, "disk full: 1,000,000,000,000,000,000 bytes are needed"),
        ({"size": -1}, "manifest cannot be read"),
        ({"digest": "sha256:../../../etc/passwd"}, "manifest cannot be read"),
        ({"mediaType": "application/vnd.ollama.image.adapter"}, "cannot be served: it is an adapter"),
        ({"mediaType": "application/vnd.ollama.image.tensor; name=x"}, "not one GGUF file but single tensors"),
        ({"mediaType": "application/vnd.ollama.image.license"}, "it has 0 layers of the kind model, not one"),
    ],
    ids=lambda change: str(change)[:40],
)
def test_a_manifest_that_is_wrong(
    hosts: Hosts, model: bytes, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    hosts.publish("library/tiny:latest", {"model": model})["layers"][0] |= change
    with pytest.raises(CheckpointError, match=message):
        pulled_here("tiny", tmp_path, hosts)
    assert files_of(tmp_path) <= {f"model-{sha256(model)[:12]}.gguf.partial"}


def test_a_blob_with_another_hash_is_removed(hosts: Hosts, model: bytes, tmp_path: Path) -> None:
    hosts.publish("library/tiny:latest", {"model": model})
    hosts.other[sha256(model)] = model[::-1]
    with pytest.raises(CheckpointError, match=rf"sha256 is {hashlib.sha256(model[::-1]).hexdigest()}, expected"):
        pulled_here("tiny", tmp_path, hosts)
    assert files_of(tmp_path) == set()


@pytest.mark.parametrize("answer", [b"{", b"[]", b'{"layers": 5}', b'{"layers": [{}]}', b"{}"])
def test_a_manifest_that_cannot_be_read(hosts: Hosts, tmp_path: Path, answer: bytes) -> None:
    hosts.manifests["library/tiny:latest"] = {}
    hosts.other["/manifests/latest"] = answer
    with pytest.raises(CheckpointError, match="the registry's manifest cannot be read"):
        pulled_here("tiny", tmp_path, hosts)


def test_a_manifest_without_end_is_not_read(hosts: Hosts, tmp_path: Path) -> None:
    hosts.manifests["library/tiny:latest"] = {}
    hosts.other["/manifests/latest"] = b" " * (registry.MOST_TEXT + 1)
    with pytest.raises(CheckpointError, match="the answer has more than 1,048,576 bytes"):
        pulled_here("tiny", tmp_path, hosts)


@pytest.mark.parametrize("name", ["tiny:7b", "org/name", "org/name:Q5_K_M"])
def test_what_there_is_not(hosts: Hosts, model: bytes, tmp_path: Path, name: str) -> None:
    if name.endswith("Q5_K_M"):
        hosts.repositories["org/name"] = {"m-Q4_0.gguf": model}
    with pytest.raises(CheckpointError, match=r"is not in the registry|is not on Hugging Face|holds no gguf_file"):
        pulled(name, tmp_path, hosts)


def test_the_hubs_sizes_are_held_against_the_disk(hosts: Hosts, model: bytes, tmp_path: Path) -> None:
    hosts.repositories["org/name"] = {"m.gguf": model}
    hosts.sizes["m.gguf"] = 10**18
    with pytest.raises(CheckpointError, match="disk full: 1,000,000,000,000,000,000 bytes are needed"):
        pulled("org/name", tmp_path, hosts)
    assert not any(path.endswith("m.gguf") for path in hosts.asked)


def test_a_process_that_is_ended_leaves_what_has_come(hosts: Hosts, model: bytes, tmp_path: Path) -> None:
    hosts.publish("library/tiny:latest", {"model": model})
    gate = hosts.gates[sha256(model)] = threading.Event()

    async def half() -> None:
        order = Order(name=parse_name("tiny", registry=hosts.url), root=tmp_path, registry=hosts.url)
        async with aclosing(fetched(order)) as steps:
            async for step in steps:
                if isinstance(step, Step) and step.completed:
                    break

    asyncio.run(half())
    (partial,) = tmp_path.rglob("*.partial")
    assert 0 < partial.stat().st_size < len(model)
    gate.set()
    hosts.gates.clear()
    assert Path(pulled("tiny", tmp_path, hosts)[1].model).read_bytes() == model


def test_two_servers_fetch_a_model_one_after_the_other(hosts: Hosts, model: bytes, tmp_path: Path) -> None:
    hosts.publish("library/tiny:latest", {"model": model})
    gate = hosts.gates[sha256(model)] = threading.Event()

    async def main() -> list[Fetched]:
        async def one() -> Fetched:
            order = Order(name=parse_name("tiny", registry=hosts.url), root=tmp_path, registry=hosts.url)
            *_, last = [each async for each in fetched(order)]
            assert isinstance(last, Fetched)
            return last

        both = [asyncio.create_task(one()) for _ in range(2)]
        await until_async(lambda: any(sha256(model) in path for path in hosts.asked))
        gate.set()
        return await asyncio.gather(*both)

    first, second = asyncio.run(main())
    assert first == second
    assert sum(sha256(model) in path for path in hosts.asked) == 1


def test_records_are_kept_and_removed_with_their_files(tmp_path: Path) -> None:
    records = PulledModels(tmp_path / "pulled")
    assert records.all() == []
    for name, folder in (("a", "hf.co/org/a/latest"), ("b", "hf.co/org/b/latest"), ("also-b", "hf.co/org/b/latest")):
        (records.root / folder).mkdir(parents=True, exist_ok=True)
        (records.root / folder / "m.gguf").write_bytes(b"x")
        records.put(PulledModel(name=name, source="s", folder=folder, model=str(records.root / folder / "m.gguf")))
    again = PulledModels(tmp_path / "pulled")
    assert [one.name for one in again.all()] == ["a", "b", "also-b"]
    again.remove("b")
    assert (again.root / "hf.co/org/b/latest/m.gguf").exists()  # another name has it
    again.remove("also-b")
    again.remove("a")
    assert again.all() == [] and {path.name for path in again.root.iterdir()} == {"pulled.json", "pulled.json.lock"}


def test_a_record_whose_files_are_gone_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = PulledModels(tmp_path)
    records.put(PulledModel(name="a", source="s", folder="f", model=str(tmp_path / "nothing.gguf")))
    assert records.all() == [] and "a was pulled, but" in caplog.text
    assert records.find("a") is not None


def test_no_record_removes_what_is_not_below_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    records = PulledModels(tmp_path / "pulled")
    for folder in ("../outside", str(outside), "."):
        records.put(PulledModel(name="a", source="s", folder=folder, model=str(outside)))
        records.remove("a")
        assert outside.exists() and records.root.exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 5}', '{"a": {"color": 1}}'])
def test_a_list_that_cannot_be_read_names_its_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "pulled.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"pulled\.json"):
        PulledModels(tmp_path).all()
