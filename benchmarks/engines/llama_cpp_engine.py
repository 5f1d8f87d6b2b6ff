"""llama.cpp through the C interface that llama-cpp-python wraps: all streams in one ``llama_batch``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.engines.interface import EngineOptions

BATCH = 2048  # tokens handed over at once
MICRO_BATCH = 512  # tokens computed at once: llama.cpp's default, and its fastest here


class LlamaCppEngine:
    """Adapter. The KV cache is f16 and split by stream, flash attention as llama.cpp decides (its defaults)."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(options.model.encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {options.model}")
        self._model = model
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._contexts: dict[int, llama_cpp.llama_context_p] = {}

    def details(self) -> dict[str, str]:
        # "CPU : SSE3 = 1 | AVX2 = 1 | …"
        features = re.findall(r"(\w+) = 1", llama_cpp.llama_print_system_info().decode())
        return {"llama-cpp-python": llama_cpp.__version__, "built for": " ".join(features)}

    def warm_up(self) -> None:
        """Nothing is compiled."""

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        context = self._context(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        streams = np.repeat(np.arange(len(prompts)), [len(prompt) for prompt in prompts])
        positions = np.concatenate([np.arange(len(prompt)) for prompt in prompts])
        tokens = np.concatenate([np.asarray(prompt) for prompt in prompts])
        last = np.append(streams[1:] != streams[:-1], True)
        parts = range(0, len(tokens), BATCH)
        steps = [
            self._decode(context, *(values[i : i + BATCH] for values in (tokens, positions, streams, last)))
            for i in parts
        ]
        answers = [np.concatenate(steps)]
        streams, positions = np.arange(len(prompts)), np.array([len(prompt) for prompt in prompts])
        last = np.ones(len(prompts), bool)
        for step in range(new_tokens - 1):
            answers.append(self._decode(context, answers[-1], positions + step, streams, last))
        return [[int(token) for token in answer] for answer in np.stack(answers, axis=1)]

    def close(self) -> None:
        for context in self._contexts.values():
            llama_cpp.llama_free(context)
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_model_free(self._model)

    def _context(self, streams: int) -> llama_cpp.llama_context_p:
        """A context for exactly this number of streams: each has its own part of the KV cache."""
        if streams not in self._contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx = streams * -(-self._options.max_tokens // 256) * 256
            params.n_batch, params.n_ubatch, params.n_seq_max = BATCH, MICRO_BATCH, streams
            params.n_threads = params.n_threads_batch = self._options.threads
            context = llama_cpp.llama_init_from_model(self._model, params)
            if not context:
                raise RuntimeError(f"llama.cpp cannot make a context of {streams} x {self._options.max_tokens} tokens")
            self._contexts[streams] = context
        return self._contexts[streams]

    def _decode(
        self,
        context: llama_cpp.llama_context_p,
        tokens: np.ndarray,
        positions: np.ndarray,
        streams: np.ndarray,
        last: np.ndarray,
    ) -> np.ndarray:
        """One call of ``llama_decode``; the most probable next token wherever ``last`` is set."""
        batch, count = self._batch, len(tokens)
        batch.n_tokens = count
        _fill(batch.token, tokens)
        _fill(batch.pos, positions)
        _fill(batch.n_seq_id, np.ones(count))
        _fill(batch.logits, last)
        for i, stream in enumerate(streams):
            batch.seq_id[i][0] = int(stream)
        status = llama_cpp.llama_decode(context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode of {count} tokens returned {status}")
        rows = int(last.sum())
        if not rows:
            return np.empty(0, np.int64)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (rows, self._vocab))
        return logits.argmax(axis=1)


def _fill(pointer: Any, values: np.ndarray) -> None:
    np.ctypeslib.as_array(pointer, (len(values),))[:] = values
