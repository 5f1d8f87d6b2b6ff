"""YAML settings files: finding them, reading them strictly, and laying flags over them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from llmjax.config import ANY_NAME, OF_EACH_MODEL, OF_ONE_MODEL, EngineConfig, ModelSettings, ServerConfig
from llmjax.errors import ConfigError
from llmjax.migration.tables import collect_known
from llmjax.settings import Setting, nearest, settings_of
from llmjax.text_file import read_text

MODELS = "models"  # the key of several


@cache
def _settings() -> Mapping[str, Setting]:
    """All settings that a file may have."""
    classes = (EngineConfig, ServerConfig, ModelSettings)
    return MappingProxyType({name: one for cls in classes for name, one in settings_of(cls).items()})


@dataclass(frozen=True)
class ServedModel:
    """One of several models of a server.

    Args:
        name: what the API calls it.
        engine: all settings of its engine, with its names.
        server: those of the server, with its own where it has some.
    """

    name: str
    engine: EngineConfig
    server: ServerConfig
    settings: ModelSettings


@dataclass(frozen=True)
class Configs:
    """The settings of a process.

    Args:
        engine: those of the engine; of a server with several models, what all have in common.
        models: the models of a server whose models come and go, perhaps none; None: ``engine`` has the only one.
        manners: how models of such a server are treated that have no settings of their own.
    """

    engine: EngineConfig
    server: ServerConfig
    models: tuple[ServedModel, ...] | None = None
    manners: ModelSettings = field(default_factory=ModelSettings)


def load_configs(
    config: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    models: Sequence[str] = (),
    derived: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> Configs:
    """Defaults, then the file's values, then the overrides, then what follows from them.

    Args:
        config: a YAML file, or the name of a bundled one (``qwen3``); None: no file.
        overrides: checked values by field name, from flags.
        models: models from flags, where there is more than one.
        derived: gives further values for those that are given.

    Raises:
        ConfigError: the file is missing or malformed, or a key or value in it is wrong.
    """
    values: dict[str, Any] = {}
    sections: list[tuple[str, dict[str, Any]]] = []
    if config is not None:
        path = find_config(config)
        content = read_yaml(path)
        if MODELS in content:
            sections = sections_of(content.pop(MODELS), source=f"{path}: {MODELS}")
        values = _collected(_settings(), content, source=str(path))
    given = dict(overrides or {})
    if len(models) > 1:
        sections = [(f"--model {model}", {"model": model}) for model in models]
        given.pop("model", None)
    whole = values | given
    if derived is not None:
        whole |= derived(whole)
    alone = {name: value for name, value in whole.items() if name not in settings_of(ModelSettings)}
    if not sections:
        if whole.keys() == alone.keys():
            return _configs(alone)
        if whole.get("load") == "demand" and not whole.keys() & {"model", "gguf_file"}:
            _check_common(alone)  # of models that have been pulled, or will be
        else:
            sections = [("the model", {})]  # one that comes and goes
    elif "model" in whole or (len(sections) > 1 and "served_model_name" in whole):
        name = "model" if "model" in whole else "served_model_name"
        raise ConfigError(f"{name} is given beside {MODELS}: each of the models has its own")
    served = tuple(_served(own, values, given, source) for source, own in sections)
    _check_names(served)
    manners = ModelSettings(**{name: value for name, value in whole.items() if name not in alone})
    return replace(_configs(alone), models=served, manners=manners)


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


def sections_of(content: Any, *, source: str) -> list[tuple[str, dict[str, Any]]]:
    """The settings of each of several models, and what errors call it.

    Args:
        content: a list of mappings, or a mapping from names; a text is a model without further settings.

    Raises:
        ConfigError: it is neither, or empty.
    """
    named = content if isinstance(content, dict) else dict(enumerate(content)) if isinstance(content, list) else {}
    if not named:
        raise ConfigError(f"{source} must be a list of models, each with its settings, or a mapping from their names")
    found = []
    for key, own in named.items():
        where = f"{source}: {key if isinstance(content, dict) else f'number {key + 1}'}"
        settings = {"model": own} if isinstance(own, str) else own
        if not isinstance(settings, dict) or not isinstance(key, str | int):
            raise ConfigError(f"{where} must be a mapping of settings, or a text that names a model, not {own!r}")
        if isinstance(content, dict):
            settings = {"served_model_name": str(key), **settings}
        found.append((where, settings))
    return found


def _served(own: Mapping[str, Any], top: Mapping[str, Any], flags: Mapping[str, Any], source: str) -> ServedModel:
    """One of several models: its own settings win over those at the top of the file, and flags over all."""
    server = settings_of(ServerConfig)
    known = {name: one for name, one in _settings().items() if name not in server or name in OF_EACH_MODEL}
    for key in own:
        name = key.replace("-", "_") if isinstance(key, str) else ""
        if name in server and name not in known:
            raise ConfigError(f"{source}: {key} belongs to the whole server: it stands at the top of the file")
    values = {**top, **_collected(known, own, source=source), **flags}
    configs = _configs({name: value for name, value in values.items() if name not in settings_of(ModelSettings)})
    if reason := _alone(configs.engine):
        raise ConfigError(f"{source}: {reason}")
    if configs.engine.served_names:
        name = configs.engine.served_names[0]
        engine = configs.engine
    else:
        name = name_of(configs.engine)
        names = (name, ANY_NAME) if configs.engine.any_name else name
        engine = configs.engine.replace(served_model_name=names)
    of_model = {name: values[name] for name in settings_of(ModelSettings) if name in values}
    return ServedModel(name, engine.replace(engine_process="process"), configs.server, ModelSettings(**of_model))


def _alone(config: EngineConfig) -> str:
    """Why an engine cannot be one of several; empty: it can."""
    for name, value in (("data_parallel_size", config.data_parallel_size), ("nnodes", config.nnodes)):
        if value > 1:
            return f"{name} {value} is not supported for one of several models: serve it alone"
    if config.is_staged or config.multi_process:
        return "a model that several processes compute cannot be one of several models: serve it alone"
    if config.engine_process not in ("auto", "process"):
        return f"engine_process {config.engine_process}: each of several models has a process of its own"
    return ""


def name_of(config: EngineConfig) -> str:
    """What the API calls a model that was given no name: a file or folder is known by its name, anything else as the
    user named it."""
    path = Path(config.model.partition("#")[0].strip()).expanduser()  # without the digest of a package's file
    if path.suffix == ".gguf":
        return path.stem
    return path.resolve().name if path.exists() else config.model


def _collected(settings: Mapping[str, Setting], content: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """The values of a mapping, some of which may have names of other programs."""
    values, notes = collect_known(settings, content, source=source)
    for note in notes:
        print(f"llmjax: note: {note}", file=sys.stderr)
    return values


def _configs(values: Mapping[str, Any]) -> Configs:
    engine, server = settings_of(EngineConfig), settings_of(ServerConfig)
    return Configs(
        engine=EngineConfig(**{name: values[name] for name in engine if name in values}),
        server=ServerConfig(**{name: values[name] for name in server if name in values}),
    )


def _check_common(values: Mapping[str, Any]) -> None:
    """Raises ConfigError where settings are of one model and none is named, or not for one of several."""
    if of_one := sorted(values.keys() & {*OF_ONE_MODEL, "served_model_name"}):
        raise ConfigError(
            f"{of_one[0]} is a setting of one model, and none is named",
            hint="load: demand without a model serves those that are pulled",
        )
    if reason := _alone(_configs(values).engine):
        raise ConfigError(reason)


def _check_names(models: Sequence[ServedModel]) -> None:
    """Raises ConfigError where two models have one name."""
    seen: set[str] = set()
    for model in models:
        for name in model.engine.served_names:
            if name in seen:
                raise ConfigError(
                    f"two of the models are called {name!r}", hint="give one of them another served_model_name"
                )
            seen.add(name)
    if sum(model.engine.any_name for model in models) > 1:
        raise ConfigError(f"served_model_name {ANY_NAME!r}: only one of several models can take any name")


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
