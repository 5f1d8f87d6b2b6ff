"""Faults that the fast tests must find: each is one line of the product as a tired programmer might have written it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        what: goes wrong.
        path: the file that it is made in, relative to the repository.
        before: text of the file; it stands there once.
        after: what stands there instead.
        tests: files of fast tests, of which at least one must fail.
    """

    what: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


SCHEDULER = "llmjax/engine/core/scheduler.py"
SCHEDULED = ("tests/engine/core/test_scheduler.py",)
POOL = "llmjax/engine/core/page_pool.py"
POOLED = ("tests/engine/core/test_page_pool.py", "tests/engine/core/test_scheduler.py")
CACHE = "llmjax/engine/core/kv_cache.py"
CACHED = ("tests/engine/core/test_kv_cache.py",)
PREFIX = "llmjax/engine/core/prefix.py"
OFFLOAD = "llmjax/engine/tiers/offload.py"
OFFLOADED = ("tests/engine/tiers/test_offload.py",)
STAGES = "llmjax/engine/ranks/stages.py"
ROWS = "kernels/cpu/src/rows_kernel.h"
FEW = "kernels/cpu/src/attention_few.h"
GGUF = "llmjax/checkpoint/gguf/file.py"
GGUF_READ = ("tests/checkpoint/gguf/test_file.py",)
SAFETENSORS = "llmjax/checkpoint/safetensors.py"
CONSTRAINT = "llmjax/engine/constraint.py"
CONSTRAINED = ("tests/engine/test_constraint.py",)

