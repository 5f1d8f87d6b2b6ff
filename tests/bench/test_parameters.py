"""Combinations of flags, and commands with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmjax.bench.parameters import Parameters, path_name, read_parameters
from llmjax.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "values", "expected"),
    [
        ("serve m", {"max_num_seqs": 4}, "serve m --max-num-seqs 4"),
        ("serve m --max-num-seqs 2 -x", {"max_num_seqs": 4}, "serve m --max-num-seqs 4 -x"),
        ("serve m --max_num_seqs=2 -x", {"max-num-seqs": 4}, "serve m --max-num-seqs 4 -x"),
        ("serve m", {"enforce_eager": True}, "serve m --enforce-eager"),
        ("serve m --enforce-eager --port 1", {"enforce_eager": False}, "serve m --no-enforce-eager --port 1"),
        ("serve m --no-enforce-eager --port 1", {"enforce_eager": True}, "serve m --enforce-eager --port 1"),
        ("serve m", {"hf_overrides": {"a": [1]}}, 'serve m --hf-overrides {"a":[1]}'),
        ("serve m", {"spec_config.num_tokens": 3}, "serve m --spec-config.num_tokens 3"),
        ("serve m --a-b 1 --a 2", {"a": 3, "c": "x"}, "serve m --a-b 1 --a 3 --c x"),
        ("serve m", {"x.y": True}, "serve m --x.y true"),
    ],
)
def test_flags_take_the_place_of_those_that_are_there(command: str, values: dict[str, Any], expected: str) -> None:
    found = Parameters(values).applied(command.split())
    assert [word.replace(" ", "") for word in found] == expected.split()


def test_files_of_combinations(tmp_path: Path) -> None:
    path = tmp_path / "params.json"
    path.write_text(json.dumps([{"a": 1, "b_c": "x"}, {"_benchmark_name": "named", "a": 2}]))
    one, two = read_parameters(str(path))
    assert (one.name, two.name) == ("a=1-b_c=x", "named")
    assert (one.get("b-c"), two.get("b-c"), dict(two.values)) == ("x", None, {"a": 2})
    path.write_text(json.dumps({"small": {"a": 1}, "large": {"a": 1}}))
    assert [parameters.name for parameters in read_parameters(str(path))] == ["small", "large"]
    assert [dict(parameters.values) for parameters in read_parameters(None)] == [{}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "expected a list of objects"),
        ("[1]", "expected a list of objects"),
        ('{"a": 1}', "expected a list of objects"),
        ('[{"a": 1}, {"a": 1}]', "two combinations are called a=1"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "params.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_parameters(str(path))


def test_names_of_paths_stay_apart() -> None:
    names = ["a=1", "a/1", "a_1", "a" * 200, "a" * 201, "..", "x"]
    assert len({path_name(name) for name in names}) == len(names)
    assert path_name("a=1-b=0.5") == "a=1-b=0.5"
    assert all("/" not in path_name(name) and len(path_name(name)) < 140 for name in names)
