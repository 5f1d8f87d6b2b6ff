"""The process that measures one stream: ``python -m llmjax.tune.decode_main``. An ``Order`` comes as a pickle on
standard input, a ``Decode`` goes as one to standard output."""

from __future__ import annotations

import pickle
import sys
import time

from llmjax.errors import LLMJaxError, written
from llmjax.tune.decode import Order
from llmjax.tune.facts import Decode

PROMPT, ANSWER = 16, 48  # tokens, or fewer where the model takes no more
RUNS = 4


def measured(order: Order) -> Decode:
    """Loads the model and times one stream: the fastest of several answers."""
    from llmjax import LLM, SamplingParams
    from llmjax.tune.attention import seconds_of_attention

    length = min(order.tokens, PROMPT + ANSWER)
    prompt = min(PROMPT, length // 2)
    # Programs and pages for one short request alone, so that there is little to compile.
    small = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": PROMPT,
        "max_model_len": length,
        "kv_cache_memory_bytes": None,
    }
    config = order.config.replace(
        **small, auto_speculation=False, speculative_config=None, skip_tokenizer_init=True, enable_prefix_caching=False
    )
    llm = LLM.from_config(config)
    params = SamplingParams(temperature=0, max_tokens=length - prompt, ignore_eos=True, detokenize=False)
    llm.warm_up()
    seconds = []
    for _ in range(RUNS):
        (output,) = llm.generate([[1] * prompt], params, use_tqdm=False)
        told = output.metrics
        assert told is not None and told.finished_time is not None and told.first_token_time is not None
        seconds.append((told.finished_time - told.first_token_time) / (length - prompt - 1))
    platform, model = llm.engine.platform, llm.model_config
    llm.close()
    types = {name: platform.kv_dtype(name) for name in order.kv_types}
    attention = seconds_of_attention(model, platform, types, tokens=order.tokens, page_size=config.page_size)
    return Decode(threads=config.threads, step=min(seconds), attention=attention if types else {})


def main() -> int:
    """Measures what standard input says."""
    order: Order = pickle.load(sys.stdin.buffer)
    began = time.monotonic()
    try:
        found = measured(order)
    except LLMJaxError as error:
        print(written(error), file=sys.stderr)
        return 1
    print(f"measured in {time.monotonic() - began:.1f} s", file=sys.stderr)
    sys.stdout.buffer.write(pickle.dumps(found))
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
