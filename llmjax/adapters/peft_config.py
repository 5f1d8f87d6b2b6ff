"""adapter_config.json: the keys that change what an adapter computes; those that are not understood are refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from llmjax.checkpoint.files import ADAPTER, read_object
from llmjax.errors import CheckpointError

NEUTRAL = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",  # how the base stores its weights; adapters are [rank, in] and [out, rank] all the same
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
        "velora_config",
    }
)
"""Keys of training, or of what is among the tensors, which say it themselves."""
CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga", "eva", "mica")
"""What ``init_lora_weights`` begins with where training began with another base."""
REFUSED = MappingProxyType(
    {
        "alora_invocation_tokens": "the adapter acts only after certain tokens (aLoRA)",
        "arrow_config": "adapters are routed (Arrow)",
        "kasa_config": "another form of update (KaSA)",
        "layer_replication": "layers are repeated",
        "megatron_config": "layers of Megatron",
        "monteclora_config": "adapters are sampled (MonteCLoRA)",
        "use_bdlora": "the matrices are block-diagonal (BD-LoRA)",
        "use_qalora": "inputs are averaged in groups (QA-LoRA)",
    }
)
"""Keys of methods that are not supported."""
BIASES = ("none", "all", "lora_only")


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """What an adapter_config.json says.

    Attributes:
        path: the file, for messages.
        rank, alpha: numbers of modules without an entry of their own.
        ranks, alphas: by pattern of a module's name; the first that matches counts.
        by_root: whether the scale is alpha / sqrt(rank), and not alpha / rank (rsLoRA).
        token_rows: numbers of the rows that token adapters hold, by the end of the module's name; without one, they are
            of the embedding.
        ties: whether modules that are tied to adapted or saved ones are among the tensors as well.
        dora, lora_bias: whether there are magnitudes, and biases of ``b``.
        saved: ends of names of modules of which whole matrices are stored.
        biases: whether biases of the base are replaced.
    """

    path: Path
    rank: int
    alpha: float
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    by_root: bool = False
    token_rows: Mapping[str, Sequence[int]] = field(default_factory=dict)
    ties: bool = False
    dora: bool = False
    lora_bias: bool = False
    saved: Sequence[str] = ()
    biases: bool = False

    @classmethod
    def read(cls, folder: Path) -> PeftConfig:
        """Reads the configuration in a PEFT folder.

        Raises:
            CheckpointError: it is missing or malformed, or has a key that is not understood or supported.
        """
        path = folder / ADAPTER
        keys = _Keys(read_object(path), path)
        if (kind := keys.get("peft_type", "LORA")) != "LORA":
            keys.fail("peft_type", f"is {kind!r}; adapters are supported that are LORA")
        for name, meaning in REFUSED.items():
            if keys.get(name, None) not in (None, False, [], {}):
                keys.fail(
                    name, f"is set, which is not supported: {meaning}; merge the adapter into its model with PEFT"
                )
        initial = keys.get("init_lora_weights", True)
        if isinstance(initial, str) and initial.startswith(CHANGED_BASES):
            keys.fail(
                "init_lora_weights",
                f"is {initial!r}: the adapter is for a base that its training has changed; save it once more with "
                "path_initial_model_for_weight_conversion",
            )
        if (bias := keys.get("bias", "none")) not in BIASES:
            keys.fail("bias", f"is {bias!r}, not one of {', '.join(BIASES)}")
        config = cls(
            path=path,
            rank=keys.whole("r", 8),
            alpha=keys.number("lora_alpha", 8),
            ranks=keys.table("rank_pattern", keys.whole),
            alphas=keys.table("alpha_pattern", keys.number),
            by_root=keys.switch("use_rslora"),
            token_rows=keys.rows("trainable_token_indices"),
            ties=keys.switch("ensure_weight_tying"),
            dora=keys.switch("use_dora"),
            lora_bias=keys.switch("lora_bias"),
            saved=keys.names("modules_to_save"),
            biases=bias != "none",
        )
        keys.refuse_unread()
        return config

    @classmethod
    def of(cls, content: Any, path: Path, *, key: str) -> PeftConfig:
        """The configuration of an adapter among a model's tensors, in the model's own (Phi-4-multimodal).

        Args:
            content: the value of a key of config.json.
            path: the path of config.json, for messages.
            key: the key.

        Raises:
            CheckpointError: it is malformed, or has a key that is not understood.
        """
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{path}: {key} must be an object, by which an adapter among the tensors is read")
        # Of training: dropout, and a pattern of names, which the tensors have.
        keys = _Keys({name: value for name, value in content.items() if name not in ("dp", "layer")}, path)
        config = cls(path=path, rank=keys.whole("r"), alpha=keys.number("lora_alpha"))
        keys.refuse_unread()
        return config

    @property
    def most_rank(self) -> int:
        """The largest rank."""
        return max(self.rank, *self.ranks.values(), 0)

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return _first(self.ranks, module, self.rank)

    def scale_of(self, module: str, *, rank: int | None = None) -> float:
        """The factor of a module's adapter.

        Args:
            module: its name in the base, as training saw it.
            rank: its rank, where the tensors show another than the configuration.
        """
        rank = self.rank_of(module) if rank is None else rank
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def _first(table: Mapping[str, Any], module: str, default: Any) -> Any:
    """The entry of the first pattern that matches a name, as PEFT's ``get_pattern_key`` finds it."""
    found = (value for key, value in table.items() if re.fullmatch(rf"(?:.*\.)?(?:{key})", module))
    return next(found, default)


