// One rollout: what was said, and every token of every branch in colour.

const COLOURINGS = [["mask", "Mask"], ["gap", "Logprob gap"], ["logprob", "Logprob"], ["advantage", "Advantage"], ["weight", "Loss weight"], ["version", "Version"]];
let colouring = "mask"; // stays from rollout to rollout

function tokensOf(branch, advantage) {
  const advantages = branch.advantages ?? branch.ids.map(() => advantage);
  return branch.ids.map((id, at) => ({ id, text: branch.texts[at] ?? "", trained: !!branch.trained[at], logprob: branch.logprobs[at], gap: branch.gaps[at],
    weight: branch.weights[at] ?? null, version: branch.versions[at], advantage: branch.trained[at] ? advantages[at] : null }));
}

function drawRollout(data, table, at, rollout, go) {
  const evaluated = table.evaluated[at];
  const head = element("div", { class: "rollout-head" },
    element("div", {}, element("h3", {}, `${evaluated ? "Evaluation after step" : "Step"} ${table.step[at]}`),
      element("p", { class: "sub" }, [data.runs.length > 1 ? data.runs[table.run[at]].name : "", `group ${table.group[at]}`, `sample ${table.sample[at]}`,
        table.attempt[at] ? `attempt ${table.attempt[at]}` : "", table.kept[at] ? `kept as ${table.kept[at].replaceAll(" ", ", ")}` : ""].filter(Boolean).join(" · "))),
    element("div", { class: "steps" }, element("button", { type: "button", "aria-label": "Previous rollout", click: () => go.step(-1) }, "↑"), element("button", { type: "button", "aria-label": "Next rollout", click: () => go.step(1) }, "↓")));
  const fact = (label, value) => (value === "" || value === null || value === undefined ? null : element("div", {}, element("dt", {}, label), element("dd", {}, value)));
  const parts = Object.entries(rollout.parts).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const facts = element("dl", { class: "facts" }, fact("Reward", `${number(table.reward[at])}${parts ? ` (${parts})` : ""}`), fact("Advantage", evaluated ? "" : number(table.advantage[at])),
    fact("Ended by", table.stop[at]), fact("Wanted", table.wanted[at]), fact("Sampled", `${table.tokens[at]} tokens in ${rollout.turns.length} ${rollout.turns.length === 1 ? "turn" : "turns"}`),
    fact("Turns", rollout.turns.some((turn) => turn.role || turn.reward !== null) ? rollout.turns.map((turn) => [turn.role, turn.reward === null ? "" : number(turn.reward)].filter(Boolean).join(" ") || "–").join(", ") : ""),
    fact("Generator", [...new Set(rollout.turns.map((turn) => turn.generator).filter(Boolean))].join(", ")), fact("Error", table.error[at]));
  const group = go.siblings.length > 1 ? element("div", { class: "siblings", role: "group", "aria-label": "Other rollouts of the group" }, element("span", {}, "In this group"),
    ...go.siblings.map((other) => element("button", { type: "button", "aria-pressed": String(other === at), click: () => go.choose(other) }, `${table.sample[other]}`, element("small", {}, number(table.reward[other]))))) : null;
  const whole = go.siblings.length > 1 ? element("details", { class: "conversation" }, element("summary", {}, "The group side by side")) : null;
  whole?.addEventListener("toggle", () => sideBySide(whole, table, at, go), { once: true });
  const several = rollout.conversations.length;
  const said = rollout.conversations.map((messages, number_) => element("details", { class: "conversation", open: number_ === several - 1 },
    element("summary", {}, several > 1 ? `Conversation ${number_ + 1} of ${several}${number_ === several - 1 ? ", graded" : ""}` : "Conversation"), ...messages.map(messageOf)));
  byId("rollout").replaceChildren(...[head, facts, group, whole, ...said, tokenView(rollout, table.advantage[at])].filter(Boolean));
}

/** What every recorded rollout of a group said, with its reward. */
async function sideBySide(box, table, at, go) {
  const columns = await Promise.all(go.siblings.map(async (other) => {
    const { conversations } = await detailOf(table, other);
    const messages = conversations[conversations.length - 1];
    const first = messages.findIndex((message) => message.role === "assistant");
    const own = first < 0 ? [] : messages.slice(first);
    return element("div", { class: other === at ? "chosen" : "" }, element("b", {}, `sample ${table.sample[other]} · ${table.error[other] || number(table.reward[other])}`), ...own.map(messageOf));
  }));
  box.append(element("div", { class: "beside" }, ...columns));
}

