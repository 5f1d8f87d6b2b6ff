"""A cache of compiled programs on disk, keyed by all that decides them: a later start neither traces nor lowers them.

A program has two names. Its signature is a digest of what it is made from, which is known before anything is traced; it
leads to the digest of the lowered program, which is the name of the compiled one. So a new version of this package
traces once more, and compiles only programs that have changed. JAX's own cache knows only lowered programs, and is not
used.

A program is code that runs with the rights of its user, so a file is read only if no other user can have written it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax._src import config  # a setting for one thread is made nowhere else
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding, PartitionSpec

from llmjax.engine.loading.kept_files import Damaged, check_owner, line
from llmjax.engine.programs.signature import SourcesChanged, digest, environment_digest, sources_digest
from llmjax.kernels.choices import Choices, choosing
from llmjax.kernels.devices import OWN_KERNELS, platform_of
from llmjax.kernels.loops import bounded_loops
from llmjax.kernels.registry import traced_for
from llmjax.kernels.sharding import Sharding

logger = logging.getLogger(__name__)

Executable = Callable[..., Any]
T = TypeVar("T")

MAGIC = b"llmjax program 1\n"
HEADER_BYTES = len(MAGIC) + 2 * hashlib.sha256().digest_size
FOLDER = "programs"
KEPT_APART = "kept_apart"  # what JAX calls these programs
ENVIRONMENTS = 8  # folders that are kept: for machines that share a disk, and for earlier versions


@dataclass(frozen=True, kw_only=True)
class ProgramSpec:
    """The specification of a program: everything that it is compiled from.

    Attributes:
        function: a function at the top level of a module.
        arguments: pytrees of ``jax.ShapeDtypeStruct``s, one for each of its positional arguments.
        device: where it runs.
        static: its keyword arguments.
        donated: positions of arguments whose memory the results take.
        options: XLA's compiler options.
        sharding: where several devices run it, each with its part of the arguments; these then say where they lie, or
            are the same everywhere.
        results: how the results of such a program are divided: a prefix of their tree with PartitionSpecs as leaves.
        choices: which methods compute its products.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    device: jax.Device
    static: Mapping[str, Any] = field(default_factory=dict)
    donated: tuple[int, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    sharding: Sharding | None = None
    results: Any = field(default_factory=PartitionSpec)
    choices: Choices = field(default_factory=Choices)

    @property
    def devices(self) -> list[jax.Device]:
        """All devices that run it."""
        return [self.device] if self.sharding is None else self.sharding.mesh.devices.ravel().tolist()

    def lower(self, name: str) -> Any:
        """Traces and lowers it, under the name that JAX's cache gives it."""

        def program(*arguments: Any) -> Any:
            return self.function(*arguments, **self.static)

        if self.sharding is not None:
            parts = jax.tree.map(_spec_of, self.arguments)
            program = self.sharding.program(program, arguments=parts, results=self.results)
        program.__name__ = name
        platform = platform_of(self.device)
        # Kernels look at the default device while they are lowered (`llmjax.kernels.cuda.tuned`).
        with (
            jax.default_device(self.device),
            bounded_loops(platform not in OWN_KERNELS),
            traced_for(platform),
            choosing(self.choices),
        ):
            # What is lowered says all of a program only if it takes all arguments, used or not.
            traced = jax.jit(program, donate_argnums=self.donated, keep_unused=True).trace(*self.arguments)
            return traced.lower(lowering_platforms=(platform,))


def _spec_of(shape: jax.ShapeDtypeStruct) -> PartitionSpec:
    return shape.sharding.spec if isinstance(shape.sharding, NamedSharding) else PartitionSpec()


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


class ProgramCache:
    """The programs of one device and one state of everything else that decides them; may be used by several threads and
    processes.

    Args:
        folder: folder of the programs; None: nothing is kept.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._warned = False
        self._digests: dict[int, tuple[Any, str]] = {}  # by id of a value that many programs share
        # Tracing and lowering are Python: many at once would take turns at the interpreter, and all end last.
        self._lowering = threading.Lock()

    @classmethod
    def of(cls, directory: Path | None, device: jax.Device) -> ProgramCache:
        """The cache beside JAX's (None: nothing is kept).

        Only programs with kernels of this package are kept: elsewhere JAX's own cache has to do.
        """
        if directory is None or platform_of(device) not in OWN_KERNELS:
            return cls()
        folder = directory / FOLDER / digest(MAGIC, KEPT_APART, environment_digest(device))
        with contextlib.suppress(OSError):
            os.utime(folder)  # shows that the folder is in use
        return cls(folder)

    @property
    def folder(self) -> Path | None:
        """The folder of the programs, named by the environment."""
        return self._folder

    def signature(self, spec: ProgramSpec) -> str | None:
        """A digest of the specification and of the sources.

        Returns:
            64 hexadecimal digits; None: it is made of something whose definition is not known, or nothing is kept.
        """
        if self._folder is None:
            return None
        try:
            arguments = [self._digest(argument) for argument in spec.arguments]
            static = {name: self._digest(value) for name, value in spec.static.items()}
            placed = None if spec.sharding is None else (spec.sharding, jax.tree.leaves(spec.results, is_leaf=_is_spec))
            return digest(
                sources_digest(), spec.function, arguments, static, spec.donated, spec.options, placed, spec.choices
            )
        except (TypeError, SourcesChanged, OSError) as why:
            logger.debug("a program is traced at every start: %s", why)
            return None

    def _digest(self, value: Any) -> str:
        known = self._digests.get(id(value))
        if known is None:
            known = self._digests[id(value)] = (value, digest(value))  # kept, so that no other value gets its id
        return known[1]

    def kept(self, parts: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Returns what ``make`` has made in this start or one before.

        Args:
            parts: all that decides the value besides the sources, as ``digest`` takes it; first what the value is.
            make: makes a value that can be pickled.
        """
        try:
            name = None if self._folder is None else digest(sources_digest(), *parts)
        except (TypeError, SourcesChanged, OSError) as why:
            logger.debug("%s is made at every start: %s", parts[0], why)
            name = None
        if name is None:
            return make()
        if (content := self._content(name)) is not None:
            try:
                found: T = pickle.loads(content)
                return found
            except Exception as error:  # a pickle may raise anything
                self._refuse(name, error)
        made = make()
        self._write(name, lambda: pickle.dumps(made))
        return made

    def found_of(self, specs: Callable[[], Iterable[ProgramSpec]], what: str, make: Callable[[], T]) -> T:
        """Returns what ``make`` has found out about programs, in this start or one before.

        Args:
            specs: returns the programs' specifications; not called if nothing is kept.
            what: name of what ``make`` finds out.
            make: makes a value that can be pickled; errors that it raises are not kept.
        """
        signatures = [] if self._folder is None else [self.signature(spec) for spec in specs()]
        return make() if not signatures or None in signatures else self.kept((what, signatures), make)

    def has(self, spec: ProgramSpec) -> bool:
        """Whether the program needs only to be read, as far as can be said without reading it."""
        signature = self.signature(spec)
        return self._folder is not None and signature is not None and (self._folder / signature).exists()

    def get(self, spec: ProgramSpec) -> Executable:
        """The program; it is compiled if it is not kept.

        Raises whatever compiling it raises.
        """
        signature = self.signature(spec)
        if signature is not None and (found := self._find(signature, spec)) is not None:
            return found
        with self._lowering:
            lowered = spec.lower(spec.function.__name__ if self._folder is None else KEPT_APART)
        if self._folder is None:
            program: Executable = lowered.compile(compiler_options=dict(spec.options))
            return program
        name = digest(lowered.as_text(), str(lowered.args_info), str(lowered.out_tree), spec.options)
        kept = self._read(name, spec, lowered.out_tree)
        if kept is None:
            kept, compiled = _compile_apart(lowered, spec)
            if not compiled:
                return kept
            self._write(name, lambda: serialize_executable.serialize(kept)[0])
        if signature is not None:
            # A tree's structure cannot be pickled, a tree of numbers can.
            skeleton = jax.tree.unflatten(lowered.out_tree, range(lowered.out_tree.num_leaves))
            self._write(signature, lambda: pickle.dumps((name, skeleton)))
        return kept

    def _find(self, signature: str, spec: ProgramSpec) -> Executable | None:
        """The program that a signature leads to."""
        content = self._content(signature)
        if content is None:
            return None
        try:
            name, skeleton = pickle.loads(content)
            out_tree = jax.tree.structure(skeleton)
        except Exception as error:  # a pickle may raise anything
            self._refuse(signature, error)
            return None
        return self._read(name, spec, out_tree)

    def _read(self, name: str, spec: ProgramSpec, out_tree: Any) -> Executable | None:
        code = self._content(name)
        if code is None:
            return None
        try:
            return serialize_executable.deserialize_and_load(
                code,
                jax.tree.structure((spec.arguments, {})),
                out_tree,
                backend=spec.device.client,
                execution_devices=spec.devices,
            )
        except Exception as error:  # whatever is wrong with it, the program can be compiled again
            self._refuse(name, error)
            return None

    def _content(self, name: str) -> bytes | None:
        """The content of a file; None: there is none, or not a sound one."""
        assert self._folder is not None
        try:
            return _checked_content(self._folder / name)
        except FileNotFoundError:
            return None
        except (OSError, Damaged) as error:
            self._refuse(name, error)
            return None

    def _write(self, name: str, content: Callable[[], bytes]) -> None:
        assert self._folder is not None
        try:
            _make_folder(self._folder)
            payload = content()
            _replace(self._folder / name, _header(name, payload) + payload)
        except OSError as error:  # a folder that cannot be written was reported when the cache was set up
            logger.debug("%s is not kept: %s", name, error)
        except Exception as error:
            self._warn(f"a program is not kept: {line(error)}")

    def _refuse(self, name: str, error: Exception) -> None:
        self._warn(f"{self._folder}/{name} is not used, and what it held is made again: {line(error)}")

    def _warn(self, message: str) -> None:
        """Logs a warning once: what is wrong with one file is wrong with others too."""
        logger.log(logging.DEBUG if self._warned else logging.WARNING, message)
        self._warned = True


def _compile_apart(lowered: Any, spec: ProgramSpec) -> tuple[Any, bool]:
    """Compiles without JAX's cache.

    A program that was read from there cannot be written once more: jaxlib 0.10 writes it without its functions. None of
    these should be there: no others are called KEPT_APART, and what takes less than forever to compile is not kept.

    Returns:
        The program, and whether it was compiled; else JAX has read it all the same.
    """
    thread, read = threading.get_ident(), []

    def listen(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == thread:
            read.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        with config.persistent_cache_min_compile_time_secs(math.inf):
            return lowered.compile(compiler_options=dict(spec.options)), not read
    finally:
        jax.monitoring.unregister_event_listener(listen)


def _checked_content(path: Path) -> bytes:
    """The content of a file after its header.

    Raises:
        Damaged: it is not whole, not of this name, or somebody else's.
    """
    with path.open("rb") as file:
        check_owner(os.fstat(file.fileno()))
        content = file.read()
    payload = content[HEADER_BYTES:]
    if content[:HEADER_BYTES] != _header(path.name, payload):
        raise Damaged("it is cut short, damaged or another program's")
    return payload


def _header(name: str, payload: bytes) -> bytes:
    return MAGIC + bytes.fromhex(name) + hashlib.sha256(payload).digest()


def _make_folder(folder: Path) -> None:
    """Makes the folder, and room for it."""
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted((path for path in folder.parent.iterdir() if path != folder), key=_last_use, reverse=True)
    for path in others[ENVIRONMENTS - 1 :]:
        shutil.rmtree(path, ignore_errors=True)


def _last_use(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:  # another process has removed it
        return 0.0


def _replace(path: Path, content: bytes) -> None:
    """Writes a file so that other processes see all of it or nothing."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write(content)
            file.close()
            os.chmod(file.name, 0o644)  # a cache may be made by one user and read by others
            os.replace(file.name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name)
            raise
