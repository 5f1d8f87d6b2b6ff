"""Every command and program that README and the docs show: what can be run here is; of the rest, flags are read."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from llmjax.bench import serve as bench_serve
from llmjax.cli.commands import COMMANDS, Command, Group
from llmjax.cli.parser import Parser
from llmjax.cli.serve import parse as parse_serve
from llmjax.config import EngineConfig
from llmjax.settings import settings_of
from tests.checkpoints import SEEING as SEEING_MODELS
from tests.checkpoints import TOKEN_VECTORS
from tests.docs import not_run
from tests.docs.commands import PAGES, Shown, shown
from tests.import_graph import ROOT
from tests.pooled_models import write_with_tokenizer
from tests.waiting import until

ALL = [one for page in PAGES for one in shown(page)]
SHELL = [one for one in ALL if one.kind == "shell"]
RUN = [one for one in ALL if not_run.reason(one) is None]
# Programs of others, whose own flags are not read here.
OTHERS = frozenset(
    ["docker", "helm", "kubectl", "sky", "serve", "vllm-router", "curl", "npm", "pytest", "tar", "cp", "cd", "time"]
)
SERVES = re.compile(r"^(llmjax serve|python -m serve)\b(?!.*--help)")
ADDRESS = re.compile(r"(localhost|127\.0\.0\.1):8000")
ASKS = re.compile(r"^python examples/(agent|langchain_chain|stream|tools)\.py")  # a server, at an address of their own
REFUSED = {'"temperatur"': "unknown_parameter"}  # what a page shows as an error, and the code that it gets


class _ParsedError(Exception):
    """The flags of a command are right; it would run now."""


def check_llmjax(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises ``ConfigError`` where ``llmjax`` does not know a command, a flag or its value; runs nothing."""
    found: Command | Group = COMMANDS
    rest = list(argv)
    while isinstance(found, Group):
        if rest and rest[0] == "--help":
            return
        name = rest.pop(0)
        assert name in found.commands, f"there is no llmjax {' '.join(argv)}"
        found = found.commands[name]
    if "--help" in rest:
        return
    if found.module == "llmjax.cli.serve":
        parse_serve(rest)
        return
    parse = Parser.parse

    def parse_only(self: Parser, given: list[str]) -> None:
        parse(self, given)
        raise _ParsedError

    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse", parse_only)
        with pytest.raises(_ParsedError):
            importlib.import_module(found.module).main(rest)


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a command names what is not there."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *rest = words
    if program == "llmjax":
        check_llmjax(rest, monkeypatch)
    elif program in ("mpiexec", "srun", "uvx", "pipx"):
        check(words[words.index("llmjax") :], monkeypatch)
    elif program == "docker" and rest[0] == "run":
        image = next(number for number, word in enumerate(rest) if re.fullmatch(r"llmjax:\w+", word))
        parse_serve(rest[image + 1 :])
    elif program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE), words
    elif program == "pip" and rest[0] == "install":
        check_extras(rest[1:])
    elif program == "python" and rest[0] == "-m":
        check_module(rest[1], rest[2:])
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), words
    else:
        assert program in OTHERS | {"pip"}, words


def check_extras(packages: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for package in packages:
        if found := re.fullmatch(r"(?:\.|llmjax)\[([\w,-]+)\]", package):
            assert set(found[1].split(",")) <= set(extras), package


def check_module(module: str, argv: list[str]) -> None:
    if module == "serve":
        parse_serve(argv)
    else:
        path = ROOT / module.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), module


def test_pages_are_read() -> None:
    assert len(SHELL) > 180
    assert len([one for one in ALL if one.kind == "python"]) > 15
    heredoc = next(one for one in SHELL if one.page == "README.md" and one.text.startswith("curl"))
    assert heredoc.words[-1].startswith("{\n"), "a command goes on until its quotation is closed"


def test_a_wrong_flag_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, told in (
        ("llmjax serve --portt 1", "did you mean --port"),
        ("llmjax serve --port x", "port must be an integer"),
        ("llmjax bench latency --input-length 3", "unknown flag"),
        ("docker run -p 1:1 llmjax:cpu --nope", "unknown flag"),
        ("python -m serve --nope", "unknown flag"),
    ):
        with pytest.raises(Exception, match=told):
            check(shlex.split(wrong), monkeypatch)
    for wrong in ("llmjax sevre", "make nothing", "pip install '.[nothing]'", "python -m benchmarks.nothing", "rm x"):
        with pytest.raises(AssertionError):
            check(shlex.split(wrong), monkeypatch)