class _Keys:
    """The keys of the file, of which those that were never asked for are refused."""

    def __init__(self, content: Mapping[str, Any], path: Path) -> None:
        self._content, self._path = content, path
        self._asked = set(NEUTRAL)

    def fail(self, name: str, problem: str) -> Any:
        raise CheckpointError(f"{self._path}: {name} {problem}")

    def get(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        value = self._content.get(name)
        return default if value is None else value

    def whole(self, name: str, default: Any = None, *, value: Any = None) -> int:
        """A whole number above zero; ``value``: of an entry of a table with that name."""
        value = self.get(name, default) if value is None else value
        if type(value) is not int or value < 1:
            self.fail(name, f"is {value!r}, not a whole number above 0")
        return int(value)

    def number(self, name: str, default: Any = None, *, value: Any = None) -> float:
        """A finite number; for ``value`` see `whole`."""
        value = self.get(name, default) if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value):
            self.fail(name, f"is {value!r}, not a number")
        return float(value)

    def switch(self, name: str) -> bool:
        value = self.get(name, False)
        if type(value) is not bool:
            self.fail(name, f"is {value!r}, neither true nor false")
        return bool(value)

    def table(self, name: str, of: Any) -> dict[str, Any]:
        """Numbers by patterns, which must be regular expressions."""
        table = self.get(name, {})
        if not isinstance(table, dict):
            self.fail(name, f"is {table!r}, not an object")
        for pattern in table:
            try:
                re.compile(pattern)
            except re.error as error:
                self.fail(name, f"has {pattern!r}, which is not a regular expression: {error}")
        return {pattern: of(name, value=value) for pattern, value in table.items()}

    def names(self, name: str) -> tuple[str, ...]:
        """A list of names. It is a neutral key, because not all that it names has to be there."""
        names = self.get(name, [])
        if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
            self.fail(name, f"is {names!r}, not a list of names")
        return tuple(names)

    def rows(self, name: str) -> dict[str, tuple[int, ...]]:
        """Numbers of rows by module; a list alone is of the embedding."""
        value = self.get(name, {})
        table = {"": value} if isinstance(value, list) else value
        if not isinstance(table, dict):
            self.fail(name, f"is {value!r}, neither a list nor an object")
        for rows in table.values():
            if not isinstance(rows, list) or not all(type(row) is int and row >= 0 for row in rows):
                self.fail(name, f"has {rows!r}, not a list of rows")
        return {module: tuple(rows) for module, rows in table.items() if rows}

    def refuse_unread(self) -> None:
        """Refuses keys that nothing has read, unless they say that something is off."""
        for name, value in self._content.items():
            if name not in self._asked and value not in (None, False, [], {}, ""):
                self.fail(name, f"is {str(value)[:80]!r}, and is not understood")
