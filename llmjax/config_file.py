"""YAML settings files: finding them, reading them strictly, and laying flags over them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from llmjax.config import EngineConfig, ServerConfig
from llmjax.errors import ConfigError
from llmjax.migration.tables import collect_known
from llmjax.settings import nearest, settings_of
from llmjax.text_file import read_text


@dataclass(frozen=True)
class Configs:
    """The settings of a process."""

    engine: EngineConfig
    server: ServerConfig


def load_configs(
    config: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Configs:
    """Defaults, then the file's values, then the overrides, then what follows from them.

    Args:
        config: a YAML file, or the name of a bundled one (``qwen3``); None: no file.
        overrides: checked values by field name, from flags.
        derived: gives further values for those that are given.

    Raises:
        ConfigError: the file is missing or malformed, or a key or value in it is wrong.
    """
    engine, server = settings_of(EngineConfig), settings_of(ServerConfig)
    values: dict[str, Any] = {}
    if config is not None:
        path = find_config(config)
        values, notes = collect_known({**engine, **server}, read_yaml(path), source=str(path))
        for note in notes:
            print(f"llmjax: note: {note}", file=sys.stderr)
    values |= overrides or {}
    if derived is not None:
        values |= derived(values)
    return Configs(
        engine=EngineConfig(**{name: values[name] for name in engine if name in values}),
        server=ServerConfig(**{name: values[name] for name in server if name in values}),
    )


def find_config(name: str) -> Path:
    """The settings file of that path, or the bundled one of that name.

    Raises:
        ConfigError: there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    bundled = bundled_configs()
    if name not in bundled:
        near = nearest(name, bundled)
        hint = (
            "" if near else f"{len(bundled)} are bundled, such as smollm2, qwen3 and llama3 (docs/supported-models.md)"
        )
        raise ConfigError(f"--config: no file {name!r}, and no bundled config of that name{near}", hint=hint)
    return bundled[name]


def bundled_configs() -> dict[str, Path]:
    """The settings files that come with llmjax, by name."""
    return {path.stem: path for folder in _bundled_folders() for path in sorted(folder.glob("*.yaml"))}


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping.

    Raises:
        ConfigError: the file cannot be read, is not a YAML mapping, or has a key twice.
    """
    try:
        content = yaml.load(read_text(path), Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date, for example
        raise ConfigError(f"{path}: is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: settings must be a mapping of keys to values, not {type(content).__name__}")
    return content


def _bundled_folders() -> Sequence[Path]:
    package = Path(__file__).parent
    checkout = package.parent if (package.parent / "pyproject.toml").is_file() else package
    return [folder for folder in (checkout / "configs", package / "configs") if folder.is_dir()]


class _StrictLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys; a setting given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"key {key.value!r} is there twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)
