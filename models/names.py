"""What a family's checkpoints call the parts of a model, and which of them they keep in one tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class QKV(Enum):
    """How the rows of queries, keys and values follow each other in one matrix."""

    IN_TURN = "in turn"  # all queries, all keys, all values
    BY_GROUP = "by group"  # of heads that share a key: its queries, the key, the value; then the next group's


@dataclass(frozen=True, kw_only=True)
class Names:
    """How the tensors of files become those of a model, which has Llama's names.

    Attributes:
        modules: those of files with those of the model; ``*`` stands for a layer's number, unless the number itself is
            there. A second ``*`` on the left numbers vectors that are stacked. Others keep their names.
        prefix: of modules in files, which is left out in the table, and by some files.
        qkv: order of rows of what becomes ``self_attn.qkv_proj``, which is then taken apart, as is
            ``mlp.gate_up_proj``, gate first, and ``mlp.up_gate_proj``.
        vectors: ends of tensors in files that are [1, n] and vectors in the model.
        transposed: ends of modules in files whose weights are [in, out] unless they are quantized.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    prefix: str = ""
    qkv: QKV = QKV.IN_TURN
    vectors: Sequence[str] = ()
    transposed: Sequence[str] = ()

    def in_model(self, module: str) -> tuple[str, int | None]:
        """A module of a file as the model calls it, and its number in a stack; None: it is not part of one."""
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
