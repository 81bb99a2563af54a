// Charts of TTFT, ITL, throughput, queue and cache hits over time, by uPlot.
import { useEffect, useRef } from "preact/hooks";
import { useMesh } from "./feed.js";
import { short } from "./format.js";
import { html } from "./html.js";

const HEIGHT = 150;
const MISSING_S = 5; // a longer gap between two samples is not bridged by a line
const CHARTS = [
  { title: "Time to first token", unit: "ms", lines: [["p50", (s) => s.ttft?.[0]], ["p95", (s) => s.ttft?.[1]]] },
  { title: "Between two tokens", unit: "ms", lines: [["p50", (s) => s.itl?.[0]], ["p95", (s) => s.itl?.[1]]] },
  { title: "Throughput", unit: "tokens/s", lines: [["generated", (s) => s.out], ["prompts", (s) => s.in]] },
  { title: "Requests", unit: "", lines: [["running", (s) => s.running], ["in the queue", (s) => s.waiting]] },
  { title: "Prompt tokens found in the prefix cache", unit: "%", lines: [["hits", (s) => s.hit == null ? null : 100 * s.hit]], top: 100 },
  { title: "Requests ended", unit: "per second", lines: [["all", (s) => s.req], ["failed", (s) => s.fail]] },
];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function columns(chart, samples) {
  const all = samples.flatMap((s, i) => (i && s.t - samples[i - 1].t > MISSING_S ? [{ t: samples[i - 1].t + 1 }, s] : [s]));
  return [all.map((s) => s.t), ...chart.lines.map(([, value]) => all.map((s) => value(s) ?? null))];
}

// Returns values without neighbours, which are drawn as points because no line leads to them.
function singles(plot, line) {
  const values = plot.data[line];
  return values.flatMap((value, i) => (value != null && values[i - 1] == null && values[i + 1] == null ? [i] : []));
}

function times(_, marks) {
  const isShort = marks.length > 1 && marks[1] - marks[0] < 60;
  return marks.map((t) => new Date(t * 1000).toLocaleTimeString("en-GB").slice(0, isShort ? 8 : 5));
}

function options(chart, width) {
  const axis = {
    stroke: colour("--soft"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  return {
    width,
    height: HEIGHT,
    legend: { show: false },
    cursor: { sync: { key: "load" }, points: { size: 5 }, drag: { x: false, y: false } },
    scales: { y: { range: (_, low, high) => [0, chart.top || Math.max(high * 1.1, low, 1)] } },
    axes: [
      { ...axis, size: 24, values: times, space: 80 },
      { ...axis, size: 46, values: (_, values) => values.map(short), space: 30 },
    ],
    series: [
      {},
      ...chart.lines.map(([label], i) => ({ label, stroke: colour(`--series-${i + 1}`), width: 1.5, points: { show: false, filter: singles } })),
    ],
  };
}

function Chart({ chart, samples }) {
  const box = useRef(null);
  const plot = useRef(null);
  const latest = useRef(samples);
  latest.current = samples;
  useEffect(() => {
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const draw = () => {
      plot.current?.destroy();
      plot.current = new window.uPlot(options(chart, box.current.clientWidth), columns(chart, latest.current), box.current);
    };
    draw();
    const place = box.current;
    const watch = new ResizeObserver(() => plot.current?.setSize({ width: place.clientWidth, height: HEIGHT }));
    watch.observe(place);
    scheme.addEventListener("change", draw);
    return () => {
      watch.disconnect();
      scheme.removeEventListener("change", draw);
      plot.current.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(() => plot.current.setData(columns(chart, samples)), [samples]);
  const now = chart.lines.map(([label, value]) => {
    const last = [...samples].reverse().find((s) => value(s) != null);
    return [label, last ? short(value(last)) : "–"];
  });
  const words = now.map(([label, value]) => `${label} ${value}`).join(", ");
  return html`<figure class="chart">
    <figcaption>
      <span class="title">${chart.title}${chart.unit && html` <small>${chart.unit}</small>`}</span>
      ${now.map(([label, value], i) => html`<span key=${label} class="now"><i class=${`line s${i + 1}`}></i>${label} <b>${value}</b></span>`)}
    </figcaption>
    <div ref=${box} class="plot" role="img" aria-label=${`${chart.title} over the last minutes, now ${words} ${chart.unit}`}></div>
  </figure>`;
}

export function Load() {
  const { samples, instances } = useMesh();
  const frontends = [...instances.values()].filter((of) => of.role === "frontend").length;
  return html`<div class="load">
    <div class="bar-of-lists">
      <h1>Load</h1>
      <span class="soft">the last quarter of an hour${frontends > 1 ? `, ${frontends} frontends together` : ""}</span>
    </div>
    ${samples.length < 2 && html`<p class="none">The first figures appear in a few seconds.</p>`}
    <div class="charts">${CHARTS.map((chart) => html`<${Chart} key=${chart.title} chart=${chart} samples=${samples} />`)}</div>
  </div>`;
}
