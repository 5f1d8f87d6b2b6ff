"""A wheel, a source archive and an editable install in fresh environments, beside packages and files of the same names.

The environments see the dependencies of the one that runs the tests through a .pth file, so that none is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import GOLDEN

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
LLAMA, CHARACTERS = GOLDEN / "llama", ROOT / "tests" / "engine" / "golden" / "characters"
NEIGHBORS = ("transformers", "kernels")
KINDS = ("wheel", "sdist", "editable")
NOT_COPIED = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info")

USER_FILES = {
    "models/__init__.py": "mine = 'models'\n",
    "kernels.py": "mine = 'kernels'\n",
    "serve.py": "mine = 'serve'\nif __name__ == '__main__':\n    print('my own server')\n",
    "train.py": """
import json, kernels, models, serve
import llmjax.kernels.linear, llmjax.models, llmjax.serve.app
from llmjax import LLM, SamplingParams
from llmjax.config_file import find_config
from llmjax.kernels.cpu.library import describe

names = [kernels.mine, models.mine, serve.mine]
MODEL, CHARACTERS, CACHE = SETTINGS
llm = LLM(MODEL, tokenizer=CHARACTERS, dtype="float32", max_num_seqs=2, max_num_batched_tokens=16, page_size=4,
          kv_cache_memory_bytes=2**20, compilation_cache_dir=CACHE)
(out,) = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), use_tqdm=False)
llm.close()
print(json.dumps({"names": names, "ids": out.outputs[0].token_ids, "config": str(find_config("qwen3")),
                  "files": [llmjax.__file__, llmjax.kernels.linear.__file__], "kernels": describe()}))
""",
}


@dataclass(frozen=True)
class Environment:
    """A virtual environment that llmjax is installed in, and a folder of somebody's own that has our names in it."""

    kind: str
    path: Path
    source: Path
    folder: Path

    @property
    def python(self) -> str:
        return str(self.path / "bin" / "python")

    def run(self, *command: str, folder: Path | None = None, fails: bool = False) -> str:
        """What a command prints; commands are those of the environment."""
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.path / "bin" / command[0]), *command[1:]],
            cwd=folder or self.folder,
            env=variables,
            capture_output=True,
            text=True,
        )
        assert (done.returncode != 0) == fails, done.stderr[-2000:] + done.stdout[-2000:]
        return done.stderr if fails else done.stdout


def pip(*arguments: str, environment: Path | None = None, **variables: str) -> None:
    # By path, for a pip that the environment itself does not have.
    target = ["--python", str(environment / "bin" / "python")] if environment else []
    done = subprocess.run(
        [sys.executable, "-m", "pip", *target, *arguments],
        env={**os.environ, **variables, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, because building writes into it."""
    target = tmp_path_factory.mktemp("source") / "llmjax"
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    return target


@pytest.fixture(scope="module")
def archives(source: Path) -> dict[str, Path]:
    """The wheel and the source archive by kind, built from the checkout."""
    folder = source.parent / "archives"
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--sdist", "--outdir", str(folder)]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, cwd=folder.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


@pytest.fixture(scope="module")
def neighbors(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Wheels of the packages of Hugging Face's that people have beside llmjax."""
    folder = tmp_path_factory.mktemp("neighbors")
    pip("download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), *NEIGHBORS)
    return [str(path) for path in folder.glob("*.whl")]


@pytest.fixture(scope="module", params=KINDS)
def installed(
    request: pytest.FixtureRequest,
    source: Path,
    neighbors: list[str],
    tmp_path_factory: pytest.TempPathFactory,
    compile_cache_dir: str,
) -> Iterator[Environment]:
    """An environment for each way to install; only the wheel is built with a C++ compiler, which takes two
    minutes where the checkout has no library that fits."""
    kind = request.param
    path = tmp_path_factory.mktemp(kind) / "environment"
    venv.create(path, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(path), "platbase": str(path)}))
    running = [folder for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    (site / "dependencies.pth").write_text("\n".join(running) + "\n")
    options = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]
    what = ["--editable", str(source)] if kind == "editable" else [str(request.getfixturevalue("archives")[kind])]
    pip(*options, *what, environment=path, CXX="no-such-compiler")
    pip(*options, *neighbors, environment=path)
    folder = path.parent / "project"
    for name, content in USER_FILES.items():
        settings = json.dumps([str(LLAMA), str(CHARACTERS), compile_cache_dir])
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content.replace("SETTINGS", settings))
    yield Environment(kind, path, source, folder)


