"use strict";
// Draws the charts of a report. The data is in the element "chart-data"; uPlot is above this script.
(() => {
  const data = JSON.parse(document.getElementById("chart-data").textContent);
  const HEIGHT = 230, TALL = 320, SMALL = 180; // of a chart, of the first one, and of one of many
  const FEW = 60; // points of a curve that are drawn as points, too
  const COLORS = 8; // of runs and ranks, in page.css
  const STEP_TICKS = Array.from({ length: 15 }, (_, n) => [1, 2, 5].map((digit) => digit * 10 ** n)).flat();
  const TIME_TICKS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30,
    ...[1, 2, 5, 10, 15, 30, 60, 120, 240, 480, 720].map((minutes) => 60 * minutes), ...STEP_TICKS.map((days) => 86400 * days)];
  const state = { x: "step", log: false, smoothing: 0 };
  const plots = new Map();
  const isCompared = data.names.length > 1;

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const runColor = (number) => color(`--run-${number % COLORS}`);
  const rankColor = (number) => color(`--rank-${number % COLORS}`);
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;

  function format(value) {
    if (value == null) return "–";
    const short = Number(value.toPrecision(7)), size = Math.abs(short);
    if (size && (size < 1e-3 || size >= 1e15)) return short.toExponential();
    return short.toLocaleString("en", { useGrouping: size >= 1e4, maximumFractionDigits: 10 });
  }

  function formatTick(value) {
    const size = Math.abs(value);
    if (size && (size < 1e-3 || size >= 1e15)) return value.toExponential().length <= 9 ? value.toExponential() : value.toExponential(3);
    return size >= 1e5 ? value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 6 }) : format(value);
  }

  // Hours, minutes and seconds; `step` is the distance of ticks, which may be a part of a second.
  function duration(seconds, step = 1) {
    const digits = step < 1 ? Math.min(3, Math.ceil(-Math.log10(step))) : 0;
    const total = Number(seconds.toFixed(digits)), minutes = Math.floor(total / 60) % 60, hours = Math.floor(total / 3600);
    const two = (value, places = 0) => value.toFixed(places).padStart(places ? places + 3 : 2, "0");
    return hours ? `${hours}:${two(minutes)}:${two(total % 60, digits)}` : `${minutes}:${two(total % 60, digits)}`;
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

  // The columns of one curve: x and y, without what a logarithmic axis cannot show, with a gap where the run paused.
  function columns(points, x, log, run, values = points.value) {
    const places = [...points[x]], shown = values.map((value) => (log && !(value > 0) ? null : value));
    for (const mark of x === "time" ? data.marks : []) {
      const at = mark.run === run ? places.findIndex((place) => place >= mark.time) : -1;
      if (at <= 0) continue;
      places.splice(at, 0, (places[at - 1] + places[at]) / 2);
      shown.splice(at, 0, null);
    }
    return [places, shown];
  }

  // All charts over steps begin and end at the same step, and those over time at the same time.
  const ends = { step: [Infinity, -Infinity], time: [Infinity, -Infinity] };
  for (const chart of Object.values(data.charts)) {
    for (const series of chart.series) {
      for (const x of ["step", "time"]) {
        if (!series[x]?.length || (x === "step" && chart.x === "time") || (x === "time" && chart.isDifference)) continue;
        ends[x] = [Math.min(ends[x][0], series[x][0]), Math.max(ends[x][1], series[x].at(-1))];
      }
    }
  }

  function label(chart, series) {
    const run = isCompared && chart.x !== "time" ? data.names[series.run] : ""; // which the title has
    return [run, series.label].filter(Boolean).join(" ") || chart.title;
  }

  // What the legend shows of a curve: the value at the pointer, or the last one. `lost` has the values that no axis can show.
  function legendValue(points, x, values = points.value) {
    const lost = new Map(Object.entries(points.notFinite ?? {}).map(([at, text]) => [points[x][at], text]));
    const last = values.findLast((value) => value != null);
    return (u, value, series, at) => (at == null ? format(last) : value == null ? (lost.get(u.data[0][at]) ?? "–") : format(value));
  }

  function build(chart) {
    const x = chart.x === "time" ? "time" : state.x;
    const log = state.log || chart.log;
    const tables = [], lines = [];
    chart.series.filter((series) => series[x]).forEach((series, index) => {
      // Ranks of one of several runs must not have the color of another run.
      const isRank = isCompared && series.label;
      const stroke = series.isForecast ? color("--soft") : isRank ? rankColor(index) : runColor(isCompared ? series.run : index);
      const smoothed = state.smoothing > 0 && !chart.log && !series.isForecast;
      const points = columns(series, x, log, series.run);
      // The first of several runs is a broad line below the others, so that equal curves are both seen.
      const isBelow = isCompared && series.run === 0 && !series.label && !chart.log && !smoothed;
      tables.push(points);
      lines.push({
        label: label(chart, series), stroke, value: legendValue(series, x), spanGaps: Boolean(chart.log || series.isForecast),
        width: isBelow ? 4 : smoothed ? 1 : 1.6, alpha: isBelow ? 0.5 : smoothed ? 0.3 : 1, dash: series.isForecast ? [6, 4] : undefined,
        points: { size: 5, show: !series.isForecast && points[1].filter((value) => value != null).length <= (series.label ? 1 : FEW) },
      });
      if (smoothed) {
        const source = series.means ?? series, values = smooth(source, state.smoothing);
        tables.push(columns(source, x, log, series.run, values));
        lines.push({ label: `${label(chart, series)} (smoothed)`, stroke, value: legendValue(source, x, values), width: 2, points: { show: false } });
      }
    });
    const hasValues = tables.some(([, values]) => values.some((value) => value != null));
    const joined = tables.length ? uPlot.join([...tables, [ends[x], [null, null]]]).slice(0, -1) : [[]];
    return { x, log, lines, hasValues, columns: joined };
  }

  // The part of the x axis that was zoomed to, if it has the same unit.
  function zoomOf(plot, x) {
    const values = plot?.data[0];
    if (!values?.length || plot.unit !== x) return null;
    const { min, max } = plot.scales.x;
    return min > values[0] || max < values.at(-1) ? { min, max } : null;
  }

  function draw(element, keepsZoom = true) {
    const chart = data.charts[element.dataset.chart];
    const built = build(chart);
    const before = plots.get(element), zoom = keepsZoom ? zoomOf(before, built.x) : null;
    before?.destroy();
    const axis = { stroke: color("--soft"), font, labelFont: font, grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), size: 5 } };
    const isTime = built.x === "time";
    const last = Math.max(...chart.series.map((series) => series[built.x]?.at(-1) ?? -Infinity));
    const formatX = (value, step) => (value == null ? "–" : isTime ? duration(value, step) : value.toLocaleString("en"));
    const fromZero = (u, least, most) => [Math.min(0, least), most > 0 ? most * 1.15 : 1]; // noise must not look like a leak
    const plot = new uPlot(
      {
        width: Math.max(240, element.clientWidth),
        height: element.closest(".wide") ? TALL : element.closest(".small") ? SMALL : HEIGHT,
        padding: [12, 24, 0, 0],
        scales: { x: { time: false }, y: { distr: built.log ? 3 : 1, ...(chart.x === "time" && !built.log ? { range: fromZero } : {}) } },
        series: [{ label: built.x, value: (_, value, series, at) => formatX(at == null ? last : value) }, ...built.lines],
        axes: [
          { ...axis, values: (_, ticks) => ticks.map((tick) => formatX(tick, ticks[1] - ticks[0])), incrs: isTime ? TIME_TICKS : STEP_TICKS, label: isTime ? "time since the start" : "step", labelSize: 18, labelGap: 0, size: 32 },
          { ...axis, size: (u, texts) => Math.max(62, 18 + 7.5 * Math.max(...(texts ?? []).map((text) => text.length))), values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : formatTick(tick))) },
        ],
        legend: { markers: { width: 0, fill: (u, index) => built.lines[index - 1]?.stroke } },
        cursor: { sync: { key: built.x }, drag: { x: true, y: false } },
        hooks: { draw: [(u) => drawMarks(u, chart, built), (u) => drawLost(u, chart, built.x), (u) => drawLargest(u, chart)] },
      },
      built.columns,
      element,
    );
    plot.unit = built.x;
    if (zoom) plot.setScale("x", zoom);
    element.querySelector(".u-legend").createCaption().textContent = `${chart.title}: values at the pointer, or the last ones`;
    element.setAttribute("role", "img");
    element.setAttribute("aria-label", `${chart.title} over ${built.x}; the table of values has its last, smallest and largest value`);
    plots.set(element, plot);
  }

  // Dashed lines where a run started again, with a text where there is space for it.
  function drawMarks(u, chart, built) {
    const runs = new Set(chart.series.map((series) => series.run));
    const { ctx, bbox } = u, right = bbox.left + bbox.width, gap = 5 * devicePixelRatio;
    ctx.save();
    ctx.font = `${11 * devicePixelRatio}px ${getComputedStyle(document.body).fontFamily}`;
    ctx.textAlign = "left";
    ctx.textBaseline = "alphabetic";
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    let free = bbox.left; // until here a text is drawn already
    for (const mark of data.marks) {
      if (!runs.has(mark.run)) continue;
      const at = u.valToPos(mark[built.x], "x", true);
      if (at < bbox.left || at > right) continue;
      ctx.strokeStyle = ctx.fillStyle = isCompared ? runColor(mark.run) : color("--soft");
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
      const width = ctx.measureText(mark.text).width;
      const left = at + gap + width <= right ? at + gap : at - gap - width;
      if (left < free) continue;
      ctx.fillStyle = color("--card"); // behind the text, over the curves
      ctx.fillRect(left - gap / 2, bbox.top, width + gap, 15 * devicePixelRatio);
      ctx.fillStyle = ctx.strokeStyle;
      ctx.fillText(mark.text, left, bbox.top + 11 * devicePixelRatio);
      free = left + width + gap;
    }
    if (!built.hasValues) {
      ctx.fillStyle = color("--soft");
      ctx.fillText(built.log ? "no values above 0" : "no finite values", bbox.left + gap, bbox.top + bbox.height / 2);
    }
    ctx.restore();
  }

  // Red ticks above the axis where values are NaN or infinite.
  function drawLost(u, chart, x) {
    const { ctx, bbox } = u, bottom = bbox.top + bbox.height;
    ctx.save();
    ctx.fillStyle = color("--bad");
    for (const series of chart.series) {
      for (const index of Object.keys(series.notFinite ?? {})) {
        const at = u.valToPos(series[x]?.[index] ?? NaN, "x", true);
        if (at >= bbox.left && at <= bbox.left + bbox.width) ctx.fillRect(at - devicePixelRatio, bottom - 8 * devicePixelRatio, 2 * devicePixelRatio, 8 * devicePixelRatio);
      }
    }
    ctx.restore();
  }

  // A ring around the largest difference of each run.
  function drawLargest(u, chart) {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.lineWidth = 2 * devicePixelRatio;
    for (const series of chart.isDifference ? chart.series : []) {
      const largest = series.value.indexOf(series.value.reduce((one, other) => Math.max(one, other ?? 0), 0));
      const at = u.valToPos(series.step[largest], "x", true), y = u.valToPos(series.value[largest], "y", true);
      if (at < bbox.left || at > bbox.left + bbox.width) continue;
      ctx.strokeStyle = runColor(series.run);
      ctx.beginPath();
      ctx.arc(at, y, 6 * devicePixelRatio, 0, 2 * Math.PI);
      ctx.stroke();
    }
    ctx.restore();
  }

  // Charts that can be seen are drawn immediately, the others when the browser is idle.
  const elements = [...document.querySelectorAll("[data-chart]")];
  const later = window.requestIdleCallback ?? ((callback) => setTimeout(callback, 0));
  let round = 0;

  function isVisible(element) {
    const { top, bottom } = element.getBoundingClientRect();
    return bottom > 0 && top < window.innerHeight;
  }

  function drawAll(keepsZoom = true) {
    const own = ++round, rest = [];
    document.body.removeAttribute("data-drawn"); // for tests, as are the others
    for (const element of elements) isVisible(element) ? draw(element, keepsZoom) : rest.push(element);
    if (own === 1) {
      if (elements.length && rest.length === elements.length) draw(rest.shift(), keepsZoom);
      document.body.setAttribute("data-first-chart", String(performance.now()));
    }
    const next = () => {
      if (own !== round) return; // something has changed since
      if (!rest.length) return document.body.setAttribute("data-drawn", "all");
      draw(rest.shift(), keepsZoom);
      later(next);
    };
    next();
  }

  function change(update) {
    return (event) => {
      update(event.target);
      drawAll();
    };
  }

  const controls = document.querySelector(".controls");
  document.getElementById("filter")?.addEventListener("input", ({ target }) => {
    const words = target.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const figure of document.querySelectorAll("#curves figure")) {
      const title = figure.querySelector("figcaption").textContent.toLowerCase();
      figure.hidden = !words.every((word) => title.includes(word));
    }
    for (const group of document.querySelectorAll(".group")) group.hidden = !group.querySelector("figure:not([hidden])");
  });
  controls?.addEventListener("submit", (event) => event.preventDefault());
  controls?.querySelectorAll("input[name=x]").forEach((input) =>
    input.addEventListener("change", change((target) => { state.x = target.value; })));
  document.getElementById("log")?.addEventListener("change", change((target) => { state.log = target.checked; }));
  document.getElementById("smoothing")?.addEventListener("input", change((target) => { state.smoothing = target.value / 100; }));
  document.getElementById("reset")?.addEventListener("click", () => drawAll(false));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
  new ResizeObserver(() => {
    for (const [element, plot] of plots) {
      const width = Math.max(240, element.clientWidth);
      if (width !== plot.width) plot.setSize({ width, height: plot.height });
    }
  }).observe(document.body);

  // What a bar or a mark stands for appears at once, also after a tap; without this script the browser shows the title.
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  for (const title of document.querySelectorAll("main svg title")) {
    title.parentNode.dataset.tip = title.textContent;
    title.remove();
  }
  document.addEventListener("pointerover", (event) => {
    const text = event.target.dataset?.tip;
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const box = event.target.getBoundingClientRect();
    const left = Math.min(event.clientX, window.innerWidth - tip.offsetWidth - 8);
    const top = box.top - tip.offsetHeight - 6;
    // The policy of the page forbids attributes with styles; a script may set single properties.
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${top > 0 ? top : box.bottom + 6}px`;
  });
  drawAll();
})();
