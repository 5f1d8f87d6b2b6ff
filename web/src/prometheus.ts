/** What /metrics says, read for the engine's tab. */

export interface Sample {
  labels: Record<string, string>;
  value: number;
}

export type Metrics = ReadonlyMap<string, Sample[]>;

const LINE = /^([\w:]+)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:\\.|[^"\\])*)"/g;

/** Samples by name, of the text format. */
export function parseMetrics(text: string): Metrics {
  const found = new Map<string, Sample[]>();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const labels: Record<string, string> = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name] = value.replace(/\\(.)/g, "$1");
    const value = match[3] === "+Inf" ? Infinity : Number(match[3]);
    const known = found.get(match[1]);
    if (known) known.push({ labels, value });
    else found.set(match[1], [{ labels, value }]);
  }
  return found;
}

/** The sum of a metric over engines. */
export function total(metrics: Metrics, name: string): number {
  return (metrics.get(name) ?? []).reduce((sum, sample) => sum + sample.value, 0);
}

/** How many values of a histogram are at or below each bound, over all engines. */
export function buckets(metrics: Metrics, name: string): Map<number, number> {
  const found = new Map<number, number>();
  for (const { labels, value } of metrics.get(`${name}_bucket`) ?? []) {
    const bound = labels["le"] === "+Inf" ? Infinity : Number(labels["le"]);
    found.set(bound, (found.get(bound) ?? 0) + value);
  }
  return found;
}

/** A quantile of what a histogram has counted since an earlier one, straight between bounds as Prometheus has it. */
export function quantile(now: Map<number, number>, before: Map<number, number>, share: number): number | undefined {
  const bounds = [...now.keys()].sort((a, b) => a - b);
  const counts = bounds.map((bound) => (now.get(bound) ?? 0) - (before.get(bound) ?? 0));
  const all = counts.at(-1) ?? 0;
  if (all <= 0) return undefined;
  const wanted = share * all;
  const index = counts.findIndex((count) => count >= wanted);
  if (bounds[index] === Infinity) return bounds[index - 1];
  const low = index > 0 ? bounds[index - 1] : 0;
  const below = index > 0 ? counts[index - 1] : 0;
  const inside = counts[index] - below;
  return low + (inside > 0 ? (wanted - below) / inside : 1) * (bounds[index] - low);
}