MUTANTS = (
    # Constraints of sequences.
    Mutant(
        "a token that was refused is kept",
        CONSTRAINT,
        "count = num_allowed(self._matcher, tokens)",
        "count = min(num_allowed(self._matcher, tokens) + 1, len(tokens))",
        CONSTRAINED,
    ),
    Mutant(
        "the device is not told of tokens that were refused",
        CONSTRAINT,
        "        self.rewound = self.rewound or count < len(tokens)\n",
        "",
        CONSTRAINED,
    ),
    Mutant(
        "a budget of reasoning forgets what is in flight",
        CONSTRAINT,
        "min(steps, self._thinking.left - in_flight)",
        "min(steps, self._thinking.left)",
        CONSTRAINED,
    ),
    Mutant(
        "a grammar does not read the end of reasoning that was forced",
        CONSTRAINT,
        "            self._closing = self._closing[1:]\n",
        "            self._closing = self._closing[1:]\n            return True\n",
        CONSTRAINED,
    ),
    # The scheduler.
    Mutant(
        "the sequence that came first is preempted",
        SCHEDULER,
        "victim = self.running[-1]",
        "victim = self.running[0]",
        SCHEDULED,
    ),
    Mutant(
        "a chunk ignores the budget",
        SCHEDULER,
        "count = min(sequence.missing, budget) if chunks else 1",
        "count = sequence.missing if chunks else 1",
        SCHEDULED,
    ),
    Mutant(
        "a prompt samples before it is computed",
        SCHEDULER,
        "samples = start + count == known",
        "samples = start + count <= known",
        SCHEDULED,
    ),
    Mutant(
        "a victim's tokens stay counted",
        SCHEDULER,
        "budget += counts.pop(victim, 0)",
        "counts.pop(victim, 0)",
        SCHEDULED,
    ),
    Mutant(
        "slots are lost",
        SCHEDULER,
        "        self._free_slots.append(sequence.slot)\n",
        "",
        SCHEDULED,
    ),
    Mutant(
        "whole prompts are cut",
        SCHEDULER,
        "if self.whole_prompts and sequence.missing > budget:",
        "if self.whole_prompts and sequence.missing > 2 * budget:",
        SCHEDULED,
    ),
    Mutant(
        "those that run are in the order in which they were let in",
        SCHEDULER,
        "insort(self.running, sequence, key=_rank)",
        "self.running.append(sequence)",
        SCHEDULED,
    ),
    # Pages and the prefix cache.
    Mutant(
        "a page is found by its digest alone",
        POOL,
        "if page is None or self._keys[page] != key:",
        "if page is None:",
        POOLED,
    ),
    Mutant(
        "a page's key says nothing of those before it",
        POOL,
        "content = parent + struct.pack(",
        "content = struct.pack(",
        POOLED,
    ),
    Mutant(
        "the page that was used last is evicted first",
        POOL,
        "page, _ = self._cached.popitem(last=False)\n                if",
        "page, _ = self._cached.popitem(last=True)\n                if",
        POOLED,
    ),
    Mutant(
        "a second holder is not counted",
        POOL,
        "self._holders[page] += 1",
        "self._holders[page] = 1",
        POOLED,
    ),
    Mutant(
        "a page that was evicted is found",
        POOL,
        "            del self._pages[key.digest]\n            self._keys[page] = None\n",
        "            self._keys[page] = None\n",
        POOLED,
    ),
    Mutant(
        "pages are registered a page late",
        CACHE,
        "if len(sequence.tokens) >= (sequence.num_committed + 1) * self.page_size:",
        "if len(sequence.tokens) > (sequence.num_committed + 2) * self.page_size:",
        CACHED,
    ),
    Mutant(
        "room is what one of the groups has",
        CACHE,
        "sequence.room = min([group.room(sequence) for group in self.groups])",
        "sequence.room = max([group.room(sequence) for group in self.groups])",
        CACHED,
    ),
    Mutant(
        "what cannot be relied on is found",
        CACHE,
        "                group.forget(key)\n",
        "",
        ("tests/engine/test_not_finite.py", *SCHEDULED),
    ),
    Mutant(
        "a prefix is a page too long",
        PREFIX,
        "end = next((i for i, found in enumerate(pages[:end]) if not _within(found, places)), end)",
        "end = next((i + 1 for i, found in enumerate(pages[:end]) if not _within(found, places)), end)",
        ("tests/engine/core/test_prefix.py", *SCHEDULED),
    ),
    Mutant(
        "a window needs a page fewer than the next token sees",
        PREFIX,
        "for found in pages[g.first_needed(tokens) : length]",
        "for found in pages[g.first_needed(tokens) + 1 : length]",
        ("tests/engine/core/test_prefix.py", *SCHEDULED),
    ),
    Mutant(
        "the last token of a prompt is found, not computed",
        PREFIX,
        "return (len(sequence.tokens) - 1) // self.page_size",
        "return len(sequence.tokens) // self.page_size",
        SCHEDULED,
    ),
    Mutant(
        "a page that is restored is not written to the device",
        OFFLOAD,
        "        self._restored[group, page] = (key, kept)\n",
        "",
        OFFLOADED,
    ),
    Mutant(
        "a page of the prefix is given out for one that is restored",
        CACHE,
        "held = [page for index in needed if absent and (page := pages[index]) is not None]",
        "held: list[int] = []",
        (*OFFLOADED, *SCHEDULED),
    ),
    Mutant(
        "a page that nobody may rely on stays in host memory",
        CACHE,
        "                self.tier.forget(number, key)\n",
        "",
        OFFLOADED,
    ),
    # Commands of several ranks.
    Mutant(
        "a command does not reach the other ranks",
        STAGES,
        "    def apply(self, command: Command) -> Any:\n        self.samplers.broadcast(command)\n",
        "    def apply(self, command: Command) -> Any:\n",
        ("tests/engine/ranks/test_stages.py",),
    ),
    Mutant(
        "a stage begins a step before it knows what the step continues",
        STAGES,
        "if self._unsettled is None or not set(self._unsettled.sampling) & set(step.slots):",
        "if True:",
        ("tests/engine/ranks/test_stages.py",),
    ),
    Mutant(
        "a rank skips edits of page tables",
        "llmjax/engine/device/edits.py",
        "return replace(state, rows=replace(state.rows, page_tables=tables))",
        "return replace(state, rows=replace(state.rows, page_tables=tables * 0))",
        ("tests/engine/device/test_edits.py",),
    ),
    # Kernels.
    Mutant(
        "norms forget that 1 is added to their weights",
        ROWS,
        "splat(norm.plus_one ? 1.0f : 0.0f);\n  each_vector(size, [&](int i, auto get, auto put) {\n    const Vec v",
        "splat(0.0f);\n  each_vector(size, [&](int i, auto get, auto put) {\n    const Vec v",
        ("tests/kernels/test_blocks.py",),
    ),
    Mutant(
        "interleaved rotation turns half a pair back",
        ROWS,
        "heads[2 * i + 1] = a * by.sin[i] + b * by.cos[i];",
        "heads[2 * i + 1] = b * by.cos[i] - a * by.sin[i];",
        ("tests/kernels/test_blocks.py",),
    ),
    Mutant(
        "of equal logits the last one is taken",
        ROWS,
        "best[j][lane] == peak && index < first",
        "best[j][lane] == peak && index > first",
        ("tests/kernels/test_argmax.py",),
    ),
    Mutant(
        "the last number of a row is not looked at",
        ROWS,
        "if (const int rest = size - i; rest > 0) {",
        "if (const int rest = size - i; rest > 1) {",
        ("tests/kernels/test_finite.py",),
    ),
    Mutant(
        "half of a key is multiplied with the wrong half of a query",
        FEW,
        "partial[m][j] += load(query + kLanes) * b;",
        "partial[m][j] += load(query + kLanes) * a;",
        ("tests/kernels/test_cpu_attention.py",),
    ),
    Mutant(
        "values of odd places have the weights of the first row",
        FEW,
        "const Vec weight = splat(weights[m * stride + c]);",
        "const Vec weight = splat(weights[c]);",
        ("tests/kernels/test_cpu_attention.py",),
    ),
    # Loaders.
    Mutant(
        "tensors of a GGUF file may overlap",
        GGUF,
        "if before.offset + before.nbytes > after.offset:",
        "if before.offset > after.offset:",
        GGUF_READ,
    ),
    Mutant(
        "tensors of a GGUF file may leave it",
        GGUF,
        "if base + record.offset + record.nbytes > self.size:",
        "if base + record.offset > self.size:",
        GGUF_READ,
    ),
    Mutant(
        "dimensions of GGUF tensors are in the file's order",
        GGUF,
        "tuple(reversed(dims))",
        "tuple(dims)",
        GGUF_READ,
    ),
    Mutant(
        "a truth value may be anything",
        GGUF,
        "if count and flags.max() > 1:",
        "if count and flags.max() > 255:",
        GGUF_READ,
    ),
    Mutant(
        "tensors of a safetensors file begin where the first one does",
        SAFETENSORS,
        "        place = end\n",
        "",
        ("tests/checkpoint/test_safetensors.py",),
    ),
    Mutant(
        "rows that follow each other lack the last one",
        SAFETENSORS,
        "self.stored[rows[0] : rows[-1] + 1] if in_turn",
        "self.stored[rows[0] : rows[-1]] if in_turn",
        ("tests/checkpoint",),
    ),
    # Sampling, stop strings, drafts.
    Mutant(
        "min-p is compared with the logits themselves",
        "llmjax/sampling/truncation.py",
        "floor = jnp.maximum(jnp.log(min_p), jnp.where(top_k > 0, kth, -jnp.inf))",
        "floor = jnp.maximum(min_p, jnp.where(top_k > 0, kth, -jnp.inf))",
        ("tests/sampling/test_truncation.py",),
    ),
    Mutant(
        "a stop string is shown",
        "llmjax/engine/front/stop.py",
        "return self._show(self.end if self._include else self.end - len(self.found))",
        "return self._show(self.end)",
        ("tests/engine/front/test_stop.py",),
    ),
    Mutant(
        "the first of the matches is continued",
        "llmjax/engine/drafts/ngrams.py",
        "if same > length:",
        "if same >= length:",
        ("tests/engine/drafts/test_ngrams.py",),
    ),
    # Routes.
    Mutant(
        "a body may be as large as it likes if its size is not told",
        "serve/body.py",
        "                    if whole > limits.bytes:\n",
        "                    if whole < 0:\n",
        ("tests/serve/test_body.py",),
    ),
    Mutant(
        "a compressed body may be as long as it likes if it stands for little",
        "serve/body.py",
        "                if size > limits.bytes:\n",
        "                if size < 0:\n",
        ("tests/serve/test_body.py",),
    ),
    Mutant(
        "what a request has taken is not counted",
        "serve/rates.py",
        "allowances.tokens.take((record.prompt_tokens or 0) + (record.completion_tokens or 0))",
        "allowances.tokens.take(record.prompt_tokens or 0)",
        ("tests/serve/test_rates.py",),
    ),
    Mutant(
        "a stream has no end",
        "serve/sse.py",
        "        await self.write(end)\n",
        "",
        ("tests/serve/test_sse.py",),
    ),
    Mutant(
        "the server stops before the last request has left",
        "serve/drain.py",
        "            if not self.active:\n                self._empty.set()",
        "            self._empty.set()",
        (
            "tests/serve/test_app.py",
            "tests/serve/test_run.py",
            "tests/serve/test_cancel.py",
        ),
    ),
    Mutant(
        "hosts are not looked at",
        "serve/access.py",
        "raise _unknown_host(",
        "return; raise _unknown_host(",
        ("tests/serve/test_access.py",),
    ),
    # Models.
    Mutant(
        "a device's lightning attention decays as if it had all heads",
        "models/layers/lightning.py",
        "heads=even_share(self.heads, devices).shape[1], whole=self.heads)",
        "heads=even_share(self.heads, devices).shape[1])",
        ("tests/models/layers/test_mixers.py",),
    ),
    Mutant(
        "a uniform decoder has no last norm but its layers'",
        "models/hf_config.py",
        '**{"norm": layer.norm, **differences}',
        '**{**differences, "norm": layer.norm}',
        ("tests/models/test_families.py",),
    ),
)
