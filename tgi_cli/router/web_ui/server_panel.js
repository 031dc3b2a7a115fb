// The server's tab: what it does now, polled from /metrics while the tab is visible.

import * as api from "./api.js";
import { announce, byId, duration, h, number } from "./dom.js";
import { History } from "./metrics.js";
import { isShown, onPanel } from "./panel.js";
import { Sparkline } from "./sparkline.js";

const POLL_MS = 1000;
const SECONDS = 120; // that the lines show
const GAP_SECONDS = 10; // without samples, after which lines begin anew

const NONE = "–";
const rate = (value) => (value === null ? NONE : number(value, value < 10 && value > 0 ? 1 : 0));

function percent(share) {
  if (share === null) return NONE;
  if (share > 0 && share < 0.001) return "< 0.1 %";
  return `${number(100 * share, share > 0 && share < 0.1 ? 1 : 0)} %`;
}

const seconds = (value) => (value === null ? NONE : duration(value));

/** Tiles: a title, its lines, the figure and a remark, each of the history. */
const TILES = [
  {
    title: "Requests",
    series: ["running", "waiting"],
    top: 1,
    figure: ({ points }) => number(points.at(-1).running),
    unit: () => "running",
    remark: ({ points, latest }) => {
      const age = latest.values.get("tgi_queue_age_seconds") ?? 0;
      const { waiting } = points.at(-1);
      return `${number(waiting)} waiting${waiting && age ? `, the oldest for ${duration(age)}` : ""}`;
    },
    second: "waiting",
  },
  {
    title: "Tokens per second",
    series: ["generated", "prompt"],
    top: 10,
    figure: ({ points }) => rate(points.at(-1).generated),
    unit: () => "generated",
    remark: ({ points }) => `${rate(points.at(-1).prompt)} prompt tokens computed`,
    second: "prompt",
  },
  {
    title: "Time to first token",
    series: ["first"],
    top: 0.01,
    figure: (history) => seconds(history.firstToken().mean),
    unit: () => "mean",
    remark: (history) => {
      const { p95 } = history.firstToken();
      if (p95 === null) return "No answer has begun in this time";
      return `95 % within ${seconds(p95)} · ${seconds(history.tokenGap().mean)} per token`;
    },
  },
  {
    title: "KV cache",
    series: ["cache"],
    top: 1,
    figure: ({ points }) => percent(points.at(-1).cache),
    unit: () => "in use",
    remark: ({ latest: { values } }) => {
      const used = values.get("tgi_batch_current_max_tokens") ?? 0;
      return `${number(used)} of ${number(values.get("tgi_batch_max_total_tokens") ?? 0)} tokens`;
    },
  },
  {
    title: "Prefix cache",
    series: ["hits"],
    top: 1,
    figure: (history) => percent(history.hitRatio()),
    unit: () => "of prompt tokens found",
    remark: ({ latest: { values } }) =>
      `${number(values.get("tgi_prefix_cache_hit_tokens_total") ?? 0)} tokens since the start`,
  },
];

let history = new History(SECONDS);
let timer = null;
let polling = null;
const views = [];

export function startServerPanel() {
  const state = h("p", { class: "server-state" }, "Asking the server…");
  views.push(...TILES.map(tile));
  byId("server").replaceChildren(
    state,
    ...views.map(({ element }) => element),
    h(
      "p",
      { class: "fine" },
      `The last ${SECONDS / 60} minutes, of all clients. Figures come from `,
      h("a", { href: "metrics", target: "_blank", rel: "noopener" }, "/metrics"),
      ", each second while this tab is visible.",
    ),
  );
  const update = () => schedule(state);
  onPanel(update);
  document.addEventListener("visibilitychange", update);
  update();
}

function tile(definition) {
  const figure = h("strong");
  const unit = h("span", { class: "fine" });
  const remark = h("p", { class: "fine" });
  const chart = new Sparkline(`${definition.title}, the last minutes`, SECONDS, definition.series);
  const element = h(
    "section",
    { class: "tile", "aria-label": definition.title },
    h("h2", {}, definition.title),
    h("p", { class: "figure" }, figure, " ", unit),
    chart.element,
    remark,
  );
  return { definition, element, figure, unit, remark, chart };
}

/** Poll at once and then each second, or stop. */
function schedule(state) {
  if (!isShown("server")) {
    clearTimeout(timer);
    timer = null;
    polling?.abort();
    return;
  }
  if (timer === null) {
    timer = 0;
    poll(state);
  }
}

async function poll(state) {
  polling = new AbortController();
  try {
    const text = await api.metrics(AbortSignal.any([polling.signal, AbortSignal.timeout(10_000)]));
    const now = performance.now() / 1000;
    if (history.latest && now - history.latest.time > GAP_SECONDS) history = new History(SECONDS);
    history.add(now, text);
    setState(state, "good", readyFor(history.latest.values));
    views.forEach(show);
  } catch (error) {
    if (!polling.signal.aborted) setState(state, "bad", problem(error));
  }
  timer = isShown("server") ? setTimeout(poll, POLL_MS, state) : null;
}

const problem = ({ kind }) =>
  kind === "key" ? "The server needs an API key" : "The server does not answer";

function readyFor(values) {
  const start = values.get("process_start_time_seconds");
  return start ? `Running for ${duration(Math.max(Date.now() / 1000 - start, 0))}` : "Running";
}

function setState(state, kind, text) {
  const changed = !state.classList.contains(kind);
  if (changed && kind === "bad") announce(text);
  state.className = `server-state ${kind}`;
  state.textContent = text;
}

function show({ definition, figure, unit, remark, chart }) {
  figure.textContent = definition.figure(history);
  unit.textContent = definition.unit(history);
  remark.textContent = definition.remark(history);
  remark.classList.toggle("second", Boolean(definition.second));
  chart.draw(history.points, history.latest.time, definition.top);
}
