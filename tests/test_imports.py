"""What a start imports: a warm one takes about as long as its imports, so nothing heavy may slip in.

Read from ``sys.modules`` of a fresh process; no clock decides.
"""

import json
import subprocess
import sys
from collections.abc import Iterable

import pytest

from llmjax.system import python_path

pytestmark = pytest.mark.smoke

# What people install beside llmjax, or what only other commands and other devices need.
NEVER = frozenset(
    {
        "IPython",
        "datasets",
        "flax",  # what traces a program needs it, and a warm start traces nothing
        "gguf",
        "huggingface_hub",
        "jinja2",
        "llmjax.bench",
        "llmjax.evaluation",
        "llmjax.kernels.cpu.build",
        "llmjax.models.modules",
        "llmjax.quantization.calibration",
        "llmjax.quantization.folder_export",
        "llmjax.quantization.gguf_export",
        "matplotlib",
        "modelscope",
        "optax",
        "orbax",
        "pandas",
        "requests",
        "scipy",
        "sentencepiece",  # some tokenizers'
        "sympy",
        "tensorflow",
        "torch",
        "tqdm",
        "transformers",
        "triton",
    }
)
# What one engine of many has a use for.
RARELY = frozenset(
    {
        "PIL",  # of models that see
        "jax._src.pallas",
        "llguidance",
        "llmjax.checkpoint.formats.registry",
        "llmjax.kernels.cuda",
        "rich",  # where there is a terminal
        "yaml",  # of a command that is given a file of settings
    }
)
LIBRARIES = frozenset({"jax", "jaxlib", "llmjax.models", "numpy", "pydantic", "rich", "starlette", "tokenizers"})


def imported(code: str) -> set[str]:
    """Names of all modules that a fresh process has imported after it."""
    code = f"{code}\nimport json, sys\nprint(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": python_path(), "PATH": "", "JAX_PLATFORMS": "cpu", "PYTHONNOUSERSITE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def of(packages: Iterable[str], modules: set[str]) -> set[str]:
    return {name for name in packages if name in modules}


@pytest.mark.parametrize("code", ["import llmjax", "import llmjax.config"])
def test_settings_need_no_jax(code: str) -> None:
    found = imported(code)
    assert not of(NEVER | {"jax", "llmjax.models"}, found)
    if code == "import llmjax":
        assert not of(LIBRARIES, found)


def test_a_start_imports_nothing_that_it_has_no_use_for() -> None:
    found = imported("from llmjax import LLM")
    assert "jax" in found
    assert not of(NEVER | RARELY, found)


def test_a_server_whose_engine_is_in_another_process_needs_no_jax() -> None:
    found = imported("from llmjax import AsyncLLM\nimport llmjax.serve.run, llmjax.serve.server")
    assert "starlette" in found
    assert not of(NEVER | {"jax", "jaxlib", "llmjax.models.config", "safetensors"}, found)


def test_an_engines_process_starts_before_the_servers_other_imports() -> None:
    found = imported("import llmjax.serve.run, llmjax.engine.clients.process")
    assert not of(NEVER | {"jax", "starlette", "tokenizers", "uvicorn"}, found)


def test_collections_wait_until_imports_are_done() -> None:
    """And go on afterwards, unless nobody wanted any."""
    code = """
import gc, sys
seen = []
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "llmjax.llm":
            seen.append(gc.isenabled())
sys.meta_path.insert(0, Finder())
from llmjax import LLM
assert seen == [False] and gc.isenabled(), seen
gc.disable()
from llmjax import quantize
assert not gc.isenabled()
"""
    imported(code)
