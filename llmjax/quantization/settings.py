"""The settings of ``llmjax.quantize``: what is written, and how weights are rounded."""

from __future__ import annotations

from dataclasses import dataclass

from llmjax.config import check_values, setting
from llmjax.errors import ConfigError

ENGINE_SETTINGS = (
    "gguf_file", "tokenizer", "skip_tokenizer_init", "revision", "hf_token", "download_dir", "offline", "hf_overrides",
    "dtype", "quantization_rules", "device", "device_ids", "threads", "cpu_list", "numa",
)  # fmt: skip
"""The engine settings that apply here."""


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """The settings for the files that are written."""

    scheme: str | None = setting(
        None,
        "for safetensors: int8, int8_g128, int4, int4_g64, int4_asym, w8a8, fp8, fp8_tensor; for GGUF: a type (q4k …), "
        "a mix of types as in llama.cpp's files (q4_k_m …), f16, bf16 or f32 (required)",
        section="what is written",
    )
    format: str = setting(
        "compressed-tensors",
        "layout of quantized layers in safetensors",
        choices=("compressed-tensors", "gptq", "awq"),
    )
    group_size: int | None = setting(
        None, "number of columns that share a scale, for integers in safetensors; 0: whole rows (default: the scheme's)"
    )
    max_shard_size: int = setting(5_000_000_000, "maximum size of a safetensors file", unit="bytes")
    force: bool = setting(False, "replace a model that is there already")


@dataclass(frozen=True, kw_only=True)
class CalibrationSettings:
    """The settings for the method of rounding and its calibration text.

    Raises:
        ConfigError: a number is out of range.
    """

    method: str = setting(
        "rtn",
        "rtn: round to nearest; gptq, awq: calibrate on the text of --calibration",
        choices=("rtn", "gptq", "awq"),
        section="calibration",
    )
    calibration: str | None = setting(None, "file of UTF-8 text that resembles what the model will be used for")
    calibration_tokens: int = setting(32768, "number of tokens of the text to use, from its beginning", unit="tokens")
    calibration_length: int = setting(
        512,
        "length of the sequences that the text is cut into, in tokens",
        unit="tokens",
        low=2,
    )
    damping: float = setting(
        0.01, "gptq: share of the Hessian's mean diagonal that is added to its diagonal", above=0, high=1
    )
    act_order: bool = setting(True, "gptq: round the columns with the largest inputs first")
    static_groups: bool = setting(
        False, "gptq without act-order: take groups' scales from the weights as they are (act-order always does)"
    )
    clip: bool = setting(True, "awq: search how far to cut the range of each group")

    def __post_init__(self) -> None:
        check_values(self)
        if self.calibration_tokens < self.calibration_length:
            raise ConfigError(
                f"calibration_tokens ({self.calibration_tokens}) must hold a sequence of {self.calibration_length}"
            )
        if (self.method == "rtn") != (self.calibration is None):
            raise ConfigError("--method gptq and awq need --calibration FILE, and only they use it")

    def cut(self, token_ids: list[int], *, bos: int | None) -> list[list[int]]:
        """Cuts a text into sequences of the calibration's length, each with BOS in front if texts begin with it.

        Args:
            token_ids: tokens of the text, without special tokens.
            bos: the token that texts begin with; None: there is none.

        Raises:
            ConfigError: the text is shorter than one sequence.
        """
        first = [] if bos is None else [bos]
        step = self.calibration_length - len(first)
        count = min(self.calibration_tokens // self.calibration_length, len(token_ids) // step)
        if not count:
            raise ConfigError(
                f"the text of --calibration has {len(token_ids)} tokens, which fill no sequence of "
                f"{self.calibration_length}: use more text or a smaller --calibration-length"
            )
        return [first + token_ids[i * step : (i + 1) * step] for i in range(count)]