function messageOf(message) {
  const calls = (message.tool_calls ?? []).map((call) => element("pre", { class: "call" }, call.raw ?? `${call.name}(${JSON.stringify(call.arguments)})`));
  return element("div", { class: `message ${["user", "assistant", "system", "tool"].includes(message.role) ? message.role : "other"}` },
    element("span", { class: "role" }, message.name ? `${message.role} · ${message.name}` : message.role),
    message.reasoning ? element("pre", { class: "reasoning" }, message.reasoning) : null,
    message.content || !calls.length ? element("pre", {}, typeof message.content === "string" ? message.content || " " : JSON.stringify(message.content)) : null, ...calls);
}

function tokenView(rollout, advantage) {
  const branches = rollout.branches.length;
  const lists = rollout.branches.map((each) => tokensOf(each, advantage));
  const scale = scaleOf(lists.flat());
  const box = element("div", { class: "tokens", tabindex: "0", "aria-label": "Tokens" });
  const inspector = element("div", { class: "inspector", "aria-live": "polite" }), legend = element("div", { class: "legend" });
  const tree = element("div", { class: "tree" });
  let branch = 0, picked = null;

  const inspect = (span) => {
    picked?.classList.remove("picked");
    picked = span;
    span.classList.add("picked");
    inspector.replaceChildren(...inspected(lists[branch][span.dataset.at]));
  };
  const draw = () => {
    box.replaceChildren();
    lists[branch]?.forEach((token, at) => box.append(tokenSpan(token, at, scale))); // too many to be arguments
    legend.replaceChildren(...scale.legend());
    tree.replaceChildren(...(branches > 1 ? treeOf(rollout.branches, branch, (other) => { branch = other; draw(); }) : []));
    picked = null;
    inspector.replaceChildren(element("span", { class: "hint" }, "Point at a token or tap it; arrow keys walk."));
  };
  for (const event of ["pointerover", "click"]) box.addEventListener(event, ({ target }) => target.closest(".token") && inspect(target.closest(".token")));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const spans = [...box.querySelectorAll(".token")];
    const next = spans[picked ? spans.indexOf(picked) + by : 0];
    if (next) { event.preventDefault(); inspect(next); next.scrollIntoView({ block: "nearest" }); }
  });
  const pick = buttons("Colour tokens by", COLOURINGS, colouring, (value) => { colouring = value; draw(); });
  const [first] = lists;
  const walk = branches > 1 ? element("div", { class: "walk" }, element("button", { type: "button", "aria-label": "Previous branch", click: () => { branch = (branch + branches - 1) % branches; draw(); } }, "←"),
    element("button", { type: "button", "aria-label": "Next branch", click: () => { branch = (branch + 1) % branches; draw(); } }, "→")) : null;
  draw();
  return element("section", { class: "token-view" }, element("div", { class: "bar" }, element("h4", {}, "Tokens"), pick), legend, branches > 1 ? element("div", { class: "graph" }, tree, walk) : null,
    first ? box : element("p", { class: "empty" }, "No tokens."), inspector);
}

function tokenSpan(token, at, scale) {
  const plain = token.text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥");
  const nameless = /^\p{C}*$/u.test(plain); // nothing to be seen
  const span = element("span", { class: `token${token.trained ? " trained" : ""}${nameless ? " nameless" : ""}`, "data-at": at }, nameless ? `‹${token.id}›` : plain);
  const colour = scale.colour(token);
  if (colour) span.style.backgroundColor = colour;
  return span;
}

function inspected(token) {
  const cell = (label, value) => (value === null || value === undefined || value === "" ? null : element("span", {}, element("small", {}, label), element("b", {}, value)));
  return [cell("token", JSON.stringify(token.text)), cell("id", String(token.id)), cell("mask", token.trained ? "trained" : "given"),
    token.logprob === null ? null : cell("generator", `${number(token.logprob)} (${percent(Math.exp(token.logprob))})`),
    token.gap === null || token.logprob === null ? null : cell("trainer", number(token.logprob + token.gap)), token.gap === null ? null : cell("gap", signed(token.gap)),
    token.advantage === null ? null : cell("advantage", signed(token.advantage)), token.weight === null ? null : cell("loss weight", number(token.weight)), cell("version", token.version)].filter(Boolean);
}

