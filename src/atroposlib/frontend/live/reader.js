"use strict";
// The rollout reader: a list of groups and one group in full. All text goes in as text, never as markup.

const reader = { groups: [], chosen: null, newest: 0 };

function filterQuery(extra = {}) {
  const query = new URLSearchParams({ limit: "50", ...extra });
  for (const [id, name] of [["filter-env", "env"], ["filter-min", "min_score"], ["filter-max", "max_score"], ["filter-step", "step"]]) {
    const value = document.getElementById(id).value;
    if (value !== "") query.set(name, value);
  }
  return query;
}

async function loadGroups({ older = false } = {}) {
  const oldest = reader.groups.length ? reader.groups[reader.groups.length - 1].key : undefined;
  const found = await ask("/live/api/groups?" + filterQuery(older && oldest !== undefined ? { before: oldest } : {}));
  reader.groups = older ? reader.groups.concat(found) : found;
  document.getElementById("older").disabled = found.length < 50;
  drawGroupList();
  if (!older && document.getElementById("follow").checked && found.length && found[0].archived && found[0].key !== reader.chosen) await openGroup(found[0].key);
}

function drawGroupList() {
  const list = document.getElementById("group-list");
  list.replaceChildren(...reader.groups.map((group) => {
    const bar = element("i");
    bar.style.width = Math.max(0, Math.min(1, group.mean_score ?? 0)) * 100 + "%";
    const trained = group.step !== null ? "trained step " + group.step : group.batch_seq !== null ? "in batch " + group.batch_seq : group.live ? "waiting" : "not used";
    const entry = element("button", { class: "entry" + (group.key === reader.chosen ? " on" : ""), type: "button", "data-key": group.key },
      element("span", { text: (group.env ?? "unnamed") + "  " + shortNumber(group.mean_score) }),
      element("small", { text: `${group.size} samples, ${group.num_tokens} tokens, ${trained}${versionText(group)}` }),
      element("div", { class: "bar" }, bar));
    entry.addEventListener("click", () => { document.getElementById("follow").checked = false; openGroup(group.key); });
    return entry;
  }));
  if (!reader.groups.length) list.append(element("p", { class: "hint", text: page.state?.counts.groups ? "no group matches" : "no groups yet" }));
}

function versionText(group) {
  if (group.min_version === null) return "";
  return group.min_version === group.max_version ? `, policy v${group.max_version}` : `, policy v${group.min_version}–${group.max_version}`;
}

async function openGroup(key) {
  reader.chosen = key;
  reader.group = await ask("/live/api/groups/" + key);
  drawGroup();
  for (const entry of document.querySelectorAll(".entry")) entry.classList.toggle("on", entry.dataset.key === String(key));
}

function drawGroup() {
  const group = reader.group;
  if (!group) return;
  const content = group.content;
  const raw = element("button", { type: "button", text: "raw JSON", id: "raw" });
  const rawBox = element("pre", { class: "raw", hidden: "" });
  raw.addEventListener("click", () => { rawBox.textContent = rawBox.textContent || JSON.stringify(group, null, 1); rawBox.hidden = !rawBox.hidden; });
  const facts = [
    `group ${group.group_id}`, `environment ${group.env ?? "unnamed"}`, new Date(group.time * 1000).toLocaleString(),
    group.step !== null ? `trained at step ${group.step} (batch ${group.batch_seq})` : group.batch_seq !== null ? `in batch ${group.batch_seq}` : group.live ? "waiting in the queue" : "the run ended without it",
  ];
  if (group.min_version !== null) facts.push("sampled by" + versionText(group).slice(1));
  const parts = [element("p", { class: "facts", text: facts.join(" · ") }), raw, rawBox];
  if (!content) parts.push(element("p", { class: "hint", text: "The content of this group is no longer kept; its scores and where it went are." }));
  else if (!group.token_texts) parts.push(element("p", { class: "hint", text: "Tokens are shown as ids: start the server with ATROPOS_PAGE_TOKENIZER=FOLDER (a folder with tokenizer.json) to see their text." }));
  const advantages = groupAdvantages(group);
  group.samples.forEach((sample, index) => parts.push(drawSample(group, sample, index, advantages[index])));
  document.getElementById("group").replaceChildren(...parts);
}

function groupAdvantages(group) {
  const scores = group.samples.map((sample) => sample.score);
  const mean = scores.reduce((a, b) => a + b, 0) / Math.max(1, scores.length);
  const deviation = Math.sqrt(scores.reduce((a, b) => a + (b - mean) ** 2, 0) / Math.max(1, scores.length - 1));
  return scores.map((score) => (score - mean) / (deviation + 1e-4));
}

function drawSample(group, sample, index, advantage) {
  const components = Object.entries(sample.components ?? {}).map(([name, value]) => `${name} ${shortNumber(value)}`);
  const head = element("header", {}, element("b", { text: "score " + shortNumber(sample.score) }),
    element("span", { text: "advantage " + shortNumber(advantage) }),
    element("span", { class: "hint", text: [...components, sample.policy_versions ? "policy v" + sample.policy_versions.join(", v") : "", sample.sample_id].filter(Boolean).join(" · ") }));
  const card = element("article", { class: "sample" }, head);
  const content = group.content;
  if (content?.messages?.[index]) for (const message of content.messages[index]) {
    const text = typeof message.content === "string" ? message.content : JSON.stringify(message.content);
    card.append(element("div", { class: "message" }, element("b", { text: message.role }), document.createTextNode(text)));
  }
  if (content) card.append(drawTokens(group, index, advantage));
  return card;
}

function drawTokens(group, index, advantage) {
  const { tokens, masks, inference_logprobs: logprobs, advantages } = group.content;
  const by = document.getElementById("colour").value;
  const box = element("div", { class: "tokens" });
  tokens[index].forEach((token, at) => {
    const trained = masks[index][at] !== -100;
    const text = group.token_texts ? group.token_texts[index][at] : token + " ";
    const span = element("span", { text: text === "\n" ? "⏎\n" : text, class: trained ? "" : "off" });
    const logprob = logprobs?.[index]?.[at];
    const given = advantages?.[index]?.[at] ?? advantage;
    span.title = `token ${token}` + (trained ? ` · advantage ${shortNumber(given)}` + (logprob !== undefined ? ` · log-prob ${shortNumber(logprob)}` : "") : " · not trained");
    if (trained) span.style.background = tokenColour(by, given, logprob);
    box.append(span);
  });
  return box;
}

function tokenColour(by, advantage, logprob) {
  if (by === "mask") return "rgba(37,99,235,.25)";
  if (by === "logprob") return logprob === undefined ? "" : `rgba(200,120,0,${Math.min(0.75, -logprob / 5).toFixed(3)})`;
  const strength = Math.min(0.6, Math.abs(advantage) / 3).toFixed(3);
  return advantage >= 0 ? `rgba(21,160,80,${strength})` : `rgba(210,50,40,${strength})`;
}
