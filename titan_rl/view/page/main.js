// The order matters: what a reader sees first is drawn first; rollouts are opened after the first paint.

const THEMES = ["auto", "light", "dark"];

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
}

async function start() {
  const data = await unpack("main");
  const show = (see) => (["timeline", "rollouts"].includes(see) ? byId(see).scrollIntoView() : showMetric(see));
  drawHead(data);
  drawFindings(data, show);
  drawCurves(data);
  drawHistograms(data);
  drawLanes(data);
  drawSettings(data);
  colourSwatches();
  let theme = 0;
  byId("theme").addEventListener("click", () => { theme = (theme + 1) % THEMES.length; setTheme(THEMES[theme]); redraw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  await painted();
  performance.mark("drawn");
  if (document.readyState === "loading") await new Promise((resolve) => addEventListener("DOMContentLoaded", resolve, { once: true }));
  openBrowser(data, await unpack("rollouts"));
  performance.mark("ready");
  document.documentElement.dataset.ready = "true";
}

start();
