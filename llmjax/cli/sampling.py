"""Sampling flags, generated from the fields of ``SamplingParams``."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Collection
from typing import Any

from llmjax.cli.parser import Parser, add_settings
from llmjax.sampling.params import SamplingParams
from llmjax.settings import Setting, settings_of

HELP = {
    "n": "answers to each prompt",
    "temperature": "0: always the most probable token; higher: more varied",
    "top_p": "sample from the most probable tokens that together have this probability",
    "top_k": "sample from this many most probable tokens; 0: from all",
    "min_p": "sample from tokens at least this probable, relative to the most probable one",
    "repeat_last_n": "the penalties look at this many tokens at the end, up to 1024; 0: at none, -1: at all",
    "presence_penalty": "lowers tokens that the answer already has",
    "frequency_penalty": "lowers tokens by how often the answer already has them",
    "repetition_penalty": "divides the logits of tokens in prompt or answer; 1: off",
    "seed": "the same seed gives the same answer",
    "max_tokens": "longest answer in tokens; none: as long as the context allows",
    "min_tokens": "no end before this many tokens",
    "stop": "text that ends an answer; may be given more than once",
    "stop_token_ids": "token ids that end an answer",
    "ignore_eos": "go on after the model's end token",
    "include_stop_str_in_output": "keep the stop text in the answer",
    "logprobs": "log-probabilities of this many tokens at each position (with --json)",
    "prompt_logprobs": "the same for the tokens of the prompt",
    "logprob_token_ids": "token ids whose log-probabilities come with each token (with --json)",
    "logit_bias": 'added to the logits of tokens, as JSON: {"17": -5}',
    "allowed_token_ids": "sample from these token ids only",
    "bad_words": "text that must not appear; may be given more than once",
    "detokenize": "give text, not only token ids",
    "skip_special_tokens": "leave special tokens out of the text",
    "spaces_between_special_tokens": "separate special tokens in the text",
}
# How outputs arrive is the command's own business; a form is an object of Python's.
NOT_FLAGS = {"output_kind", "structured_outputs", "guided_decoding", "kv_transfer"}
NOT_FLAGS |= {"repetition_detection", "stream_interval", "skip_reading_prefix_cache"}  # which few want everywhere


def sampling_settings(*, without: Collection[str] = (), **defaults: Any) -> dict[str, Setting]:
    """The settings of ``SamplingParams`` that are flags.

    Args:
        without: fields that make no sense for the command.
        defaults: defaults of the command where they differ from the class's.
    """
    settings = {}
    for name, setting in settings_of(SamplingParams, without=NOT_FLAGS | set(without)).items():
        separator = "," if setting.item is int else None  # texts may hold commas
        settings[name] = dataclasses.replace(
            setting,
            name="sampling_seed" if name == "seed" else name,  # --seed is the engine's
            help=HELP[name],
            separator=separator,
            default=defaults.get(name, setting.default),
        )
    return settings


def add_sampling_flags(parser: Parser, settings: dict[str, Setting]) -> None:
    """Adds a flag for each of ``sampling_settings()``."""
    add_settings(parser, settings.values(), section="sampling")


def given_sampling(values: argparse.Namespace, settings: dict[str, Setting]) -> dict[str, Any]:
    """The sampling fields that the user gave, by name in ``SamplingParams``."""
    return {name: getattr(values, setting.name) for name, setting in settings.items() if hasattr(values, setting.name)}
