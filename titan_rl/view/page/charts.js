// Curves and histograms, drawn by uPlot when they come into view.

const FIRST = ["rollout/reward_mean", "evaluation/exact_match", "train/entropy", "groups/equal_rewards", "rollout/length_mean", "rollout/truncated_share",
  "train/grad_norm", "train/kl_k3", "train/logprob_difference_mean", "staleness/age_mean", "rollout/tokens_per_second", "seconds/step"];
const FONT = '12px ui-sans-serif, system-ui, -apple-system, "Segoe UI", sans-serif';
const curves = { smoothing: 0, axis: "step", charts: new Map() };

/** Exponential moving average without the pull of its first value. */
function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

function drawCurves(data) {
  const names = Object.keys(data.series);
  if (!names.length) byId("charts").append(element("p", { class: "empty" }, "No step has ended."));
  const sections = new Map(names.length ? [["Key curves", FIRST.filter((name) => names.includes(name))]] : []);
  for (const name of names) {
    const section = name.split("/")[0];
    sections.set(section, [...(sections.get(section) ?? []), name]);
  }
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const chart = curves.charts.get(entry.target);
      chart.seen = entry.isIntersecting;
      if (chart.seen && (chart.stale || !chart.plot)) plot(chart);
    }
  }, { rootMargin: "300px" });
  for (const [section, members] of sections) {
    const grid = element("div", { class: "grid" });
    const all = element("details", { class: "metrics", open: section === "Key curves", "data-section": section },
      element("summary", {}, section === "Key curves" ? section : element("code", {}, section), element("small", {}, `${members.length}`)), grid);
    for (const name of members) {
      const chart = curveCard(data, name);
      curves.charts.set(chart.card, chart);
      grid.append(chart.card);
      watch.observe(chart.card);
    }
    byId("charts").append(all);
  }
  const refresh = () => { for (const chart of curves.charts.values()) { chart.stale = true; if (chart.seen) plot(chart); } };
  redraws.push(refresh);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  byId("smoothing").addEventListener("input", (event) => {
    curves.smoothing = Number(event.target.value);
    byId("smoothing-value").textContent = curves.smoothing ? curves.smoothing.toFixed(2) : "off";
    refresh();
  });
  choice(byId("axis"), (value) => { curves.axis = value; refresh(); });
  byId("metric-filter").addEventListener("input", (event) => filterMetrics(event.target.value.toLowerCase()));
}

function filterMetrics(wanted) {
  for (const section of document.querySelectorAll("details.metrics")) {
    let left = 0;
    for (const card of section.querySelectorAll(".card")) {
      card.hidden = !card.dataset.metric.toLowerCase().includes(wanted);
      left += !card.hidden;
    }
    section.hidden = !left;
    if (wanted) section.open = true;
  }
}

/** Opens and shows the first chart of a metric. */
function showMetric(name) {
  byId("metric-filter").value = "";
  filterMetrics("");
  const card = [...document.querySelectorAll(".card[data-metric]")].find((each) => each.dataset.metric === name);
  if (!card) return byId("curves").scrollIntoView();
  card.closest("details").open = true;
  card.scrollIntoView({ block: "center" });
  card.classList.remove("flash");
  void card.offsetWidth; // starts the animation again
  card.classList.add("flash");
}

function curveCard(data, name) {
  const metric = data.metrics[name];
  const unit = metric.unit ?? "";
  const now = element("div", { class: "now" });
  const body = element("div", { class: "plot" });
  const of = Math.max(...data.series[name].map((curve) => curve.of));
  const advice = metric.bad ? `${metric.bad}${metric.do ? ` → ${metric.do}` : ""}` : "";
  const log = element("button", { type: "button", class: "small", "aria-pressed": "false", click: () => {
    chart.log = !chart.log;
    log.setAttribute("aria-pressed", String(chart.log));
    plot(chart);
  } }, "log");
  const wide = element("button", { type: "button", class: "small", "aria-pressed": "false", title: "Full width", click: () => {
    wide.setAttribute("aria-pressed", String(chart.card.classList.toggle("wide")));
    plot(chart);
  } }, "⤢");
  wide.setAttribute("aria-label", `${name} in full width`);
  const card = element("figure", { class: "card", "data-metric": name },
    element("figcaption", {}, element("div", { class: "name" }, element("code", {}, name), unit ? element("span", { class: "unit" }, unit) : null),
      element("div", { class: "tools" }, log, wide)),
    metric.meaning ? element("p", { class: "meaning" }, ...prose(sentence(metric.meaning)), of > 1 ? ` Each point is the mean of ${of} steps.` : "") : null,
    now, body,
    advice ? element("details", { class: "advice" }, element("summary", {}, "What is bad, what to do"), element("p", {}, ...prose(sentence(advice)))) : null);
  const chart = { card, name, unit, body, now, data, log: false, plot: null, seen: false, stale: false };
  return chart;
}

