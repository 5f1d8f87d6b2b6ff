"""The files that are served are those that the sources in web/ make."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from llmjax.sampling.params import SamplingParams
from llmjax.serve.protocol.chat import ChatRequest
from llmjax.serve.protocol.completions import CompletionRequest

ROOT = Path(__file__).parents[2]
SOURCES, BUILT = ROOT / "web", ROOT / "serve" / "web"
REBUILD = "run `npm ci --prefix web && npm run build --prefix web`, and commit serve/web"

# What the page does not offer among its parameters, because it asks for it itself, or shows it in another way.
ELSEWHERE = {
    *("logprobs", "prompt_logprobs", "logprob_token_ids"),  # probabilities
    *("structured_outputs", "constraint", "output_kind", "detokenize"),  # the form of answer and stream
}


def test_the_served_files_were_made_of_these_sources() -> None:
    """Needs no Node: the build leaves a hash of what it has read."""
    own = [SOURCES / name for name in ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")]
    paths = [*own, *(path for path in (SOURCES / "src").rglob("*") if path.is_file())]
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(SOURCES).as_posix() for path in paths):
        digest.update(name.encode() + b"\0" + (SOURCES / name).read_bytes() + b"\0")
    assert (BUILT / "sources.sha256").read_text() == f"{digest.hexdigest()}\n", REBUILD


def test_building_again_gives_the_same_files(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (SOURCES / "node_modules" / "esbuild").exists():
        pytest.skip("needs Node and the page's packages: npm ci --prefix web")
    subprocess.run([node, "build.mjs", str(tmp_path / "out")], cwd=SOURCES, check=True, timeout=100)
    made = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert made == {path.name: path.read_bytes() for path in BUILT.iterdir()}, REBUILD


def test_the_types_are_right() -> None:
    compiler = SOURCES / "node_modules" / ".bin" / "tsc"
    if not compiler.exists():
        pytest.skip("needs Node and the page's packages: npm ci --prefix web")
    done = subprocess.run([compiler], cwd=SOURCES, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout


def test_the_parts_that_need_no_browser() -> None:
    node = shutil.which("node")
    if node is None or not (SOURCES / "node_modules" / "esbuild").exists():
        pytest.skip("needs Node and the page's packages: npm ci --prefix web")
    done = subprocess.run([node, "test.mjs"], cwd=SOURCES, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_no_script_or_style_in_it_and_names_nothing_elsewhere() -> None:
    page = (BUILT / "index.html").read_text()
    assert re.findall(r"<(?:script|style)\b[^>]*>(?!</)", page) == []
    assert " style=" not in page and re.search(r"\son\w+=", page) is None
    assert re.findall(r'(?:src|href)="(?!web/)', page) == []
    assert re.findall(r"url\((?!#)", (BUILT / "style.css").read_text()) == []


def test_licenses_are_told() -> None:
    told = (BUILT / "LICENSES.txt").read_text()
    locked = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    for name in json.loads((SOURCES / "package.json").read_text())["dependencies"]:
        assert f"{name} {locked[f'node_modules/{name}']['version']} (" in told
    assert all(word in told for word in ("MIT", "BSD-3-Clause", "Apache"))


def test_every_sampling_parameter_is_offered() -> None:
    parameters = json.loads((SOURCES / "src" / "parameters.json").read_text())
    names = {parameter["name"] for parameter in parameters}
    assert len(names) == len(parameters)
    assert names <= ChatRequest.model_fields.keys()
    completions = names - {"reasoning_effort", "enable_thinking"}
    assert completions <= CompletionRequest.model_fields.keys()
    ours = {one.name for one in fields(SamplingParams)}
    assert ours & {*ChatRequest.model_fields} - ELSEWHERE <= names
    assert all(parameter["help"].endswith((".", "}.")) for parameter in parameters)