@pytest.mark.parametrize("page", sorted({one.page for one in SHELL}))
def test_commands_are_there_and_know_their_flags(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: dict[str, str] = {}  # settings that a command writes, and later ones of the page read
    for one in SHELL:
        if one.page == page:
            for words in _simple_commands(one.words):
                check([written.get(word, word) for word in words], monkeypatch)
                if "--output" in words and (name := words[words.index("--output") + 1]).endswith(".yaml"):
                    (tmp_path / name).touch()
                    written[name] = str(tmp_path / name)


def _simple_commands(words: list[str]) -> Iterator[list[str]]:
    """The commands of a line that ``&&`` joins; of compound ones the first."""
    part: list[str] = []
    for word in words:
        if word == "&&":
            yield part
            part = []
        else:
            part.append(word)
    yield part


def test_every_program_is_python() -> None:
    for one in ALL:
        if one.kind == "python" and one in RUN:
            compile(one.text, f"{one.page}:{one.line}", "exec")


def test_no_reason_is_left_of_what_is_gone() -> None:
    for pattern, _ in not_run.REASONS:
        assert any(re.search(pattern, one.text.strip(), re.DOTALL) for one in ALL), pattern
    for pattern in not_run.MODELS:
        assert any(re.search(pattern, one.text) for one in ALL), pattern


def test_most_of_what_can_be_run_is() -> None:
    assert len(RUN) > 80


def benchmark_modules() -> list[str]:
    modules = {one.words[2] for one in SHELL if one.text.startswith("python -m benchmarks.")}
    assert len(modules) > 15
    return sorted(modules)


@pytest.mark.slow
@pytest.mark.parametrize("module", benchmark_modules())
def test_benchmarks_say_what_they_take(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    flags = {
        word.partition("=")[0]
        for one in SHELL
        if one.text.startswith(f"python -m {module} ")
        for word in one.words[3:]
        if word.startswith("--")
    }
    shown_flags = set(re.findall(r"--[a-z][\w-]*", done.stdout))
    engine = {setting.flag for setting in settings_of(EngineConfig).values()}
    passed_on = bench_serve.command_line().flags() if "[flags of llmjax bench serve]" in done.stdout else frozenset()
    assert flags <= shown_flags | engine | passed_on, flags - shown_flags


@dataclass
class Session:
    """A reader at a terminal: a folder, and at most one server.

    Attributes:
        folder: where commands are run; it has the repository's folders, a model, a text, requests and a picture.
        models: the path of each kind of model.
    """

    folder: Path
    models: dict[str, str]
    server: subprocess.Popen[bytes] | None = None
    port: int = 0
    log: Path = field(init=False)

    def __post_init__(self) -> None:
        self.log = self.folder / "server.log"
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder / "home"),
            "OPENAI_API_KEY": "none",
        }

    def run(self, one: Shown) -> str | None:
        """Runs something; returns what went wrong."""
        text = not_run.stood_in(one.text, self.models)
        if one.kind == "shell" and SERVES.match(text):
            return self.serve(text)
        if ADDRESS.search(text) and self.server is None:
            wrong = self.serve("llmjax serve --config smollm2 --served-model-name smollm2-135m-instruct '*'")
            if wrong:
                return wrong
        text = ADDRESS.sub(f"127.0.0.1:{self.port}", text)
        if ASKS.match(text):
            text += f" --url http://127.0.0.1:{self.port}"
        command = [sys.executable, "-c", text] if one.kind == "python" else ["bash", "-c", _strict(text)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=600
        )
        told = (done.stdout + done.stderr).decode(errors="replace")
        expected = next((code for part, code in REFUSED.items() if part in text), None)
        if expected is not None:
            return None if expected in told else told
        return f"status {done.returncode}: {told[-2000:]}" if done.returncode else None

    def serve(self, text: str) -> str | None:
        """Starts a server in place of the one before; returns what went wrong."""
        self.end()
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
        text = re.sub(r"--(?:port|p|host) \S+", "", text.partition(" #")[0])
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                ["bash", "-c", f"exec {text} --port {self.port} --shutdown-timeout 1"],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        server = self.server
        until(lambda: self._answers() or server.poll() is not None)
        return None if self._answers() else self.log.read_text(errors="replace")[-2000:]

    def _answers(self) -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> None:
        if self.server is not None:
            self.server.terminate()
            self.server.wait()
            self.server = None


def _strict(text: str) -> str:
    """A command that fails where its server refuses."""
    return re.sub(r"^curl ", "curl --silent --show-error --fail-with-body ", text)


@contextmanager
def session(folder: Path, models: dict[str, str]) -> Iterator[Session]:
    for name in ("benchmarks", "configs", "docs", "examples", "serve", "tests"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "home").mkdir()
    (folder / "home" / ".cache").symlink_to(Path("~/.cache").expanduser())
    (folder / "model.gguf").symlink_to(models[not_run.SMALL])
    prose = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    (folder / "book.txt").write_text(prose[:12_000], encoding="utf-8")
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(request) + "\n", encoding="utf-8")
    images = pytest.importorskip("PIL.Image", reason="needs Pillow, which llmjax brings")
    for name in ("cat.png", "cat.jpg", "page.png", "page1.png", "page2.png"):
        images.new("RGB", (64, 64), "orange").save(folder / name)
    for number in range(4):
        images.new("RGB", (64, 64), (0, 60 * number, 0)).save(folder / f"frame{number}.png")
    made = Session(folder, models)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def models(smollm2_path: Path, minilm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    return {
        not_run.SMALL: str(smollm2_path),
        not_run.EMBEDDER: str(minilm_path),
        not_run.RERANKER: str(write_with_tokenizer("roberta-labels", folder, ends=True)),
        not_run.OF_TOKENS: str(TOKEN_VECTORS / "colbert"),
        not_run.OF_PAGES: str(TOKEN_VECTORS / "colqwen2"),
        not_run.SEEING: str(SEEING_MODELS / "qwen2-vl"),
        not_run.SEEING_TOO: str(SEEING_MODELS / "gemma3"),
    }


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", sorted({one.page for one in RUN}))
def test_what_a_page_shows_runs(page: str, models: dict[str, str], tmp_path: Path) -> None:
    with session(tmp_path, models) as reader:
        wrong = {str(one): told for one in RUN if one.page == page and (told := reader.run(one)) is not None}
    assert not wrong, "\n\n".join(f"{place}\n{why}" for place, why in wrong.items())
