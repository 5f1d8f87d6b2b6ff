/** The engine live: what /metrics says, once a second. */

import { useEffect, useState } from "preact/hooks";
import { info, models, request } from "../api";
import { buckets, parseMetrics, quantile, total, type Metrics } from "../prometheus";
import { useValue } from "../value";

const EVERY = 1000;
const KEPT = 60; // samples: a minute
const WINDOW = 30; // samples over which quantiles are taken

interface Sample {
  time: number;
  metrics: Metrics;
}

interface Panel {
  title: string;
  help: string;
  /** A value of a sample, with the one before it for rates. */
  value: (now: Sample, before: Sample | undefined) => number | undefined;
  show: (value: number) => string;
  most?: number;
}

const count = (value: number) => Math.round(value).toLocaleString();
const share = (value: number) => `${(100 * value).toFixed(1)} %`;
const time = (value: number) => (value < 1 ? `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);

function gauge(name: string): Panel["value"] {
  return ({ metrics }) => total(metrics, name);
}

function rate(name: string): Panel["value"] {
  return (now, before) => {
    if (!before) return undefined;
    return (1000 * (total(now.metrics, name) - total(before.metrics, name))) / (now.time - before.time);
  };
}

function ratio(part: string, whole: string): (now: Sample, before?: Sample) => number | undefined {
  return (now, before) => {
    const difference = (name: string) => total(now.metrics, name) - (before ? total(before.metrics, name) : 0);
    return difference(whole) > 0 ? difference(part) / difference(whole) : undefined;
  };
}

const PANELS: Panel[] = [
  { title: "Running", help: "requests in the current step", value: gauge("vllm:num_requests_running"), show: count },
  { title: "Waiting", help: "requests that wait for a place", value: gauge("vllm:num_requests_waiting"), show: count },
  { title: "KV pages", help: "share of the pages that are held", value: gauge("vllm:kv_cache_usage_perc"), show: share, most: 1 },
  { title: "Written", help: "tokens generated a second", value: rate("vllm:generation_tokens_total"), show: count },
  { title: "Read", help: "prompt tokens computed a second", value: rate("vllm:prompt_tokens_total"), show: count },
  {
    title: "Prefix hits",
    help: "share of prompt tokens that were cached",
    value: (now) => ratio("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")(now),
    show: share,
    most: 1,
  },
];

const LATENCIES = [
  { title: "Time to first token", name: "vllm:time_to_first_token_seconds" },
  { title: "Between tokens", name: "vllm:inter_token_latency_seconds" },
  { title: "Waiting in the queue", name: "vllm:request_queue_time_seconds" },
  { title: "Whole requests", name: "vllm:e2e_request_latency_seconds" },
];

export function Engine() {
  const server = useValue(info);
  const [model] = useValue(models);
  const [samples, setSamples] = useState<Sample[]>([]);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let over = false;
    let timer: ReturnType<typeof setTimeout>;
    const ask = async () => {
      if (!document.hidden) {
        try {
          const metrics = parseMetrics(await (await request("metrics")).text());
          if (over) return;
          setSamples((known) => [...known.slice(1 - KEPT), { time: performance.now(), metrics }]);
          setProblem("");
        } catch (error) {
          setProblem(error instanceof Error ? error.message : String(error));
        }
      }
      if (!over) timer = setTimeout(() => void ask(), EVERY);
    };
    void ask();
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, []);
  const now = samples.at(-1);
  return (
    <div class="engine">
      <h1>Engine</h1>
      <p class="quiet">
        {[model?.id, server?.engine.architecture, server?.engine.device].filter(Boolean).join(" · ") || "…"}
      </p>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
      {now && (
        <>
          <div class="panels">
            {PANELS.map((panel) => (
              <PanelView key={panel.title} panel={panel} samples={samples} />
            ))}
          </div>
          <h2>Times</h2>
          <Latencies now={now} before={samples.at(-1 - WINDOW) ?? samples[0]} />
          <h2>Since the start</h2>
          <Totals metrics={now.metrics} />
        </>
      )}
    </div>
  );
}

function PanelView({ panel, samples }: { panel: Panel; samples: Sample[] }) {
  const values = samples.map((sample, index) => panel.value(sample, samples[index - 1]));
  const last = values.at(-1);
  const most = Math.max(panel.most ?? 1, ...values.map((value) => value ?? 0));
  const place = (index: number) => (KEPT - values.length + index).toFixed(1);
  const first = values.findIndex((value) => value !== undefined);
  const points = values
    .map((value, index) => (value === undefined ? "" : `${place(index)},${(38 - (36 * value) / most).toFixed(1)}`))
    .filter(Boolean)
    .join(" ");
  return (
    <section class="panel" aria-label={panel.title}>
      <h2>{panel.title}</h2>
      <p class="number">{last === undefined ? "–" : panel.show(last)}</p>
      <svg viewBox={`0 0 ${KEPT - 1} 40`} preserveAspectRatio="none" aria-hidden="true">
        {points && <polygon points={`${place(first)},40 ${points} ${place(values.length - 1)},40`} />}
        <polyline points={points} />
      </svg>
      <p class="help">{panel.help}</p>
    </section>
  );
}

function Latencies({ now, before }: { now: Sample; before: Sample }) {
  return (
    <div class="table" role="region" aria-label="Times" tabIndex={0}>
      <table>
        <thead>
          <tr>
            <th scope="col">the last half minute</th>
            <th scope="col">mean</th>
            <th scope="col">half below</th>
            <th scope="col">95 % below</th>
            <th scope="col">99 % below</th>
          </tr>
        </thead>
        <tbody>
          {LATENCIES.map(({ title, name }) => {
            const all = buckets(now.metrics, name);
            const recent = buckets(before.metrics, name);
            const mean = ratio(`${name}_sum`, `${name}_count`);
            // Of the last half minute, or of all time if nothing has ended in it.
            const either = (value: (since: boolean) => number | undefined) => {
              const one = value(true) ?? value(false);
              return one === undefined ? "–" : time(one);
            };
            return (
              <tr key={name}>
                <th scope="row">{title}</th>
                <td>{either((since) => mean(now, since ? before : undefined))}</td>
                {[0.5, 0.95, 0.99].map((wanted) => (
                  <td key={wanted}>{either((since) => quantile(all, since ? recent : new Map(), wanted))}</td>
                ))}
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function Totals({ metrics }: { metrics: Metrics }) {
  const ends = (metrics.get("vllm:request_success_total") ?? []).filter((sample) => sample.value > 0);
  const rows: [string, string][] = [
    ["prompt tokens", count(total(metrics, "vllm:prompt_tokens_total"))],
    ["tokens written", count(total(metrics, "vllm:generation_tokens_total"))],
    ["preemptions", count(total(metrics, "vllm:num_preemptions_total"))],
    ["steps", count(total(metrics, "llmjax:steps_total"))],
    ["memory of the server", `${(total(metrics, "process_resident_memory_bytes") / 2 ** 20).toFixed(0)} MiB`],
    ...ends.map(({ labels, value }): [string, string] => [`requests ended: ${labels["finished_reason"]}`, count(value)]),
  ];
  return (
    <dl class="totals">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}
