// Live figures out of /metrics: rates and percentiles of the last minute, and how things stand now.

const PERIOD_MS = 2000;
const WINDOW = 30;
const SHOWN = new Set([
  "vllm:time_to_first_token_seconds_bucket",
  "vllm:inter_token_latency_seconds_bucket",
  "vllm:generation_tokens_total",
  "vllm:prefix_cache_hits_total",
  "vllm:prefix_cache_queries_total",
  "vllm:num_requests_running",
  "vllm:num_requests_waiting",
  "vllm:kv_cache_usage_perc",
  "vllm:num_preemptions_total",
  "antiphon:num_adapters_resident",
  "antiphon:log_lines_dropped_total", // every gateway has it
]);
const COUNTED = [...SHOWN].filter((name) => /_(total|bucket)$/.test(name));
const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function watch(live, server) {
  const history = [];
  const look = async () => {
    // Nobody watches a page that is not shown.
    if (!document.hidden) {
      try {
        const response = await fetch("metrics");
        if (!response.ok) throw new Error(`status ${response.status}`);
        const now = { at: performance.now(), samples: parse(await response.text()) };
        if (history.length && hasRestarted(history.at(-1).samples, now.samples)) history.length = 0;
        history.push(now);
        if (history.length > WINDOW) history.shift();
        show(live, server, history);
      } catch (error) {
        live.replaceChildren(...figure("live figures", error instanceof TypeError ? "no connection" : error.message));
        server.replaceChildren();
      }
    }
    setTimeout(look, PERIOD_MS);
  };
  look();
}

function show(live, server, history) {
  const now = history.at(-1).samples;
  const rate = (name) => growth(history, name) / Math.max(0.001, (history.at(-1).at - history[0].at) / 1000);
  const hits = growth(history, "vllm:prefix_cache_hits_total");
  const looked = growth(history, "vllm:prefix_cache_queries_total");
  const percent = (share) => (Number.isFinite(share) ? `${(100 * share).toFixed(0)} %` : "–");
  live.replaceChildren(
    ...figure("TTFT p50 / p95", both(history, "vllm:time_to_first_token_seconds")),
    ...figure("ITL p50 / p95", both(history, "vllm:inter_token_latency_seconds")),
    ...figure("tokens/s", rate("vllm:generation_tokens_total").toFixed(0)),
    ...figure("running / waiting", `${sum(now, "vllm:num_requests_running")} / ${sum(now, "vllm:num_requests_waiting")}`),
    ...figure("prefix cache hits", percent(hits / looked)),
  );
  const engines = now.filter(({ name }) => name === "vllm:num_requests_running").map(({ labels }) => labels);
  const table = document.createElement("table");
  const row = (name, value) => {
    const line = table.insertRow();
    line.insertCell().textContent = name;
    line.insertCell().textContent = value;
  };
  for (const { model_name, engine } of engines) {
    const of = (name) => now.find((s) => s.name === name && s.labels.engine === engine)?.value ?? 0;
    row(`${model_name}, replica ${engine.slice(-6)}: KV cache in use`, percent(of("vllm:kv_cache_usage_perc")));
    row("adapters on the device", of("antiphon:num_adapters_resident"));
    row("preemptions", of("vllm:num_preemptions_total"));
  }
  row("gateways", new Set(now.filter(({ labels }) => labels.gateway).map(({ labels }) => labels.gateway)).size);
  server.replaceChildren(table);
}

function parse(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    // With thousands of adapters, most samples are theirs.
    if (!found || !SHOWN.has(found[1])) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, key, value]) => [key, value]));
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

const sum = (samples, name) => samples.reduce((total, s) => (s.name === name ? total + s.value : total), 0);

// A process that starts counts from zero, and one that ends takes its counts along: neither is growth.
const hasRestarted = (before, now) => COUNTED.some((name) => sum(now, name) < sum(before, name));

function growth(history, name) {
  return Math.max(0, sum(history.at(-1).samples, name) - sum(history[0].samples, name));
}

// Percentiles of what a histogram has gained, read off the upper edges of its buckets.
function both(history, name) {
  const gained = new Map();
  for (const [sign, { samples }] of [[1, history.at(-1)], [-1, history[0]]])
    for (const { name: found, labels, value } of samples)
      if (found === `${name}_bucket`) gained.set(labels.le, (gained.get(labels.le) ?? 0) + sign * value);
  const buckets = [...gained].map(([edge, count]) => [edge === "+Inf" ? Infinity : Number(edge), count]);
  buckets.sort(([a], [b]) => a - b);
  const total = buckets.at(-1)?.[1] ?? 0;
  if (!total) return "–";
  const at = (share) => buckets.find(([, count]) => count >= share * total)[0];
  const told = (seconds) => (Number.isFinite(seconds) ? `≤ ${seconds >= 1 ? `${seconds} s` : `${Math.round(1000 * seconds)} ms`}` : "more");
  return `${told(at(0.5))} / ${told(at(0.95))}`;
}

function figure(name, value) {
  const box = document.createElement("div");
  box.append(
    Object.assign(document.createElement("dt"), { textContent: name }),
    Object.assign(document.createElement("dd"), { textContent: value }),
  );
  return [box];
}
