// Title, tiles, runs, findings, settings.

const KIND = { problem: ["▲", "Problem"], warning: ["■", "Warning"], note: ["●", "Note"], good: ["✓", "Good"] };

function lastOf(data, name, run) {
  const values = (data.series[name]?.[run]?.values ?? []).filter((value) => value !== null);
  return values.length ? [values[0], values[values.length - 1]] : null;
}

function drawHead(data) {
  const runs = data.runs;
  const one = runs.length === 1;
  document.title = one ? `${runs[0].name} · titan_rl report` : `${runs.length} runs · titan_rl report`;
  byId("title").textContent = one ? runs[0].name : `${runs.length} runs compared`;
  byId("kicker").textContent = one ? ended(runs[0]) : [...new Set(runs.map((run) => run.recipe))].join(", ");
  byId("footer").textContent = `Written ${data.written} by titan_rl ${data.version} from the files of ${one ? runs[0].directory : "the runs above"}. Charts: uPlot 1.6.32, MIT licence.`;
  if (one) {
    byId("tiles").append(...tiles(data));
    byId("runs").remove();
  } else {
    byId("tiles").remove();
    drawRuns(data);
  }
}

function ended(run, recipe = run.recipe) {
  const steps = `step ${integers.format(run.steps)}${run.wanted_steps ? ` of ${integers.format(run.wanted_steps)}` : ""}`;
  const how = run.done ? (run.stopped_early ? `done early: ${run.stopped_early}` : "done") : "not done";
  return [recipe, how, steps].filter(Boolean).join(" · ");
}

function tiles(data) {
  const run = data.runs[0];
  const score = lastOf(data, "evaluation/exact_match", 0);
  const reward = lastOf(data, "rollout/reward_mean", 0);
  const age = lastOf(data, "staleness/age_mean", 0);
  const shown = [
    score && ["Held-out exact match", `${percent(score[0])} → `, percent(score[1])],
    reward && ["Mean reward", `${number(reward[0])} → `, number(reward[1])],
    ["Optimizer steps", "", integers.format(run.steps)],
    ["Tokens sampled", "", compact.format(run.tokens)],
    ["Time", "", duration(run.seconds)],
    age && ["Age of samples", "", `${number(age[1])} ${age[1] === 1 ? "step" : "steps"}`],
  ];
  return shown.filter(Boolean).map(([label, before, value]) =>
    element("div", { class: "tile" }, element("span", { class: "label" }, label),
      element("span", { class: "value" }, element("span", { class: "before" }, before), value)));
}

function drawRuns(data) {
  const head = ["Run", "Held-out", "Reward", "Steps", "Tokens", "Time"];
  const body = data.runs.map((run, number_) => {
    const score = lastOf(data, "evaluation/exact_match", number_);
    const reward = lastOf(data, "rollout/reward_mean", number_);
    const box = element("input", { type: "checkbox", checked: true, "aria-label": `Show ${run.name}`,
      change: (event) => { event.target.checked ? state.hidden.delete(number_) : state.hidden.add(number_); redraw(); } });
    const arrow = (pair, format) => (pair ? `${format(pair[0])} → ${format(pair[1])}` : "–");
    return element("tr", {},
      element("th", { scope: "row" }, element("label", {}, box, element("i", { class: "swatch", "data-run": number_ }),
        element("span", { class: "run-name" }, run.name, element("small", {}, ended(run, data.runs.every((each) => each.recipe === run.recipe) ? "" : run.recipe))))),
      element("td", {}, arrow(score, percent)), element("td", {}, arrow(reward, number)),
      element("td", {}, integers.format(run.steps)), element("td", {}, compact.format(run.tokens)), element("td", {}, duration(run.seconds)));
  });
  byId("runs").append(element("div", { class: "scroll" }, element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { scope: "col" }, name)))), element("tbody", {}, ...body))));
}

function colourSwatches() {
  for (const swatch of document.querySelectorAll(".swatch[data-run]")) swatch.style.background = runColour(Number(swatch.dataset.run));
}
redraws.push(colourSwatches);

function drawFindings(data, show) {
  const list = byId("finding-list");
  list.append(...data.compared.map((finding) => findingOf(finding, show)));
  data.findings.forEach((findings, run) => {
    if (data.runs.length > 1) {
      list.append(element("h3", { class: "of-run" }, element("i", { class: "swatch", "data-run": run }), data.runs[run].name));
    }
    if (!findings.length) list.append(element("p", { class: "empty" }, "Nothing stands out."));
    list.append(...findings.map((finding) => findingOf(finding, show)));
  });
}

function findingOf(finding, show) {
  const [sign, word] = KIND[finding.kind];
  return element("div", { class: `finding ${finding.kind}` },
    element("span", { class: "sign", "aria-hidden": "true" }, sign),
    element("div", {}, element("h4", {}, element("span", { class: "word" }, word), finding.title),
      element("p", {}, ...prose(finding.text)),
      finding.counts.length ? element("table", { class: "counts" }, ...finding.counts.map(([count, what]) => element("tr", {}, element("td", {}, integers.format(count)), element("td", {}, what)))) : null,
      finding.do ? element("p", { class: "do" }, ...prose(finding.do)) : null),
    finding.see ? element("button", { type: "button", class: "see", click: () => show(finding.see) }, "Show") : null);
}

function drawSettings(data) {
  const table = byId("setting-table");
  const several = data.runs.length > 1;
  let which = several ? "different" : "all", wanted = "";
  const differs = (values) => values.some((value) => value !== values[0]);
  const draw = () => {
    const rows = data.settings.filter(([name, ...values]) => (which === "all" || differs(values))
      && `${name} ${values.join(" ")}`.toLowerCase().includes(wanted));
    table.replaceChildren(
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "Setting"), ...data.runs.map((run, number_) =>
        element("th", { scope: "col" }, several ? element("i", { class: "swatch", "data-run": number_ }) : null, several ? run.name : "Value")))),
      element("tbody", {}, ...rows.map(([name, ...values]) => element("tr", { class: several && differs(values) ? "differs" : null },
        element("th", { scope: "row" }, ...name.split(/(?<=[._])/).flatMap((part) => [part, element("wbr")])), ...values.map((value) => element("td", {}, value === null ? "not there" : value === "" ? "empty" : value))))));
    if (!rows.length) table.append(element("caption", { class: "empty" }, which === "different" && !wanted ? "The runs have the same settings." : "No setting matches."));
    colourSwatches();
  };
  if (several) choice(byId("which-settings"), (value) => { which = value; draw(); });
  else byId("which-settings").remove();
  byId("setting-filter").addEventListener("input", (event) => { wanted = event.target.value.toLowerCase(); draw(); });
  draw();
}
