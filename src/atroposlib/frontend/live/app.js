"use strict";
// The page: asks the run log for what is new once a second and redraws what is on view.

// The token comes once in the address (/live#token=...) and stays with this tab.
const given = location.hash.match(/token=([^&]*)/);
if (given) { sessionStorage.setItem("token", decodeURIComponent(given[1])); history.replaceState(null, "", location.pathname); }
const token = sessionStorage.getItem("token");
const series = new Map();   // "source\u0000name" -> [{time, step, value}]
const page = { after: 0, start: null, view: "overview", charts: [], all: new Map(), newestKey: 0, polls: 0 };

const CHARTS = [
  { title: "Reward by environment", name: /^reward$/, source: /^groups:/, smooth: 0.97, label: "source" },
  { title: "Reward components", name: /^reward\/.+|^reward_functions?\/.+/, source: /^groups:|^trainer/, smooth: 0.97, label: "both" },
  { title: "Reward of the trained batches", name: /^reward$/, source: /^trainer/, label: "name", smooth: 0.5 },
  { title: "Teaching", name: /accuracy|improvement_rate|degradation_rate/, source: /^trainer/, label: "name", smooth: 0.7 },
  { title: "Held-out evaluation", name: /^eval\/(?!num_|.*(length|tokens|_s$))|^eval_.*(reward|accuracy|score|exact|correct)/, label: "both" },
  { title: "Tokens per second", name: /tokens_per_s$/, smooth: 0.8, label: "both", zero: true },
  { title: "Queue (groups waiting)", name: /^queue\/groups$/, zero: true, label: "name" },
  { title: "Staleness (policy versions)", name: /staleness/, zero: true, label: "name", smooth: 0.7 },
  { title: "Where the time goes (s per step)", name: /^time\/.+_s$/, source: /^trainer/, zero: true, label: "name", smooth: 0.8 },
  { title: "Entropy", name: /entropy/, label: "name", smooth: 0.7 },
  { title: "KL and mismatch", name: /(^|[/_])kl($|[/_])|mismatch/, label: "name", smooth: 0.7 },
  { title: "Loss and gradient norm", name: /(^|\/)(loss|grad_norm)$/, label: "name", smooth: 0.7 },
  { title: "Clip ratio", name: /clip/, label: "name", smooth: 0.7 },
  { title: "Completion length", name: /^(?!rewards?\/|eval[/_]).*(length|completion_tokens)/, label: "both", smooth: 0.7 },
];

async function ask(path) {
  const reply = await fetch(path, { headers: token ? { Authorization: "Bearer " + token } : {}, cache: "no-store" });
  if (reply.status === 401 || reply.status === 403) throw new Error("the server asks for its token: open this page as /live#token=TOKEN");
  if (!reply.ok) throw new Error(`${path}: HTTP ${reply.status}`);
  return reply.json();
}

function addMetrics(rows) {
  for (const [id, time, source, step, name, value] of rows) {
    page.after = Math.max(page.after, id);
    if (page.start === null) page.start = time;
    const key = source + "\u0000" + name;
    if (!series.has(key)) series.set(key, []);
    series.get(key).push({ time, step, value });
  }
}

function points(rows) {
  const byStep = document.getElementById("x-axis").value === "step";
  return rows.map((row) => ({ x: byStep ? row.step : row.time - page.start, y: row.value })).sort((a, b) => a.x - b.x);
}

function latest(source, name) {
  const rows = series.get(source + "\u0000" + name);
  return rows ? rows[rows.length - 1].value : undefined;
}

function drawCharts() {
  const byStep = document.getElementById("x-axis").value === "step";
  if (!page.charts.length) page.charts = CHARTS.map((chart) => [chart, new LineChart(document.getElementById("charts"), chart.title, chart)]);
  for (const [chart, drawn] of page.charts) {
    const wanted = [];
    for (const [key, rows] of series) {
      const [source, name] = key.split("\u0000");
      if (!chart.name.test(name) || (chart.source && !chart.source.test(source))) continue;
      const from = source.replace(/^groups:/, "");
      wanted.push({ name: chart.label === "source" ? from : chart.label === "both" ? from + " " + name : name, points: points(rows) });
    }
    drawn.box.hidden = !wanted.length;
    if (wanted.length) drawn.update(wanted.slice(0, 12), byStep);
  }
}

