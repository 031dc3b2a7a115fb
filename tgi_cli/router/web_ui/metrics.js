// What the server does, from the text of /metrics.
// https://prometheus.io/docs/instrumenting/exposition_formats/

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LE = /le="([^"]+)"/;

/** Values by name and labels as they are written; buckets by name as [upper bound, count]. */
export function parse(text) {
  const values = new Map();
  const buckets = new Map();
  for (const line of text.split("\n")) {
    if (!line || line[0] === "#") continue;
    const [, name, labels = "", value] = LINE.exec(line) ?? [];
    if (!name) continue;
    if (name.endsWith("_bucket")) {
      const base = name.slice(0, -"_bucket".length);
      const bound = LE.exec(labels)?.[1];
      if (!buckets.has(base)) buckets.set(base, []);
      buckets.get(base).push([bound === "+Inf" ? Infinity : Number(bound), Number(value)]);
    } else {
      values.set(labels ? `${name}{${labels}}` : name, Number(value));
    }
  }
  return { values, buckets };
}

/**
 * A quantile of the observations between two polls, interpolated within its bucket as Prometheus'
 * histogram_quantile does; null if there are none.
 */
export function quantile(q, buckets, earlier) {
  const before = new Map(earlier);
  const counts = buckets.map(([bound, count]) => [bound, count - (before.get(bound) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const rank = q * total;
  let lower = 0;
  let below = 0;
  for (const [bound, count] of counts) {
    if (count >= rank) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (rank - below)) / Math.max(count - below, 1);
    }
    [lower, below] = [bound, count];
  }
  return lower;
}

const TTFT = "tgi_request_time_to_first_token_seconds";
const GAP = "tgi_request_inter_token_seconds";

/** Samples of the last minutes, and figures between them. */
export class History {
  /** @param {number} seconds how long samples are kept */
  constructor(seconds) {
    this.seconds = seconds;
    this.samples = [];
    this.points = []; // of { time, running, waiting, ... }, or null where there is no figure
  }

  /** Take a sample: seconds of a steady clock, and the text. */
  add(time, text) {
    const sample = { time, ...parse(text) };
    const last = this.samples.at(-1);
    const total = "tgi_engine_steps_total";
    const restarted = last && sample.values.get(total) < last.values.get(total);
    if (restarted) this.samples = [];
    this.points.push(this.#point(sample, restarted ? undefined : last));
    this.samples.push(sample);
    while (this.samples[0].time < time - this.seconds) this.samples.shift();
    while (this.points[0].time < time - this.seconds) this.points.shift();
  }

  get latest() {
    return this.samples.at(-1);
  }

  #point(sample, last) {
    const value = (name) => sample.values.get(name) ?? 0;
    const increase = (name) => (last ? value(name) - (last.values.get(name) ?? 0) : 0);
    const rate = (total) => (last ? total / (sample.time - last.time) : null);
    const queries = increase("tgi_prefix_cache_query_tokens_total");
    const firsts = increase(`${TTFT}_count`);
    return {
      time: sample.time,
      running: value("tgi_batch_current_size"),
      waiting: value("tgi_queue_size"),
      // A token is the first of its sequence, or one after a gap.
      generated: rate(firsts + increase(`${GAP}_count`)),
      prompt: rate(increase("tgi_engine_prompt_tokens_total")),
      cache: value("tgi_kv_cache_usage_ratio"),
      hits: queries > 0 ? increase("tgi_prefix_cache_hit_tokens_total") / queries : null,
      first: firsts > 0 ? increase(`${TTFT}_sum`) / firsts : null,
    };
  }

  /** The increase of a counter over all samples; null with less than two. */
  increase(name) {
    const [oldest] = this.samples;
    if (this.samples.length < 2) return null;
    return (this.latest.values.get(name) ?? 0) - (oldest.values.get(name) ?? 0);
  }

  /** Mean seconds, or tokens, of a histogram over all samples; null if nothing was observed. */
  mean(name) {
    const count = this.increase(`${name}_count`);
    return count > 0 ? this.increase(`${name}_sum`) / count : null;
  }

  quantile(q, name) {
    if (this.samples.length < 2) return null;
    return quantile(q, this.latest.buckets.get(name) ?? [], this.samples[0].buckets.get(name) ?? []);
  }

  firstToken() {
    return { mean: this.mean(TTFT), p95: this.quantile(0.95, TTFT) };
  }

  tokenGap() {
    return { mean: this.mean(GAP), p95: this.quantile(0.95, GAP) };
  }

  /** The share of prompt tokens that were found in the prefix cache, or null. */
  hitRatio() {
    const queries = this.increase("tgi_prefix_cache_query_tokens_total");
    return queries > 0 ? this.increase("tgi_prefix_cache_hit_tokens_total") / queries : null;
  }
}
