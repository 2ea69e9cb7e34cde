"use strict";
// Text of runs is hostile: it reaches the page through `element` and `textContent` only, never as HTML.

const byId = (id) => document.getElementById(id);

/** An element: element("p", {class: "hint"}, "text", child, …); functions become listeners, null children are left out. */
function element(name, attributes = {}, ...children) {
  const made = name === "svg" || name === "rect" || name === "path" || name === "text" || name === "g"
    ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(key, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Text as children of an element: what is in backticks, and names with dots such as loop.steps, is code. */
const prose = (text) => text.split(/(`[^`]*`|\b[a-z_]+(?:\.[a-z_]+)+\b)/).map((part, index) => (index % 2 ? element("code", {}, part.replaceAll("`", "")) : part));

/** The data of a block, which `packed.py` wrote. */
async function unpack(id) {
  const binary = atob(byId(`data-${id}`).textContent);
  const bytes = new Uint8Array(binary.length);
  for (let at = 0; at < binary.length; at++) bytes[at] = binary.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** Lets the browser paint. */
const painted = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));

// Okabe–Ito, in an order that keeps neighbours apart on both backgrounds.
const RUN_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9"];
const RUN_COLOURS_DARK = ["#56B4E9", "#E69F00", "#2BC49A", "#CC79A7", "#F0783C", "#9AA4F0"];
const KIND_COLOURS = ["#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D1F", "#7A7F87"];
const VIRIDIS = ["#440154", "#482878", "#3e4a89", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];

const dark = () => getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const runColour = (run) => (dark() ? RUN_COLOURS_DARK : RUN_COLOURS)[run % RUN_COLOURS.length];
/** Runs beyond the colours are told apart by dashes. */
const runDash = (run) => (run < RUN_COLOURS.length ? undefined : [6, 4]);
const viridis = (share) => VIRIDIS[Math.round(Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1))];
const faded = (colour, alpha) => colour + Math.round(Math.min(1, Math.max(0, alpha)) * 255).toString(16).padStart(2, "0");

const integers = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

/** Four digits that matter. */
function number(value, unit = "") {
  if (value === null || value === undefined) return "–";
  if (unit === "share") return percent(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e5) return compact.format(value);
  if (size < 1e-3) return value.toExponential(1).replace("e-", "e−").replace(/^-/, "−");
  return (Number.isInteger(value) ? integers.format(value) : String(parseFloat(value.toPrecision(size < 1 ? 3 : 4)))).replace(/^-/, "−");
}

const percent = (value) => `${parseFloat((100 * value).toPrecision(3))}%`;

function duration(seconds) {
  if (seconds < 60) return `${parseFloat(seconds.toPrecision(3))} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

/** A row of buttons of which one is pressed; calls `changed(value)`. */
function choice(group, changed) {
  group.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) { press(group, button.dataset.value); changed(button.dataset.value); }
  });
}

function press(group, value) {
  for (const button of group.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.value === value));
}

/** A group for `choice` with these [value, label] buttons. */
function buttons(label, options, pressed, changed) {
  const group = element("div", { class: "choice", role: "group", "aria-label": label },
    ...options.map(([value, text]) => element("button", { type: "button", "data-value": value, "aria-pressed": String(value === pressed) }, text)));
  choice(group, changed);
  return group;
}

function select(label, options, changed) {
  return element("select", { "aria-label": label, change: (event) => changed(event.target.value) },
    ...options.map(([value, text]) => element("option", { value }, text)));
}

const state = { hidden: new Set() };
/** Called after the theme or the shown runs changed. */
const redraws = [];
const redraw = () => redraws.forEach((each) => each());
