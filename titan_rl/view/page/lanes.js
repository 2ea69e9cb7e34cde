// What every mesh did over the time of a run: a stacked share of each bin of time per mesh. Waits are pale and striped.

const LANE_HEIGHT = 46;
const START = "start", START_COLOUR = "#a7adb5";

function drawLanes(data) {
  const runs = data.timelines.map((windows, run) => run).filter((run) => data.timelines[run].length);
  const hint = byId("lane-hint");
  if (!runs.length) {
    hint.textContent = "The runs have no spans: they were made by an older version, or ended before they began to work.";
    return;
  }
  hint.textContent = "A lane per mesh, the mean over its ranks. Height is the share of each moment, from 0 to 100%; stripes name whom a mesh waits for itself, findings whom those wait for in turn. Idle shares are of the time between the first and the last step. Every single span is in the run's directory spans.";
  let run = runs[0], window_ = 0;
  const draw = () => byId("lanes").replaceChildren(...lanesOf(data.timelines[run][Math.min(window_, data.timelines[run].length - 1)]));
  if (runs.length > 1) byId("lane-run").append(select("Run", runs.map((each) => [String(each), data.runs[each].name]), (value) => { run = Number(value); draw(); }));
  const windows = data.timelines[run].map((each, index) => [String(index), sentence(each.window).slice(0, -1)]);
  if (windows.length > 1) byId("lane-run").append(buttons("Window of time", windows, "0", (value) => { window_ = Number(value); draw(); }));
  redraws.push(draw);
  draw();
}

/** Lane → kind → colour: the kinds that took longest have colours of their own, the same in all lanes of one sort. */
function laneColours(lanes) {
  const sort = (lane) => lane.mesh.replace(/_?\d+$/, "");
  const totals = new Map();
  for (const lane of lanes) for (const kind of lane.kinds) {
    if (kind.waits_for) continue;
    const of = totals.get(sort(lane)) ?? totals.set(sort(lane), new Map()).get(sort(lane));
    of.set(kind.name, (of.get(kind.name) ?? 0) + kind.share);
  }
  return (lane) => {
    const names = [...(totals.get(sort(lane)) ?? [])].sort((a, b) => b[1] - a[1]).map(([name]) => name).filter((name) => name !== START);
    return new Map([[START, START_COLOUR], ...names.map((name, index) => [name, KIND_COLOURS[Math.min(index, KIND_COLOURS.length - 1)]])]);
  };
}

function lanesOf(timeline) {
  const coloursOf = laneColours(timeline.lanes);
  const lanes = timeline.lanes.map((lane) => {
    const colours = coloursOf(lane);
    const idle = lane.account && percent(Object.values(lane.account.waits).reduce((sum, share) => sum + share, 0));
    const canvas = element("canvas", { height: LANE_HEIGHT, role: "img", "aria-label": `${lane.mesh}: idle ${idle ?? "unknown"}` });
    const told = element("p", { class: "told" });
    const key = (kind, share) => element("span", {}, element("i", { class: kind.waits_for ? "swatch waiting" : "swatch", style: kind.waits_for ? null : `background:${colours.get(kind.name)}` }),
      `${kind.waits_for ? `waits for ${kind.waits_for}` : kind.name} ${share < 0.005 ? "<1" : Math.round(100 * share)}%`);
    const whole = () => told.replaceChildren(...lane.kinds.map((kind) => key(kind, kind.share)));
    const tell = (event) => {
      const box = canvas.getBoundingClientRect();
      const bins = lane.kinds[0]?.shares.length ?? 1;
      const bin = Math.max(0, Math.min(bins - 1, Math.floor(((event.clientX - box.left) / box.width) * bins)));
      const there = lane.kinds.filter((kind) => kind.shares[bin] >= 0.005);
      told.replaceChildren(element("b", {}, `at ${clock(timeline.start + (bin / bins) * timeline.seconds)}`), ...(there.length ? there.map((kind) => key(kind, kind.shares[bin])) : ["not running"]));
    };
    canvas.addEventListener("pointermove", tell);
    canvas.addEventListener("pointerdown", tell);
    canvas.addEventListener("pointerleave", whole);
    whole();
    requestAnimationFrame(() => paintLane(canvas, lane, colours));
    return element("div", { class: "lane" },
      element("div", { class: "lane-name" }, element("b", {}, lane.mesh),
        element("small", {}, `${lane.ranks > 1 ? `${lane.ranks} ranks, ` : ""}${idle === null ? "" : `idle ${idle}`}`)),
      element("div", { class: "lane-plot" }, canvas, told));
  });
  const ticks = Array.from({ length: 6 }, (_, tick) => element("span", {}, clock(timeline.start + (timeline.seconds * tick) / 5, timeline.start + timeline.seconds)));
  return [...lanes, element("div", { class: "lane time-axis" }, element("div", { class: "lane-name" }, element("small", {}, "time since the start")), element("div", { class: "ticks" }, ...ticks))];
}

function paintLane(canvas, lane, colours) {
  const ratio = devicePixelRatio || 1;
  const width = (canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio)));
  const height = (canvas.height = Math.round(LANE_HEIGHT * ratio));
  const context = canvas.getContext("2d");
  context.fillStyle = css("--well");
  context.fillRect(0, 0, width, height);
  const stripes = context.createPattern(stripe(ratio), "repeat");
  const base = new Float32Array(lane.kinds[0]?.shares.length ?? 0);
  for (const kind of lane.kinds) {
    context.fillStyle = kind.waits_for ? stripes : colours.get(kind.name);
    kind.shares.forEach((share, bin) => {
      if (!share) return;
      const top = Math.min(1, base[bin] + share);
      const left = Math.floor((bin / base.length) * width), right = Math.floor(((bin + 1) / base.length) * width);
      const low = Math.round(height * (1 - base[bin])), high = Math.round(height * (1 - top));
      context.fillRect(left, high, Math.max(1, right - left), low - high);
      base[bin] = top;
    });
  }
}

function stripe(ratio) {
  const size = Math.round(6 * ratio);
  const tile = element("canvas", { width: size, height: size });
  const context = tile.getContext("2d");
  context.strokeStyle = css("--stripe");
  context.lineWidth = ratio;
  for (const shift of [-size, 0, size]) { context.moveTo(shift, size); context.lineTo(shift + size, 0); }
  context.stroke();
  return tile;
}