function drawAll() {
  const text = document.getElementById("metric-filter").value.toLowerCase(), byStep = document.getElementById("x-axis").value === "step";
  document.getElementById("no-metrics").hidden = series.size > 0;
  for (const [key, rows] of [...series].sort(([a], [b]) => (a < b ? -1 : 1))) {
    const title = key.replace("\u0000", "  ");
    if (!page.all.has(key)) page.all.set(key, new LineChart(document.getElementById("all-charts"), title));
    const chart = page.all.get(key);
    chart.box.hidden = !title.toLowerCase().includes(text);
    if (!chart.box.hidden) chart.update([{ name: "", points: points(rows) }], byStep);
  }
}

function tile(label, value) {
  return element("div", { class: "tile" }, element("b", { text: value }), element("span", { text: label }));
}

function drawTiles(state) {
  const rewards = [];
  for (const [key, rows] of series) if (key.startsWith("groups:") && key.endsWith("\u0000reward")) rewards.push(...rows.slice(-30).map((row) => row.value));
  const reward = rewards.length ? rewards.reduce((a, b) => a + b, 0) / rewards.length : null;
  const tokens = [...series].filter(([key]) => key.startsWith("groups:") && key.endsWith("tokens_per_s")).reduce((sum, [, rows]) => sum + rows[rows.length - 1].value, 0);
  const rejected = numRejected(state);
  document.getElementById("tiles").replaceChildren(
    tile("step", shortNumber(state.batches.step ?? latest("trainer", "step") ?? 0)), tile("reward (newest groups)", shortNumber(reward)),
    tile("tokens/s sampled", shortNumber(tokens)), tile(state.live ? "groups waiting" : "groups not used", shortNumber(state.counts.queued ?? 0)),
    tile("groups", shortNumber(state.counts.groups)), tile("samples", shortNumber(state.counts.samples)), tile("tokens", shortNumber(state.counts.tokens)),
    tile("batches trained", `${state.batches.acked ?? 0}`), tile("rejected groups", shortNumber(rejected)));
}

// What the server refused, and what the environments set aside themselves before sending it.
function rejectedRows(state) {
  const found = state.rejected.map((one) => ({ env: one.env, reason: one.reason, count: one.count }));
  for (const [key, rows] of series) {
    const [source, name] = key.split("\u0000"), kind = name.match(/(?:num_groups_rejected|num_failures)_(.+)$/);
    if (!kind || !source.startsWith("env:")) continue;
    const failed = name.includes("failures"), reason = (failed ? "failed: " : "") + kind[1].replaceAll("_", " ");
    found.push({ env: source.slice(4), reason, failed, count: rows[rows.length - 1].value });
  }
  return found;
}

function numRejected(state) { return rejectedRows(state).reduce((sum, one) => sum + (one.failed ? 0 : one.count), 0); }

// Who has to do something before there is more to see; "" when the run goes.
async function waitingFor(state) {
  if (state.counts.groups) return state.batches.acked || !state.live ? "" : "Groups arrive; waiting for the trainer to take a whole batch.";
  if (!state.live) return "This run has no groups.";
  const server = await ask("/overview");
  if (!server.trainer) return "Waiting for a trainer to register; environments begin when there is one.";
  const names = server.environments.filter((env) => env.alive).map((env) => env.name).join(", ");
  if (!names) return "A trainer is there; waiting for an environment to register.";
  const rejected = numRejected(state);
  if (rejected) return `No group has been accepted yet: ${shortNumber(rejected)} were rejected, for the reasons below (${names}).`;
  return `Waiting for the first group (${names}).`;
}

function row(tag, cells) { return element("tr", {}, ...cells.map((cell) => (cell instanceof Node ? element(tag, {}, cell) : element(tag, { text: String(cell) })))); }