const sentence = (text) => text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");

function plot(chart) {
  const { data, name } = chart;
  chart.stale = false;
  const shown = data.runs.map((_, run) => run).filter((run) => !state.hidden.has(run) && data.series[name][run].steps.length);
  const tables = [], series = [{}], raw = [];
  for (const run of shown) {
    const { steps, values } = data.series[name][run];
    const positive = chart.log ? values.map((value) => (value > 0 ? value : null)) : values;
    const x = curves.axis === "step" ? steps : seconds(data, run, steps);
    const colour = runColour(run);
    if (curves.smoothing) {
      tables.push([x, positive]);
      series.push({ stroke: faded(colour, 0.28), width: 1, points: { show: false } });
      raw.push(false);
    }
    tables.push([x, curves.smoothing ? smooth(positive, curves.smoothing) : positive]);
    series.push({ stroke: colour, width: 1.75, dash: runDash(run), spanGaps: false, points: { show: steps.length < 30, size: 5, fill: colour }, run });
    raw.push(true);
  }
  chart.plot?.destroy();
  chart.plot = null;
  const columns = tables.length ? uPlot.join(tables) : [[]];
  const values = columns.slice(1).flat().filter((value) => value !== null && value !== undefined);
  chart.now.replaceChildren();
  if (!values.length) { chart.body.replaceChildren(element("p", { class: "empty" }, chart.log ? "No value is above 0: a log scale has nothing to show." : "No values.")); return; }
  chart.body.replaceChildren();
  const negative = values.some((value) => value < 0);
  const range = chart.log ? undefined : (_, low, high) => {
    if (chart.unit === "share") return [0, high <= 1 ? 1 : high];
    if (!negative) return [0, high > 0 ? high * 1.08 : 1];
    const pad = (high - low || Math.abs(high) || 1) * 0.08;
    return [low - pad, high + pad];
  };
  const tell = (at) => chart.now.replaceChildren(...shown.map((run) => {
    const index = series.findIndex((each) => each.run === run);
    const column = columns[index];
    let place = at ?? column.length - 1;
    while (place > 0 && (column[place] === null || column[place] === undefined)) place--;
    return element("span", { title: data.runs[run].name }, data.runs.length > 1 ? element("i", { class: "swatch", style: `background:${runColour(run)}` }) : null,
      element("b", {}, number(column[place], chart.unit)), element("small", {}, curves.axis === "step" ? `step ${columns[0][place]}` : duration(columns[0][place])));
  }));
  const unit = chart.unit && chart.unit !== "share" ? chart.unit : "";
  const line = css("--line"), muted = css("--muted");
  chart.plot = new uPlot({
    width: chart.body.clientWidth, height: chart.card.classList.contains("wide") ? 340 : 176,
    legend: { show: false },
    padding: [8, curves.axis === "step" ? 16 : 24, 0, 0], // half of the last label reaches beyond the plot
    cursor: { sync: { key: `curves-${curves.axis}`, scales: ["x", null] }, y: false, points: { size: 7 } },
    scales: { x: { time: false }, y: chart.log ? { distr: 3 } : { range } },
    axes: [
      { stroke: muted, font: FONT, grid: { show: false }, ticks: { stroke: line, size: 4 }, size: 24, labelFont: FONT, labelSize: 18, label: curves.axis === "step" ? "optimizer step" : "time since the start", labelGap: 0, gap: 4,
        values: (_, ticks) => ticks.map((tick) => (curves.axis === "step" ? (Number.isInteger(tick) ? compact.format(tick) : "") : clock(tick, ticks[ticks.length - 1]))) },
      { stroke: muted, font: FONT, grid: { stroke: line, width: 1 }, ticks: { show: false }, size: 54, gap: 4, labelFont: FONT, labelSize: 16, labelGap: 0,
        label: [unit, chart.log ? "log scale" : ""].filter(Boolean).join(", ") || undefined,
        values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : chart.unit === "share" ? percent(tick) : axisNumber(tick))) },
    ],
    series,
    hooks: { setCursor: [(u) => tell(u.cursor.idx)] },
  }, columns, chart.body);
  tell(null);
}

const axisNumber = (value) => (value && Math.abs(value) < 1e-3 ? parseFloat(value.toPrecision(2)).toExponential().replace("e-", "e−") : Math.abs(value) >= 1e4 ? compact.format(value) : String(parseFloat(value.toPrecision(4))).replace(/^-/, "−"));
/** In the unit that suits `largest`, so that the ticks of an axis share one. */
const clock = (seconds_, largest = seconds_) => (largest >= 3600 ? `${parseFloat((seconds_ / 3600).toFixed(2))} h` : largest >= 120 ? `${parseFloat((seconds_ / 60).toFixed(1))} min` : `${parseFloat(seconds_.toFixed(1))} s`);

