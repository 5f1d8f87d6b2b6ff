"""Requests for vectors: texts and pairs as tokens, and vectors in the form that a request asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from llmjax.engine.front.pairs import Page, PairPrompts, Side, TextPair
from llmjax.engine.front.requests import Prompt, Requests, check_keys, ids_of
from llmjax.engine.front.scores import PoolingInput
from llmjax.engine.front.vectors import PooledTokens, finished, task_of
from llmjax.engine.info import EngineInfo, PoolerInfo
from llmjax.errors import InvalidRequest, PromptTooLong
from llmjax.models.layers.pooling import TextPrompt
from llmjax.outputs import PoolingOutput, PoolingRequestOutput
from llmjax.pooling_params import PoolingParams
from llmjax.tokenizer import Tokenizer


class PoolingPrompts:
    """The prompts of a model that makes vectors.

    Args:
        requests: checks token ids.
        info: describes the engine.
        tokenizer: None: prompts are token ids.
        chosen_template: whether the user has named a chat template.
    """

    def __init__(
        self, requests: Requests, *, info: EngineInfo, tokenizer: Tokenizer | None, chosen_template: bool
    ) -> None:
        self._requests = requests
        self._tokenizer = tokenizer
        self._pooler = info.pooler
        self._max_model_len = info.max_model_len
        self._skipped = {} if tokenizer is None or info.pooler is None else _skipped(tokenizer, info.pooler)
        self._pairs = None
        if tokenizer is not None and info.pooler is not None:
            self._pairs = PairPrompts.of(tokenizer, info.pooler, chosen=chosen_template)

    @property
    def renders_pairs(self) -> bool:
        """Whether pairs of texts go through a template, which another process renders."""
        return self._pairs is not None and self._pairs.template is not None

    @property
    def pooler(self) -> PoolerInfo:
        """What the model makes; raises InvalidRequest if it makes no vectors."""
        if self._pooler is None:
            raise InvalidRequest("this model generates text; it makes no vectors of texts (--runner pooling)")
        return self._pooler

    def tokens(
        self,
        prompt: PoolingInput | PooledTokens,
        params: PoolingParams,
        *,
        add_special_tokens: bool = True,
    ) -> PooledTokens:
        """The checked tokens of a request for a vector. Any thread may call this.

        Args:
            add_special_tokens: those that the tokenizer puts around a text, and between those of a pair.

        Raises:
            InvalidRequest: the model is not made for it, there is no tokenizer or no such prompt, or a text is longer
                than the model takes.
        """
        if isinstance(prompt, PooledTokens):
            return prompt
        if isinstance(prompt, Side):
            params = replace(params, prompt_name=prompt.prompt_name)
            prompt = prompt.content.prompt if isinstance(prompt.content, Page) else prompt.content
        task = task_of(params, self.pooler)
        keep = params.truncate_prompt_tokens
        limit = self._max_model_len if keep == -1 else keep
        if limit is not None and limit > self._max_model_len:
            raise InvalidRequest(
                f"truncate_prompt_tokens is {limit}, above the {self._max_model_len} tokens that the model takes",
                field="truncate_prompt_tokens",
            )
        salt, given, media = None, prompt, None
        form = self._form(params, pictured=isinstance(prompt, Mapping) and bool(prompt.get("multi_modal_data")))
        if isinstance(prompt, Prompt):
            salt, media, prompt = prompt.cache_salt, prompt.media, prompt.token_ids
        elif isinstance(prompt, Mapping):
            check_keys(prompt)
            if prompt.get("multi_modal_data") and keep is not None:
                raise InvalidRequest("truncate_prompt_tokens does not go with images", field="truncate_prompt_tokens")
            salt = prompt.get("cache_salt")
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt", "")
        if isinstance(prompt, str | TextPair):
            token_ids, second_start = self._text_tokens(prompt, form, limit=limit, special=add_special_tokens)
        else:
            token_ids, second_start = ids_of(prompt)[:limit], None
        if not isinstance(given, Prompt | TextPair):
            token_ids, media = self._requests.placed(given, token_ids)
        if not token_ids:
            raise InvalidRequest("the prompt has no tokens", field="prompt")
        if self.pooler.filled_to is not None and media is None:
            token_ids = self._filled(token_ids, self.pooler.filled_to)
        self._requests.limits.check_ids(token_ids if media is None else media.others(token_ids))
        if len(token_ids) > self._max_model_len:
            raise PromptTooLong(
                f"the text has {len(token_ids)} tokens; this model takes at most {self._max_model_len} "
                "(truncate_prompt_tokens: -1 leaves the rest out)",
                field="prompt",
                tokens=len(token_ids),
                limit=self._max_model_len,
            )
        return PooledTokens(task, token_ids, second_start, salt, media)

    def _filled(self, token_ids: list[int], length: int) -> list[int]:
        """A text's tokens, filled up with padding to the length at which the model has learned texts."""
        padding = None if self._tokenizer is None else self._tokenizer.pad_token_id
        if padding is None:
            if len(token_ids) != length:
                raise InvalidRequest(
                    f"this model reads texts of {length} tokens, shorter ones with padding, and there is no tokenizer "
                    f"with a padding token: give {length} token ids",
                    field="prompt",
                )
            return token_ids
        return [*token_ids, *[padding] * (length - len(token_ids))]

    def _text_tokens(
        self, prompt: str | TextPair, form: TextPrompt, *, limit: int | None, special: bool
    ) -> tuple[list[int], int | None]:
        """Token ids of a text or a pair, ``limit`` of them at most, and where the second text begins."""
        if self._tokenizer is None:
            raise InvalidRequest("there is no tokenizer: give token ids instead of text", field="prompt")
        texts = [prompt.first, prompt.second] if isinstance(prompt, TextPair) else [prompt]
        if self.pooler.lowercase:
            texts = [text.lower() for text in texts]
        if limit is None:
            for text in texts:
                self._tokenizer.check_length(text, max_tokens=self._max_model_len)
        if not isinstance(prompt, TextPair):
            return self._formed(texts[0], form, limit=limit, special=special)
        assert self._pairs is not None
        pair = replace(prompt, first=texts[0], second=texts[1])
        return self._pairs.tokens(pair, limit=limit, add_special_tokens=special)

    def _formed(self, text: str, form: TextPrompt, *, limit: int | None, special: bool) -> tuple[list[int], int | None]:
        """Token ids of a text and of what is around it, ``limit`` of them at most, of which the text's end is cut."""
        assert self._tokenizer is not None
        special = special and not form.complete
        marks: list[int] = []
        if form.second:
            if (mark := self._tokenizer.token_to_id(form.second)) is None:
                raise InvalidRequest(f"the tokenizer has no token {form.second!r}, which marks texts", field="prompt")
            marks = [mark]
        room = None if limit is None else max(0, limit - len(marks))
        whole = form.before + text + form.after
        ids, second_start = self._tokenizer.encode_texts(whole, limit=room, add_special_tokens=special)
        if form.after and limit is not None and len(ids) == room:  # it may have been cut
            after = self._tokenizer.encode(form.after, add_special_tokens=False)
            before = form.before + text
            ids, _ = self._tokenizer.encode_texts(before, limit=max(0, limit - len(after)), add_special_tokens=special)
            ids = [*ids, *after][:limit]
        return [*ids[:1], *marks, *ids[1:]], second_start

    def _form(self, params: PoolingParams, *, pictured: bool) -> TextPrompt:
        """What is put around a text; nothing around one with pictures, unless its request names it."""
        name = self.pooler.default_prompt if params.prompt_name is None and not pictured else params.prompt_name
        if name is None:
            return TextPrompt()
        if name not in self.pooler.prompts:
            known = ", ".join(sorted(self.pooler.prompts)) or "none"
            raise InvalidRequest(f"the model has no prompt {name[:80]!r}; it has: {known}", field="prompt_name")
        return self.pooler.prompts[name]

    def finished(self, output: PoolingRequestOutput, params: PoolingParams) -> PoolingRequestOutput:
        """An output of `Frontend.process` as its request wants it: cut, normalized or activated. Any thread may
        ask, and should for the vectors of many tokens."""
        if output.error is None and self._pooler is not None:
            vectors, ids = output.outputs.data, output.prompt_token_ids
            if len(ids) > 1 and ids[1] in self._skipped and len(vectors) == len(ids):
                vectors = vectors[~np.isin(ids, self._skipped[ids[1]])]
            output.outputs = PoolingOutput(finished(vectors, params, self._pooler))
        return output


def _skipped(tokenizer: Tokenizer, pooler: PoolerInfo) -> dict[int, list[int]]:
    """The tokens of texts that have no vectors, by the token that marks such a text; empty: all tokens have."""
    if pooler.kind != "each":
        return {}
    ids = {form.second: list(map(tokenizer.token_to_id, form.skipped)) for form in pooler.prompts.values()}
    known = {tokenizer.token_to_id(mark): [id for id in skipped if id is not None] for mark, skipped in ids.items()}
    return {mark: skipped for mark, skipped in known.items() if mark is not None and skipped}
