"use strict";
// Draws the charts of a report. The data is in the element "chart-data"; uPlot is above this script.
(() => {
  const data = JSON.parse(document.getElementById("chart-data").textContent);
  const HEIGHT = 220;
  const FEW = 60; // points that are drawn as points, too
  const FIRST = 4; // charts that are drawn immediately; the others follow when the browser is idle
  const state = { x: "step", log: false, smoothing: 0 };
  const plots = new Map();

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runColor = (number) => color(`--run-${number % 6}`);
  const number = (value) => (value == null ? "–" : Number(value.toPrecision(7)).toString());

  function duration(seconds) {
    const total = Math.round(seconds), minutes = Math.floor(total / 60) % 60, hours = Math.floor(total / 3600);
    const two = (value) => String(value).padStart(2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(total % 60)}` : `${minutes}:${two(total % 60)}`;
  }

  // An exponential moving average without the bias of its start. Of a long curve it averages the means of its buckets.
  function smooth(points, factor) {
    let sum = 0, weight = 0;
    return points.value.map((value) => {
      if (value == null) return null;
      sum = factor * sum + (1 - factor) * value;
      weight = factor * weight + (1 - factor);
      return sum / weight;
    });
  }

  // The columns of one curve: x and y, without what a logarithmic axis cannot show.
  function columns(points, x, log, values = points.value) {
    return [points[x], values.map((value) => (log && !(value > 0) ? null : value))];
  }

  function label(chart, series) {
    const run = data.names.length > 1 ? data.names[series.run] : "";
    return [run, series.label].filter(Boolean).join(" ") || chart.title;
  }

  // Colors of runs if there are several, otherwise one per curve.
  function stroke(series, index) {
    return runColor(data.names.length > 1 && !series.label ? series.run : index);
  }

  function build(chart) {
    const x = chart.x === "time" ? "time" : state.x;
    const log = state.log || chart.log;
    const tables = [], lines = [];
    const usable = chart.series.filter((series) => series[x]);
    usable.forEach((series, index) => {
      const line = { label: label(chart, series), stroke: stroke(series, index), value: (_, value) => number(value) };
      const smoothed = state.smoothing > 0 && !chart.log;
      tables.push(columns(series, x, log));
      const few = tables.at(-1)[1].filter((value) => value != null).length <= FEW;
      lines.push({
        ...line, width: smoothed ? 1 : 1.6, alpha: smoothed ? 0.3 : 1, spanGaps: Boolean(chart.log), points: { size: 4, show: few },
      });
      if (smoothed) {
        const source = series.means ?? series;
        tables.push(columns(source, x, log, smooth(source, state.smoothing)));
        lines.push({ ...line, label: `${line.label} (smoothed)`, width: 2, points: { show: false } });
      }
    });
    return { x, log, lines, columns: tables.length ? uPlot.join(tables) : [[]] };
  }

  function draw(element) {
    const chart = data.charts[element.dataset.chart];
    const built = build(chart);
    plots.get(element)?.destroy();
    const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line") } };
    const xValues = (_, ticks) => ticks.map((tick) => (built.x === "time" ? duration(tick) : tick.toLocaleString("en")));
    const plot = new uPlot(
      {
        width: Math.max(240, element.clientWidth),
        height: HEIGHT,
        scales: { x: { time: false }, y: { distr: built.log ? 3 : 1 } },
        series: [
          { label: built.x, value: (_, value) => (value == null ? "–" : built.x === "time" ? duration(value) : String(value)) },
          ...built.lines,
        ],
        axes: [
          { ...axis, values: xValues },
          { ...axis, size: 70, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : number(tick))) },
        ],
        cursor: { sync: { key: built.x }, drag: { x: true, y: false } },
        hooks: { draw: [(u) => drawMarks(u, chart, built.x)] },
      },
      built.columns,
      element,
    );
    element.querySelector(".u-legend").createCaption().textContent = `${chart.title}: values at the pointer`;
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", `${chart.title} over ${built.x}; the table of last values has its result`);
    plots.set(element, plot);
  }

  // Dashed lines where a run started again.
  function drawMarks(u, chart, x) {
    const runs = new Set(chart.series.map((series) => series.run));
    const { ctx, bbox } = u;
    ctx.save();
    ctx.setLineDash([4, 4]);
    for (const mark of data.marks) {
      if (!runs.has(mark.run)) continue;
      const at = u.valToPos(mark[x], "x", true);
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = data.names.length > 1 ? runColor(mark.run) : color("--soft");
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(mark.text, at + 4, bbox.top + 12);
    }
    ctx.restore();
  }

  const elements = [...document.querySelectorAll("[data-chart]")];
  const later = window.requestIdleCallback ?? ((callback) => setTimeout(callback, 0));

  function drawAll() {
    elements.slice(0, FIRST).forEach(draw);
    document.body.setAttribute("data-first-chart", String(performance.now())); // for tests
    const rest = elements.slice(FIRST);
    const next = () => {
      if (!rest.length) return document.body.setAttribute("data-drawn", "all");
      draw(rest.shift());
      later(next);
    };
    next();
  }

  function change(update) {
    return (event) => {
      update(event.target);
      elements.forEach(draw);
    };
  }

  const controls = document.querySelector(".controls");
  controls?.addEventListener("submit", (event) => event.preventDefault());
  controls?.querySelectorAll("input[name=x]").forEach((input) =>
    input.addEventListener("change", change((target) => { state.x = target.value; })));
  document.getElementById("log")?.addEventListener("change", change((target) => { state.log = target.checked; }));
  document.getElementById("smoothing")?.addEventListener("input", change((target) => { state.smoothing = target.value / 100; }));
  document.getElementById("reset")?.addEventListener("click", () => elements.forEach(draw));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => elements.forEach(draw));
  new ResizeObserver(() => {
    for (const [element, plot] of plots) {
      const width = Math.max(240, element.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
  }).observe(document.body);
  drawAll();
})();
