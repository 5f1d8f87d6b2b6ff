"""Model repositories on Hugging Face and ModelScope, through their own client libraries."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import huggingface_hub
from huggingface_hub import constants as hf_constants
from huggingface_hub import errors as hf_errors
from huggingface_hub import utils as hf_utils

from llmjax.checkpoint.download import write_error
from llmjax.checkpoint.gguf.choice import choose_gguf, gguf_patterns, names_projector, relative_ggufs
from llmjax.checkpoint.hub_cache import cached_commit
from llmjax.errors import CheckpointError

WEIGHTS = "*.safetensors"
LAYOUT = ["*.json", WEIGHTS, "*.jinja", "*.model", "*.tiktoken", "vocab.txt", "merges.txt"]
# Copies of the weights in other layouts, which would double the download. Folders of sentence-transformers' modules
# begin with a number, and that of Phi-4-multimodal's adapter with "vision-".
CONSOLIDATED = "consolidated*"
COPIES = ["[!0-9v]*/*", "v[!i]*/*", "vi[!s]*/*", "vision[!-]*/*", CONSOLIDATED]
# An encoder of pictures is fetched in one type, which nearly all repositories that have encoders have.
PROJECTOR = ["*mmproj*[fF]16.gguf"]
PROJECTORS = ["*mmproj*[bB][fF]16.gguf", "*mmproj*[fF]32.gguf", "*mmproj*[qQ][1-8]_*.gguf"]

# The hub's HTTP library has changed over its versions; its errors' base class is always a base of this one.
_HTTP_ERRORS = cast(tuple[type[Exception], ...], hf_errors.HfHubHTTPError.__bases__)
_HF_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    hf_errors.EntryNotFoundError,
    hf_errors.HFValidationError,
    *_HTTP_ERRORS,
)


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Settings for a hub, with the names in EngineConfig. ``endpoint`` None: the default of the hub's library;
    ``weights`` False: files of weights are left out."""

    revision: str | None = None
    token: str | None = None
    cache_dir: str | None = None
    offline: bool = False
    progress: bool = True
    weights: bool = True
    endpoint: str | None = None


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository on Hugging Face; ``sha256`` is known of large ones."""

    name: str
    num_bytes: int
    sha256: str | None


def remote_files(repo: str, options: HubOptions) -> list[RemoteFile]:
    """The files of a repository; raises CheckpointError if they cannot be listed."""
    api = huggingface_hub.HfApi(endpoint=options.endpoint, token=options.token)
    try:
        found = list(api.list_repo_tree(repo, revision=options.revision, recursive=True))
    except _HF_ERRORS as error:
        raise _hf_error(error, repo, options) from None
    files = [each for each in found if isinstance(each, huggingface_hub.RepoFile)]
    return [RemoteFile(each.path, each.size, None if each.lfs is None else each.lfs.sha256) for each in files]


def wanted_files(gguf_file: str | None) -> tuple[list[str], list[str]]:
    """Globs of what is fetched of a repository, and of what is left out of that."""
    return (LAYOUT, COPIES) if gguf_file is None else _with_projector(gguf_file)


def from_hugging_face(repo: str, gguf_file: str | None, options: HubOptions) -> Path:
    """The snapshot folder of ``repo``, or its GGUF file if that is named or the only content.

    HF_HUB_OFFLINE and the library's other variables count, as everywhere that it is used.

    Raises:
        CheckpointError: the repository, revision or file does not exist, is gated, or cannot be reached.
    """

    offline = options.offline or hf_constants.HF_HUB_OFFLINE
    options = replace(options, offline=offline)

    def snapshot(patterns: list[str], ignored: list[str]) -> Path:
        try:
            return snapshot_of(options.revision, patterns, ignored)
        except hf_errors.LocalEntryNotFoundError:
            commit = cached_commit(_cache(options), repo, options.revision)
            if commit is None:
                raise
            return snapshot_of(commit, patterns, ignored)

    def snapshot_of(revision: str | None, patterns: list[str], ignored: list[str]) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                token=options.token,
                cache_dir=options.cache_dir,
                local_files_only=options.offline,
                allow_patterns=patterns,
                ignore_patterns=ignored,
                endpoint=options.endpoint,
            )
        )

    def listing() -> list[str]:
        api = huggingface_hub.HfApi(endpoint=options.endpoint, token=options.token)
        return api.list_repo_files(repo, revision=options.revision)

    try:
        with _progress_bars(options.progress):
            if gguf_file is None:
                folder = snapshot(LAYOUT, COPIES if options.weights else [*COPIES, WEIGHTS])
                if options.offline or not options.weights or any(folder.glob("*.safetensors")):
                    return folder
                names = listing()
                if "params.json" in names and "config.json" not in names:  # Mistral's own layout
                    return snapshot(LAYOUT, [name for name in COPIES if name != CONSOLIDATED])
                if not any(name.lower().endswith(".gguf") for name in names):
                    return folder
                gguf_file = choose_gguf(names, None, where=repo)
            folder = snapshot(*_with_projector(gguf_file))
            models = [name for name in relative_ggufs(folder) if not names_projector(name)]
            if not options.offline and not models and not names_projector(gguf_file):
                choose_gguf(listing(), gguf_file, where=repo)  # says what there is instead
            return folder / choose_gguf(relative_ggufs(folder), gguf_file, where=repo)
    except _HF_ERRORS as error:
        raise _hf_error(error, repo, options) from None


def from_modelscope(repo: str, gguf_file: str | None, options: HubOptions) -> Path:
    """The same as ``from_hugging_face`` for ModelScope; a repository of GGUF files needs ``gguf_file``.

    Raises:
        CheckpointError: the ``modelscope`` package is missing, or the download failed.
    """
    try:
        from modelscope.hub import errors as modelscope_errors
        from modelscope.hub.snapshot_download import snapshot_download
    except ImportError:
        raise CheckpointError(
            f"modelscope://{repo} needs the modelscope package", hint="pip install 'llmjax[modelscope]'"
        ) from None
    allowed, ignored = wanted_files(gguf_file)
    # Versions before the common base class end most failures in NotExistError or in one of requests' (an OSError).
    hub_error = getattr(modelscope_errors, "HubError", modelscope_errors.NotExistError)
    try:
        folder = Path(
            snapshot_download(
                repo,
                revision=options.revision,
                cache_dir=options.cache_dir,
                local_files_only=options.offline,
                allow_file_pattern=allowed,
                ignore_file_pattern=ignored or None,
            )
        )
    except (hub_error, OSError, ValueError) as error:
        raise CheckpointError(f"modelscope://{repo} cannot be fetched: {_first_line(error)}") from None
    if gguf_file is None:
        return folder
    return folder / choose_gguf(relative_ggufs(folder), gguf_file, where=f"modelscope://{repo}")


def _hf_error(error: Exception, repo: str, options: HubOptions) -> CheckpointError:
    at = f"{repo} at revision {options.revision}" if options.revision else repo
    if isinstance(error, hf_errors.GatedRepoError):
        return CheckpointError(
            f"{repo} is gated", hint="accept its terms on the hub, then give hf_token or run 'hf auth login'"
        )
    if isinstance(error, hf_errors.RevisionNotFoundError):
        return CheckpointError(
            f"{repo} has no revision {options.revision!r} on Hugging Face",
            hint="leave out revision, or give a branch, tag or commit that the repository's page lists",
        )
    if isinstance(error, hf_errors.RepositoryNotFoundError):
        return CheckpointError(
            f"{repo} is not on Hugging Face, or is private and hf_token does not open it",
            hint="check the name's spelling; for a private one give hf_token or run 'hf auth login'",
        )
    if isinstance(error, hf_errors.LocalEntryNotFoundError | hf_errors.OfflineModeIsEnabled):
        answer = getattr(error.__cause__, "response", None)
        if answer is not None:  # the library says of any answer that the file is not in its cache
            return CheckpointError(_answered(answer.status_code, at))
        why = "offline mode forbids to download it" if options.offline else _first_line(error)
        hint = "leave out offline, or fetch it first: llmjax pull" if options.offline else ""
        return CheckpointError(f"{at} is not in the local Hugging Face cache: {why}", hint=hint)
    if isinstance(error, OSError) and error.errno is not None:
        return write_error(error, _cache(options), 0)
    return CheckpointError(f"{at} cannot be fetched from Hugging Face: {_first_line(error)}")


def _answered(status: int, at: str) -> str:
    """The message about an answer of the hub that is not a file, with what to do."""
    said = f"{at} cannot be fetched: Hugging Face answered {status}"
    if status == 429:
        return f"{said} (too many requests): try again in some minutes, or give hf_token, which is allowed more"
    if status >= 500:
        return f"{said}, a failure on its side: try again later, or give offline if the model was fetched before"
    if status in (401, 403):
        return f"{said}: check hf_token, or run 'hf auth login'"
    return f"{said}: check the model's name and the revision"


def _cache(options: HubOptions) -> Path:
    return Path(options.cache_dir or hf_constants.HF_HUB_CACHE)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _with_projector(gguf_file: str) -> tuple[list[str], list[str]]:
    """The globs of a file and of the encoder that may be beside it, and those of encoders in other types."""
    patterns = gguf_patterns(gguf_file)
    return (patterns, []) if names_projector(gguf_file) else ([*patterns, *PROJECTOR], PROJECTORS)


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """The hub's bars can only be switched for the whole process; put back as they were."""
    if shown or hf_utils.are_progress_bars_disabled():
        yield
        return
    hf_utils.disable_progress_bars()
    try:
        yield
    finally:
        hf_utils.enable_progress_bars()