const signed = (value) => (value > 0 ? `+${number(value)}` : number(value));

/** How the chosen colouring colours the tokens of this rollout, and the legend that says so. */
function scaleOf(tokens) {
  const most = (name, least) => tokens.reduce((so_far, token) => Math.max(so_far, Math.abs(token[name] ?? 0)), least);
  const gap = most("gap", 1e-6), logprob = most("logprob", 1), weight = most("weight", 1e-12), advantage = most("advantage", 1);
  const versions = [...new Set(tokens.map((token) => token.version).filter(Boolean))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const warm = () => (dark() ? "#F0783C" : "#D55E00"), cool = () => (dark() ? "#56B4E9" : "#0072B2"), ink = () => (dark() ? "#2BC49A" : "#009E73");
  const diverging = (value, end) => (value === null ? null : faded(value > 0 ? warm() : cool(), 0.75 * Math.abs(value) / end));
  const key = (colour, text) => element("span", {}, element("i", { class: "swatch", style: colour ? `background:${colour}` : "" }), text);
  const ramp = (colours, about, low, high) => element("span", { class: "ramp" }, element("small", {}, low), element("i", { style: `background:linear-gradient(90deg, ${colours})` }), element("small", {}, high), element("small", { class: "about" }, about));
  const both = `${cool()}bf, transparent, ${warm()}bf`;
  const versionColour = (version) => faded(viridis(versions.length > 1 ? versions.indexOf(version) / (versions.length - 1) : 0.45), 0.5);
  return {
    colour: (token) => ({
      mask: () => (token.trained ? faded(ink(), 0.32) : null),
      gap: () => diverging(token.gap, gap),
      logprob: () => (token.logprob === null ? null : faded(warm(), 0.75 * Math.min(1, -token.logprob / logprob))),
      advantage: () => diverging(token.advantage, advantage),
      weight: () => (token.weight === null ? null : faded(ink(), (0.75 * Math.abs(token.weight)) / weight)),
      version: () => (token.version ? versionColour(token.version) : null),
    })[colouring](),
    legend: () => ({
      mask: () => [key(faded(ink(), 0.32), "trained"), key("", "given: prompt, tool results, other turns")],
      gap: () => [ramp(both, "trainer minus generator, nats", signed(-gap), signed(gap))],
      logprob: () => [ramp(`transparent, ${warm()}bf`, "logprob of the generator, nats: strong is surprising", "0", number(-logprob))],
      advantage: () => [ramp(both, "advantage, on trained tokens", number(-advantage), signed(advantage))],
      weight: () => [ramp(`transparent, ${ink()}bf`, "weight of a token in the loss of its step", "0", number(weight))],
      version: () => (versions.length ? versions.map((version) => key(versionColour(version), version)) : [element("small", {}, "No token has a version.")]),
    })[colouring](),
  };
}

/** A row per branch, with what it does not share with an older one. */
function treeOf(branches, chosen, choose) {
  const length = Math.max(...branches.map((each) => each.ids.length));
  return branches.map((each, number_) => {
    const shared = Math.max(0, ...branches.slice(0, number_).map((older) => commonLength(older, each))), own = each.ids.length - shared;
    return element("button", { type: "button", class: "branch", "aria-pressed": String(number_ === chosen), click: () => choose(number_) },
      element("span", { class: "branch-name" }, `Branch ${number_ + 1}`),
      element("span", { class: "strip" }, element("i", { class: number_ === chosen ? "on" : null, style: `left:${(100 * shared) / length}%;width:max(3px, ${(100 * own) / length}%)` })),
      element("small", {}, own ? `${own} own tokens` : "all shared"));
  });
}

/** Tokens with which both begin. Equal ones that were sampled twice are two. */
function commonLength(one, other) {
  const apart = one.ids.findIndex((id, at) => id !== other.ids[at] || (one.trained[at] && other.trained[at]));
  return apart < 0 ? one.ids.length : apart;
}
