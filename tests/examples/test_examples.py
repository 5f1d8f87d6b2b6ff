"""Every file of examples/ runs, with small models that are real, and says what it should."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmjax.config import EngineConfig, ServerConfig
from tests.checkpoints import SEEING
from tests.import_graph import ROOT
from tests.pooled_models import write_with_tokenizer
from tests.serve.conftest import start, write_llama, write_tokenizer
from tests.serve.scripted import scripted_engine
from tests.tiny_adapters import write_adapter
from tests.web.scripts import TEMPLATE

EXAMPLES = ROOT / "examples"
slow = pytest.mark.slow
real_model = pytest.mark.real_model

WEATHER = "What is the weather in Paris?"
CALL = 'So:\n<tool_call>\n{"name": "list_files", "arguments": {"folder": "examples"}}\n</tool_call>'
# The task leads to a call; what the tool returned, whose last line is the script's name, to the answer.
SCRIPTS = {"task": CALL, "vision.py": "The examples are nine scripts and two notebooks, it seems."}


def run(name: str, *arguments: str) -> str:
    """What an example prints."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_of_examples_is_whole() -> None:
    listed = re.findall(r"\]\((\w+\.\w+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert {name for name in names if f'("{name}"' not in here} == set()


@pytest.fixture(scope="module")
def url(smollm2_path: Path, compile_cache_dir: str) -> Iterator[str]:
    """A server of the small model that examples take by default."""
    config = EngineConfig(
        model=str(smollm2_path),
        max_model_len=1024,
        max_num_seqs=2,
        max_num_batched_tokens=128,
        kv_cache_memory_bytes=128 * 2**20,
        compilation_cache_dir=compile_cache_dir,
        served_model_name="smollm2-135m-instruct",
        override_generation_config={"temperature": 0.0},  # what is drawn at random may speak of anything
    )
    running, stop = start(config, ServerConfig(port=0))
    yield running.url
    stop()


@slow
@real_model
def test_offline_batch(smollm2_path: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The capital of France is\nWater boils at\n", encoding="utf-8")
    told = run("offline_batch.py", "--model", str(smollm2_path), "--prompts", str(prompts), "--max-tokens", "4")
    lines = [json.loads(line) for line in told.splitlines()]
    assert [line["prompt"] for line in lines] == ["The capital of France is", "Water boils at"]
    assert "Paris" in lines[0]["text"]


@slow
@real_model
def test_structured_output(smollm2_path: Path) -> None:
    told = run("structured_output.py", "--model", str(smollm2_path))
    assert re.fullmatch(r"name='.*' country='.*' inhabitants=\d+ has_harbor=(True|False)\n", told)


@slow
@real_model
def test_retrieval(minilm_path: Path, tmp_path: Path) -> None:
    """The embedder is real, the reranker a tiny one of random weights, so that its order means nothing."""
    reranker = write_with_tokenizer("roberta-labels", tmp_path, ends=True)
    told = run("retrieval.py", "--embedder", str(minilm_path), "--reranker", str(reranker))
    found, _, ordered = told.partition("Put in order:\n")
    assert "Goethe worked on his tragedy Faust" in found.splitlines()[1]
    scores = [float(line.split()[0]) for line in ordered.splitlines()]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)


@slow
def test_vision(tmp_path: Path) -> None:
    told = run("vision.py", "--model", str(SEEING / "qwen2-vl"), "--max-tokens", "4", "--question", "It?")
    assert re.match(r"\d+ tokens in the prompt\n", told)


@slow
def test_adapters(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_llama(model, vocab=write_tokenizer(model))
    named = [f"{name}={write_adapter(tmp_path / name, model, seed=seed)}" for seed, name in enumerate("ab", 1)]
    told = run("adapters.py", "--model", str(model), "--max-tokens", "4", *named)
    assert [line.partition(":")[0] for line in told.splitlines()] == ["no adapter", "a", "b"]


@slow
@real_model
def test_stream(url: str) -> None:
    assert "blue" in run("stream.py", "--url", url).lower()


@slow
@real_model
def test_tools(url: str) -> None:
    """The form of the call is demanded, so that even a small model makes one."""
    told = run("tools.py", "--url", url, "--question", WEATHER)
    assert re.match(r"get_weather\('(Paris|London)'\)\n.", told)


@slow
def test_agent(tmp_path: Path, compile_cache_dir: str) -> None:
    """A model that does as it is told calls a tool, reads what it returned, and answers."""
    special = ["vision.py"]
    config = scripted_engine(
        tmp_path / "agent",
        SCRIPTS,
        special=special,
        template=TEMPLATE,
        context=2048,
        compile_cache_dir=compile_cache_dir,
    )
    running, stop = start(config, ServerConfig(port=0))
    try:
        told = run("agent.py", "--url", running.url, "--task", "List them. [[task]]")
    finally:
        stop()
    assert re.match(r'list_files\(\{"folder": "examples"\}\): \d+ characters\n', told)
    assert told.endswith(SCRIPTS["vision.py"] + "\n")


@slow
@real_model
def test_langchain(url: str) -> None:
    pytest.importorskip("langchain_openai", reason="needs the extra test-clients: pip install 'llmjax[test-clients]'")
    assert len(run("langchain_chain.py", "--url", url).split()) > 5


@slow
@real_model
def test_two_engines(smollm2_path: Path) -> None:
    told = run("two_engines.py", "--model", str(smollm2_path), "--requests", "8")
    counts = [int(count) for count in re.findall(r"engine \d: (\d+) answers", told)]
    assert told.startswith("8 answers, ")
    assert sum(counts) == 8
    assert len(counts) == 2
    assert min(counts) > 0


@slow
@real_model
def test_several_models(smollm2_path: Path, minilm_path: Path, tmp_path: Path) -> None:
    """The reranker has random weights: which of the passages it prefers means nothing."""
    reranker = write_with_tokenizer("roberta-labels", tmp_path, ends=True)
    models = ("--model", str(smollm2_path), "--embedder", str(minilm_path), "--reranker", str(reranker))
    told = run("several_models.py", *models)
    assert "Goethe worked on his tragedy Faust" in told.partition("best:")[0]
    assert re.search(r"\nanswer:.*\w", told)
    assert told.endswith("models: chat loaded, embed loaded, rank loaded\n")


def run_notebook(name: str) -> str:
    """What the cells of a notebook print, one after another in a process of their own."""
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    done = subprocess.run([sys.executable, "-c", program], cwd=EXAMPLES, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    return done.stdout


@slow
@real_model
def test_notebook_of_the_quickstart(smollm2_path: Path) -> None:
    told = run_notebook("quickstart.ipynb")
    assert "'The capital of France is' → ' Paris" in told
    assert re.search(r"\{'color': '(red|green|blue)', 'letters': \d\}", told)


@slow
@real_model
@pytest.mark.timeout(1800)
def test_notebook_of_quantization(smollm2_path: Path) -> None:
    told = run_notebook("quantization.ipynb")
    assert "as expected" in told
    assert len(re.findall(r"perplexity +\d+\.\d+ ± \d+", told)) == 7
