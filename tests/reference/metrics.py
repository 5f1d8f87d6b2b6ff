"""docs/reference/metrics.md, written from what a server's collector gives."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, get_args

from prometheus_client.metrics_core import Metric

from llmjax.config import EngineConfig
from llmjax.engine.info import SleepState
from llmjax.serve.metrics import PoolMetrics
from llmjax.several.pool import Manners, PooledModel
from tests.reference.markdown import cell

HEAD = """# Metrics

```console
$ curl http://localhost:8000/metrics
```

Prometheus' text format, without a key unless `--guard-metrics` is given. Names, labels and buckets that begin
with `vllm:` are vLLM's, so that its dashboards and autoscalers work; own names begin with `llmjax:`. Counters end
in `_total`, histograms have `_bucket`, `_sum` and `_count`. [Which of vLLM's are not there](../api.md#metrics).

| question | expression |
|---|---|
| tokens generated a second | `rate(vllm:generation_tokens_total[1m])` |
| time to the first token, 95 % | `histogram_quantile(0.95, rate(vllm:time_to_first_token_seconds_bucket[5m]))` |
| gap between tokens, 95 % | `histogram_quantile(0.95, rate(vllm:inter_token_latency_seconds_bucket[5m]))` |
| is it full | `vllm:num_requests_waiting > 0`, `vllm:kv_cache_usage_perc > 0.9` |
| hits of the prefix cache | `rate(vllm:prefix_cache_hits_total[5m]) / rate(vllm:prefix_cache_queries_total[5m])` |
| are requests refused | `rate(vllm:admission_rejections_total[5m])` |

Beside these there are the usual ones of a Python process (`process_resident_memory_bytes`,
`process_cpu_seconds_total` …).
"""
LABELS = {"model_name", "engine"}  # of nearly all


def page() -> str:
    """The page as Markdown."""
    metrics = list(collector().collect())
    return "\n".join([HEAD, *_table("vLLM's names", metrics, "vllm:"), *_table("Own names", metrics, "llmjax:")])


def collector() -> PoolMetrics:
    """The collector of several models, one of which has all that a metric depends on: drafts, adapters, and
    pages in other places."""
    config = EngineConfig(
        kv_offloading_size=1.0,
        enable_lora=True,
        compilation_cache_dir="off",
    )
    engine: Any = SimpleNamespace(
        info=SimpleNamespace(model_name="model", kv_tokens=1024, page_size=32, max_model_len=1024, drafts=1),
        config=config,
        states=[SimpleNamespace(serving=True, restarts=0)],
        sleep_state=get_args(SleepState)[0],
        num_held_back=0,
        add_stat_logger=lambda stat_logger: None,
    )
    pool: Any = SimpleNamespace(models={"model": PooledModel("model", Manners())})
    metrics = PoolMetrics(pool)
    metrics.attach(engine)
    return metrics


def _table(title: str, metrics: list[Metric], prefix: str) -> Iterator[str]:
    yield f"## {title}\n\n| metric | kind | labels beside `model_name` and `engine` | meaning |\n|---|---|---|---|"
    for metric in metrics:
        if metric.name.startswith(prefix):
            labels = {name: None for sample in metric.samples for name in sample.labels if name not in {*LABELS, "le"}}
            shown = ", ".join(f"`{name}`" for name in labels)
            end = "_total" if metric.type == "counter" else ""
            yield f"| `{metric.name}{end}` | {metric.type} | {shown} | {cell(metric.documentation)} |"
    yield ""