def test_a_source_archive_has_the_folders_and_no_links(archives: dict[str, Path]) -> None:
    with tarfile.open(archives["sdist"]) as archive:
        members = archive.getmembers()
    assert all(member.isfile() for member in members)
    names = {member.name.split("/", 1)[1] for member in members}
    assert {"models/__init__.py", "kernels/cpu/src/linear.cc", "serve/__main__.py", "configs/qwen3.yaml"} <= names
    assert {"web/src/app.tsx", "web/package-lock.json", "serve/web/app.js"} <= names
    assert {"pyproject.toml", "hatch_build.py", "LICENSE", "llmjax/version.py"} <= names
    left_out = ("llmjax/models", "llmjax/kernels", "llmjax/serve/", "tests/")
    assert not [name for name in names if name.startswith(left_out)]
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_a_wheel_has_one_package_and_the_command_of_a_module(archives: dict[str, Path]) -> None:
    with zipfile.ZipFile(archives["wheel"]) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"llmjax", "serve.py"}
    files = ("models/__init__.py", "kernels/registry.py", "serve/__main__.py", "serve/app.py", "configs/qwen3.yaml")
    assert {f"llmjax/{file}" for file in files} <= names
    assert {"llmjax/serve/web/index.html", "llmjax/serve/web/app.js", "llmjax/serve/web/LICENSES.txt"} <= names
    assert "llmjax/kernels/cpu/libllmjax_cpu.so" in names
    assert not archives["wheel"].name.endswith("any.whl")


def test_in_a_folder_with_files_of_the_same_names(installed: Environment) -> None:
    found = json.loads(installed.run("python", "train.py").splitlines()[-1])
    assert found["names"] == ["kernels", "models", "serve"]
    assert len(found["ids"]) == 5
    place = installed.source if installed.kind == "editable" else installed.path
    assert all(Path(file).is_relative_to(place) for file in found["files"])
    assert Path(found["config"]).is_file() and Path(found["config"]).is_relative_to(place)
    assert found["kernels"].startswith("C++ kernels" if installed.kind == "wheel" else "portable")
    assert installed.run("python", "-m", "serve") == "my own server\n"


def test_commands(installed: Environment, compile_cache_dir: str) -> None:
    version = (ROOT / "llmjax" / "version.py").read_text().split('"')[1]
    assert version in installed.run("llmjax", "--version")
    assert "--config" in installed.run("llmjax", "serve", "--help")
    line = f"--model {LLAMA} --tokenizer {CHARACTERS} --dtype float32 --max-num-seqs 2 --max-num-batched-tokens 16"
    line += " --page-size 4 --kv-cache-memory-bytes 1MiB --temperature 0 --max-tokens 5 --ignore-eos"
    line += f" --compilation-cache-dir {compile_cache_dir}"  # where the test above has left these programs
    assert installed.run("llmjax", "generate", "Hello", *line.split()).strip()
    said = installed.run("llmjax", "serve", "--config", "qwen4", fails=True)
    assert "no bundled config of that name" in said and "qwen3" in said


def test_names_of_others_stay_theirs(installed: Environment, tmp_path: Path) -> None:
    script = "import importlib.util as u, json; print(json.dumps([getattr(u.find_spec(n), 'origin', None) for n in "
    script += "('kernels', 'transformers', 'models', 'serve')]))"
    kernels, transformers, models, serve = json.loads(installed.run("python", "-c", script, folder=tmp_path))
    for name, origin in (("kernels", kernels), ("transformers", transformers)):
        assert Path(origin).is_relative_to(installed.path) and Path(origin).parent.name == name
    assert models is None and Path(serve).name == "serve.py"
    assert "--config" in installed.run("python", "-m", "serve", "--help", folder=tmp_path)


def test_the_checkout_serves_too(installed: Environment) -> None:
    command = ("python", "-m", "serve", "--config", "configs/qwen3.yaml", "--help")
    assert "--config" in installed.run(*command, folder=installed.source)
