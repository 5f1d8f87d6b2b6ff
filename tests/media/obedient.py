"""An image processor that does what the file says."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from llmjax.errors import InvalidRequest
from llmjax.media.image import PreparedImage


@dataclass(frozen=True)
class Obedient:
    """Takes files that are words."""

    placeholder: tuple[int, ...] = (7,)
    row_token_id: int = 8
    alone: int = 1

    def prepare(self, data: bytes, *, several: bool = False) -> PreparedImage:
        match data:
            case b"compute":
                while True:
                    pass
            case b"sleep":
                os.read(os.pipe()[0], 1)
            case b"memory":
                return self.image(np.zeros(2**40, np.uint8).astype(np.float32))
            case b"exit":
                os._exit(3)
            case b"fail":
                raise ZeroDivisionError("a secret")
            case b"refuse":
                raise InvalidRequest("the picture\nis not supported")
        return self.image(np.frombuffer(data, np.uint8).astype(np.float32) * (2 if several else 1))

    def image(self, values: np.ndarray) -> PreparedImage:
        """An image of one patch."""
        return PreparedImage(
            patches=values[None], grid=(1, 1, 1), num_rows=1, tokens=(8,), digest=bytes(32), sources=np.int32([[0]])
        )