/** Seconds at which steps ended; of one without its own time, those of the step before. */
function seconds(data, run, steps) {
  const curve = data.seconds[run];
  let at = -1;
  return steps.map((step) => {
    while (at + 1 < curve.steps.length && curve.steps[at + 1] <= step) at++;
    return at < 0 ? 0 : curve.values[at];
  });
}

function drawHistograms(data) {
  const ages = Math.max(0, ...data.ages.map((shares) => shares.length));
  const place = byId("histograms");
  if (ages) place.append(histogram(data, "Age of trained samples", "optimizer steps between sampling and training", data.ages,
    Array.from({ length: ages }, (_, age) => String(age)), "share of trained samples, mean over the steps"));
  if ("rollout/trained_length_mean" in data.series) place.append(lengthTable(data));
  if (!place.children.length) place.append(element("p", { class: "empty" }, "No samples were trained."));
}

function lengthTable(data) {
  const mean = (run, name) => { const known = data.series[name]?.[run].values.filter((value) => value !== null) ?? []; return known.length ? known.reduce((sum, value) => sum + value) / known.length : null; };
  const row = (cell, ...texts) => element("tr", {}, ...texts.map((text) => element(cell, {}, text)));
  const rows = data.runs.flatMap((run, at) => [["sampled", ""], ["trained", "trained_"]].map(([which, kind]) =>
    row("td", `${data.runs.length > 1 ? `${run.name}, ` : ""}${which}`, ...["mean", "p50", "p95"].map((part) => number(mean(at, `rollout/${kind}length_${part}`))))));
  return element("figure", { class: "card" }, element("figcaption", {}, element("div", { class: "name" }, element("b", {}, "Sampled and trained lengths"))),
    element("p", { class: "meaning" }, "Tokens per rollout, mean over the steps. Rollouts that fail and groups that are filtered are sampled and not trained: where those are the long ones, the policy is trained on short answers alone."),
    element("table", { class: "lengths" }, row("th", "Rollouts", "mean", "median", "95%"), ...rows));
}

function histogram(data, title, label, shares, bins, about) {
  const now = element("div", { class: "now" });
  const body = element("div", { class: "plot" });
  const card = element("figure", { class: "card" }, element("figcaption", {}, element("div", { class: "name" }, element("b", {}, title))),
    element("p", { class: "meaning" }, sentence(about)), now, body);
  let plot_ = null;
  const draw = () => {
    const runs = shares.map((_, run) => run).filter((run) => shares[run].length && !state.hidden.has(run));
    const width = 0.8 / Math.max(1, runs.length);
    plot_?.destroy();
    const line = css("--line"), muted = css("--muted");
    const columns = [bins.map((_, bin) => bin), ...runs.map((run) => bins.map((_, bin) => shares[run][bin] ?? 0))];
    const tell = (at) => now.replaceChildren(...(at === null || at === undefined ? [element("small", {}, "Point at a bar.")] : [element("small", {}, `${bins[at]}:`), ...runs.map((run, index) =>
      element("span", { title: data.runs[run].name }, data.runs.length > 1 ? element("i", { class: "swatch", style: `background:${runColour(run)}` }) : null, element("b", {}, percent(columns[index + 1][at]))))]));
    plot_ = new uPlot({
      width: body.clientWidth, height: 210, legend: { show: false }, padding: [8, 8, 0, 0],
      cursor: { y: false, x: false, drag: { x: false }, points: { show: false } },
      scales: { x: { time: false, range: [-0.6, bins.length - 0.4] }, y: { range: (_, low, high) => [0, Math.max(high * 1.08, 0.01)] } },
      axes: [
        { stroke: muted, font: FONT, grid: { show: false }, ticks: { show: false }, size: 24, label, labelFont: FONT, labelSize: 18, labelGap: 0, gap: 4,
          splits: () => bins.map((_, bin) => bin).filter((bin) => bin % Math.ceil(bins.length / (body.clientWidth / 64)) === 0), values: (_, ticks) => ticks.map((bin) => bins[bin]) },
        { stroke: muted, font: FONT, grid: { stroke: line, width: 1 }, ticks: { show: false }, size: 54, gap: 4, values: (_, ticks) => ticks.map(percent) },
      ],
      series: [{}, ...runs.map((run, index) => ({ fill: faded(runColour(run), 0.85), stroke: runColour(run), width: 0, points: { show: false },
        paths: uPlot.paths.bars({ disp: {
          x0: { unit: 1, values: () => bins.map((_, bin) => bin - 0.4 + index * width) },
          size: { unit: 1, values: () => bins.map(() => width * 0.92) } } }) }))],
      hooks: { setCursor: [(u) => tell(u.cursor.idx)] },
    }, columns, body);
    tell(null);
  };
  redraws.push(draw);
  requestAnimationFrame(draw);
  return card;
}
