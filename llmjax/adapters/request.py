"""``LoRARequest``: the adapter of a request, as vLLM's offline API names it."""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.errors import InvalidRequest


@dataclass(frozen=True)
class LoRARequest:
    """An adapter that a request is computed with. It is loaded with the first request that has it.

    Args:
        lora_name: its name.
        lora_int_id: its number: at least 1, and another one for each adapter.
        lora_path: its PEFT folder or GGUF file.
        base_model_name: the model that it is said to be for.
        load_inplace: read the files again, which may have changed; requests that run keep what they have.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        number = self.lora_int_id
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number < 2**63:
            raise InvalidRequest(f"lora_int_id must be an integer of at least 1, not {number!r}", field="lora_int_id")
        for field in ("lora_name", "lora_path"):
            if not isinstance(value := getattr(self, field), str) or not value:
                raise InvalidRequest(f"{field} must be a string that is not empty, not {value!r}", field=field)
