"""A family's names of tensors in checkpoints, and which tensors of the model they store fused or stacked."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class QKV(Enum):
    """The order of the rows of queries, keys and values in one matrix."""

    IN_TURN = "in turn"  # all queries, all keys, all values
    BY_GROUP = "by group"  # for each key head: its queries, the key, the value; then the next group


@dataclass(frozen=True, kw_only=True)
class Names:
    """How tensors of files map to those of the model, which has Llama's names.

    Attributes:
        modules: names of modules in files, each with its name in the model; ``*`` stands for the number of a layer
            that has no entry of its own. A second ``*`` on the left numbers vectors that are stacked. Modules that
            are not listed keep their names.
        prefix: prefix of modules in files; the table and some files omit it.
        qkv: order of the rows of ``self_attn.qkv_proj``, which is split when it is read, as are ``mlp.gate_up_proj``
            (gate first) and ``mlp.up_gate_proj``.
        vectors: endings of the names of tensors that are [1, n] in files and vectors in the model.
        transposed: endings of the names of modules whose weights are [in, out] in files unless they are quantized.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    qkv: QKV = QKV.IN_TURN
    vectors: Sequence[str] = ()
    transposed: Sequence[str] = ()

    def in_model(self, module: str) -> tuple[str, int | None]:
        """The model's name of a module of a file, and its number in a stack; None: it is not part of a stack."""
        own = module.removeprefix(self.prefix)
        if own in self.modules:
            return self.modules[own], None
        if (known := self.modules.get(NUMBER.sub("*", own))) is None:
            return module, None
        numbers = [int(number) for number in NUMBER.findall(own)]
        for number in numbers[: known.count("*")]:
            known = known.replace("*", str(number), 1)
        stacked = numbers[self.modules[NUMBER.sub("*", own)].count("*") :]
        return known, stacked[0] if stacked else None
