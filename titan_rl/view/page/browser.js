// The list of rollouts: only the rows in view are in the document, so its length costs nothing.

const ROW = 46;
const ORDERS = [["newest", "Newest step first"], ["oldest", "Oldest step first"], ["worst", "Lowest reward first"], ["best", "Highest reward first"],
  ["longest", "Longest first"], ["gap", "Largest logprob gap first"]];

/** Columns of all rollouts → the browser. */
function openBrowser(data, table) {
  const count = table.step?.length ?? 0;
  const { recorded } = data.rollouts;
  byId("rollout-count").textContent = !count ? "" : count < recorded
    ? `${integers.format(count)} of ${integers.format(recorded)} recorded rollouts are in this file, some of every step. All are in rollouts.jsonl.`
    : `${integers.format(count)} recorded: best, worst and random ones of every step, a whole group of each twentieth, and evaluations.`;
  if (!count) {
    document.querySelector(".browser").replaceChildren(element("p", { class: "empty" }, "The runs recorded no rollouts."));
    byId("filters").remove();
    return;
  }
  const filter = { run: "", purpose: "", kept: "", stop: "", step: "", least: "", most: "", text: "", order: "newest" };
  const list = byId("list"), rows = byId("rows");
  let order = [], chosen = -1;

  const matches = (at) =>
    (filter.run === "" || table.run[at] === Number(filter.run)) && !state.hidden.has(table.run[at]) &&
    (filter.purpose === "" || table.evaluated[at] === Number(filter.purpose)) &&
    (filter.kept === "" || table.kept[at].split(" ").includes(filter.kept)) &&
    (filter.stop === "" || table.stop[at] === filter.stop) &&
    (filter.step === "" || table.step[at] === Number(filter.step)) &&
    (filter.least === "" || table.reward[at] >= Number(filter.least)) && (filter.most === "" || table.reward[at] <= Number(filter.most)) &&
    (filter.text === "" || `${table.prompt[at]}\n${table.answer[at]}\n${table.wanted[at]}\n${table.error[at]}\ngroup ${table.group[at]}`.toLowerCase().includes(filter.text));
  const by = {
    newest: (a, b) => table.step[b] - table.step[a], oldest: (a, b) => table.step[a] - table.step[b],
    best: (a, b) => table.reward[b] - table.reward[a], worst: (a, b) => table.reward[a] - table.reward[b],
    longest: (a, b) => table.tokens[b] - table.tokens[a], gap: (a, b) => (table.gap[b] ?? -1) - (table.gap[a] ?? -1),
  };

  const refresh = () => {
    order = [];
    for (let at = 0; at < count; at++) if (matches(at)) order.push(at);
    order.sort((a, b) => by[filter.order](a, b) || table.run[a] - table.run[b] || table.group[a] - table.group[b] || table.sample[a] - table.sample[b]);
    rows.style.height = `${order.length * ROW}px`;
    byId("matches").textContent = `${integers.format(order.length)} shown`;
    list.scrollTop = 0;
    drawRows();
    if (order.length && !order.includes(chosen)) choose(order[0], false);
    if (!order.length) byId("rollout").replaceChildren(element("p", { class: "empty" }, "No rollout matches these filters."));
  };

  const drawRows = () => {
    const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
    const last = Math.min(order.length, first + Math.ceil(list.clientHeight / ROW) + 10);
    rows.replaceChildren(...order.slice(first, last).map((at, index) => rowOf(at, first + index)));
  };

  const rowOf = (at, place) => element("div", { class: "row", role: "option", "aria-selected": String(at === chosen), style: `top:${place * ROW}px`, click: () => choose(at, true) },
    element("span", { class: "where" }, data.runs.length > 1 ? element("i", { class: "swatch", style: `background:${runColour(table.run[at])}` }) : null,
      element("b", {}, table.evaluated[at] ? `Eval ${table.step[at]}` : `Step ${table.step[at]}`), element("small", {}, `${table.group[at]} / ${table.sample[at]}`)),
    element("span", { class: "said" }, element("small", {}, table.prompt[at] || "\u00a0"), table.error[at] ? element("em", {}, table.error[at]) : table.answer[at] || "\u00a0"),
    element("span", { class: "got" }, element("b", {}, number(table.reward[at])), element("small", {}, `${table.tokens[at]} tok`)));

  const choose = async (at, scroll) => {
    chosen = at;
    for (const row of rows.children) row.setAttribute("aria-selected", "false");
    const place = order.indexOf(at);
    if (place >= 0) {
      if (place * ROW < list.scrollTop) list.scrollTop = place * ROW;
      if ((place + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (place + 1) * ROW - list.clientHeight;
    }
    drawRows();
    const rollout = await detailOf(table, at);
    if (chosen !== at) return;
    drawRollout(data, table, at, rollout, { siblings: siblings(at), choose: (other) => choose(other, false), step: (by_) => {
      const next = order[order.indexOf(chosen) + by_];
      if (next !== undefined) choose(next, false);
    } });
    if (scroll && matchMedia("(max-width: 900px)").matches) byId("rollout").scrollIntoView({ block: "start" });
  };

  const siblings = (at) => {
    const found = [];
    for (let other = 0; other < count; other++) {
      if (table.group[other] === table.group[at] && table.run[other] === table.run[at] && table.evaluated[other] === table.evaluated[at]
        && table.attempt[other] === table.attempt[at] && table.step[other] === table.step[at]) found.push(other);
    }
    return found.sort((a, b) => table.sample[a] - table.sample[b]);
  };

  const change = (name) => (value) => { filter[name] = value; refresh(); };
  const values = (name) => [...new Set(table[name])].filter(Boolean).sort();
  const input = (type, label, name) => element("input", { type, placeholder: label, "aria-label": label, step: "any", "data-filter": name,
    input: (event) => change(name)(event.target.value.toLowerCase()) });
  byId("filters").append(...[
    data.runs.length > 1 ? select("Run", [["", "All runs"], ...data.runs.map((run, number_) => [String(number_), run.name])], change("run")) : null,
    select("Purpose", [["", "Training and evaluation"], ["0", "Training"], ["1", "Evaluation"]], change("purpose")),
    select("Kept as", [["", "Kept for any reason"], ...[...new Set(table.kept.flatMap((kept) => kept.split(" ")))].filter(Boolean).map((kept) => [kept, `Kept as ${kept}`])], change("kept")),
    select("Stop reason", [["", "Any end"], ...values("stop").map((stop) => [stop, `Ended by ${stop}`])], change("stop")),
    select("Order", ORDERS, change("order")),
    input("number", "Step", "step"), input("number", "Reward from", "least"), input("number", "Reward to", "most"), input("search", "Find in texts", "text"),
    element("span", { class: "count", id: "matches" }),
  ].filter(Boolean));
  list.addEventListener("scroll", drawRows, { passive: true });
  list.addEventListener("keydown", (event) => {
    const by_ = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    const next = order[order.indexOf(chosen) + by_];
    if (by_ && next !== undefined) { event.preventDefault(); choose(next, false); }
  });
  redraws.push(refresh);
  refresh();
}

const opened = new Map();

/** The whole rollout; opens the chunk that holds it, and keeps the newest few open. */
async function detailOf(table, at) {
  const id = `rollouts-${table.run[at]}-${table.chunk[at]}`;
  if (!opened.has(id)) {
    if (opened.size === 8) opened.delete(opened.keys().next().value);
    opened.set(id, unpack(id));
  }
  return (await opened.get(id))[table.place[at]];
}