function drawTables(state) {
  const names = new Set();
  for (const key of series.keys()) { const found = key.match(/^supervisor\u0000process\/(.+)\/up$/); if (found) names.add(found[1]); }
  const processes = [...names].sort().map((name) => {
    const fact = (what) => latest("supervisor", `process/${name}/${what}`), up = fact("up") === 1;
    return row("td", [name, element("span", state.live ? { class: up ? "up" : "down", text: up ? "running" : "stopped" } : { text: "ended" }), shortNumber(fact("restarts") ?? 0), shortNumber(fact("rss_mb")) + " MB", shortNumber(fact("cpu_percent")) + " %"]);
  });
  document.getElementById("processes").replaceChildren(row("th", ["process", "state", "restarts", "memory", "CPU"]), ...processes);
  if (!processes.length) document.getElementById("processes").append(element("caption", { class: "hint", text: "Shown when atropos run or atropos quickstart started them." }));
  const refused = rejectedRows(state).map((one) => row("td", [one.env, one.reason, shortNumber(one.count)]));
  document.getElementById("rejected").replaceChildren(row("th", ["environment", "reason", "count"]), ...refused);
  if (!refused.length) document.getElementById("rejected").append(element("caption", { class: "hint", text: "None." }));
}

function drawFilters(state) {
  const select = document.getElementById("filter-env");
  for (const env of state.envs) if (![...select.options].some((option) => option.value === env)) select.append(element("option", { value: env, text: env }));
}

async function poll() {
  try {
    let state;
    do { state = await ask("/live/api/overview?after=" + page.after); addMetrics(state.metrics); } while (state.more);
    page.state = state;
    document.getElementById("problem").hidden = true;
    const pill = document.getElementById("state");
    pill.textContent = state.live ? "live" : "finished run";
    pill.className = "pill" + (state.live ? " live" : "");
    if (state.meta.name) { document.getElementById("run-name").textContent = state.meta.name; document.title = state.meta.name; }
    drawFilters(state);
    await drawView(state);
  } catch (error) {
    const problem = document.getElementById("problem");
    problem.textContent = "Cannot read the run: " + error.message + " (asked again every second)";
    problem.hidden = false;
    const pill = document.getElementById("state");
    pill.textContent = "no contact"; pill.className = "pill lost";
  }
  page.polls += 1;
  document.body.dataset.polls = String(page.polls);
  setTimeout(poll, document.hidden ? 5000 : 1000);
}

async function drawWaiting(state) {
  const text = await waitingFor(state).catch(() => "Waiting for the first group."), line = document.getElementById("waiting");
  if (line.textContent !== text) line.textContent = text;
  line.hidden = !text;
}

async function drawView(state) {
  if (page.view === "overview") { drawTiles(state); drawCharts(); drawTables(state); await drawWaiting(state); }
  if (page.view === "all") drawAll();
  if (page.view === "rollouts" && state.counts.newest_key !== page.newestKey && document.getElementById("follow").checked) {
    page.newestKey = state.counts.newest_key;
    await loadGroups();
  }
}

function viewInAddress() { return ["rollouts", "all"].find((view) => location.hash === "#" + view) ?? "overview"; }

function choose(view) {
  page.view = view;
  for (const main of document.querySelectorAll(".view")) main.hidden = main.id !== view;
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("on", link.dataset.view === view);
  if (view === "rollouts") loadGroups().catch(() => {});
  if (page.state) drawView(page.state).catch(() => {});
}

window.addEventListener("hashchange", () => choose(viewInAddress()));
for (const id of ["filter-env", "filter-min", "filter-max", "filter-step"]) document.getElementById(id).addEventListener("change", () => loadGroups());
document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("colour").addEventListener("change", drawGroup);
document.getElementById("older").addEventListener("click", () => loadGroups({ older: true }));
document.getElementById("x-axis").addEventListener("change", () => page.state && drawView(page.state));
document.getElementById("metric-filter").addEventListener("input", drawAll);
choose(viewInAddress());
poll();
