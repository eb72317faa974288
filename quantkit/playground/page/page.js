"use strict";

// The page of the playground. Everything a model wrote is put in as text (textContent), never as markup.

const byId = (id) => document.getElementById(id);
const state = { names: [], sides: [], parted: undefined, stop: null };

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function percent(value) {
  if (value >= 0.9995) return "100 %";
  return value >= 0.001 ? `${(100 * value).toFixed(1)} %` : value.toExponential(1);
}

function showStatus(text, fault = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("fault", fault);
}

// Heat from 0 to 1. Two models: the divergence from 0.0001 to 1 nat, by its logarithm. One: how unlikely its own token was.
function heat(token) {
  if (token.kl !== null) return Math.min(Math.max((Math.log10(Math.max(token.kl, 1e-9)) + 4) / 4, 0), 1);
  return Math.min(-Math.log(Math.max(token.p[0], 1e-9)) / 5, 1);
}

function addSide(name, number) {
  const root = element("section", "side");
  const title = state.names.length === 2 ? `${"AB"[number]}: ${name}` : name;
  root.setAttribute("aria-label", title);
  const side = {
    facts: element("p", "facts", ""),
    answer: element("div", "answer"),
    detail: element("div", "detail"),
    experts: element("div"),
    root,
  };
  root.append(element("h2", "", title), side.facts, side.answer, side.detail, side.experts);
  byId("sides").append(root);
  return side;
}

function clear() {
  byId("sides").replaceChildren();
  byId("legend").hidden = true;
  state.parted = undefined;
  state.sides = state.names.map(addSide);
}

function showTokens(side, tokens) {
  side.answer.replaceChildren();
  tokens.forEach((token, place) => {
    const shown = element("span", "token", token.text);
    shown.style.setProperty("--heat", heat(token).toFixed(3));
    shown.dataset.place = place;
    if (place === state.parted) {
      side.answer.append(element("span", "mark", "outputs diverge"));
      shown.classList.add("parted");
    }
    side.answer.append(shown);
  });
  if (state.parted === tokens.length) side.answer.append(element("span", "mark", "outputs diverge"));
  const choose = (event) => {
    const place = event.target.dataset ? event.target.dataset.place : undefined;
    if (place === undefined) return;
    side.answer.querySelectorAll(".shown").forEach((one) => one.classList.remove("shown"));
    event.target.classList.add("shown");
    showDetail(side, tokens[place], Number(place));
  };
  side.answer.onclick = choose;
  side.answer.onpointerover = choose;
}

function showDetail(side, token, place) {
  const first = element("div");
  first.append(`token ${place + 1} `, element("code", "", JSON.stringify(token.text)), ": ");
  const said = token.p.map((p, number) => (token.p.length === 2 ? `${"AB"[number]} ` : "") + percent(p)).join(", ");
  first.append(said, token.kl === null ? "" : `; KL ${token.kl.toPrecision(2)} nats`);
  const table = element("table");
  const head = element("tr");
  token.top.forEach((_, number) => {
    const cell = element("th", "", token.top.length === 2 ? `likeliest under ${"AB"[number]}` : "likeliest");
    cell.colSpan = 2;
    head.append(cell);
  });
  table.append(head);
  token.top[0].forEach((_, row) => {
    const line = element("tr");
    for (const likeliest of token.top) {
      const [text, p] = likeliest[row];
      const cell = element("td");
      cell.append(element("code", "", JSON.stringify(text)));
      line.append(cell, element("td", "", percent(p)));
    }
    table.append(line);
  });
  side.detail.replaceChildren(first, table);
}

// One cell for each token and layer; as dark as the share of A's experts that B did not choose.
function showExperts(side, experts) {
  side.experts.className = "";
  side.experts.replaceChildren();
  if (!experts) return;
  side.experts.className = "experts";
  const means = experts.changed.map((row) => row.reduce((sum, one) => sum + one, 0) / Math.max(row.length, 1));
  const all = means.reduce((sum, one) => sum + one, 0) / means.length;
  const worst = means.indexOf(Math.max(...means));
  const label = `Experts that B chose differently: ${percent(all)} of all, most in layer ${experts.layers[worst]} (${percent(means[worst])})`;
  side.experts.append(element("p", "", label));
  const canvas = element("canvas", "strip");
  canvas.width = experts.changed[0].length;
  canvas.height = experts.layers.length;
  canvas.style.setProperty("height", `${Math.max(experts.layers.length * (experts.layers.length > 16 ? 4 : 8), 8)}px`);
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${label}. Rows are layers ${experts.layers[0]} to ${experts.layers.at(-1)}, columns are tokens.`);
  side.experts.append(canvas, element("p", "", `rows: layers ${experts.layers[0]} to ${experts.layers.at(-1)}; columns: tokens`));
  const paint = canvas.getContext("2d");
  paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--hot");
  experts.changed.forEach((row, layer) => {
    row.forEach((share, place) => {
      paint.globalAlpha = share;
      paint.fillRect(place, layer, 1, 1);
    });
  });
}

function showLegend() {
  const two = state.names.length === 2;
  byId("legend-title").textContent = two ? "KL(A || B) at each token" : "how unlikely each token was";
  byId("legend-ends").textContent = two ? "0.0001 to 1 nat; point at a token for more" : "100 % to 1 %; point at a token for more";
  byId("legend").hidden = false;
}

function take(event) {
  const side = state.sides[event.side];
  if (event.kind === "text") side.answer.append(event.text);
  else if (event.kind === "done") {
    const end = { stop: "ended by itself", length: "cut at the limit" }[event.reason] || event.reason;
    side.facts.textContent = `${event.count} tokens, ${(event.count / event.seconds).toFixed(1)} tokens/s, ${end}`;
    showStatus("reading the answers ...");
  } else if (event.kind === "parted") state.parted = event.at === null ? undefined : event.at;
  else if (event.kind === "scored") {
    if (event.as !== undefined) Object.assign(event, state.sides[event.as].scored, { side: event.side });
    side.scored = { tokens: event.tokens, experts: event.experts };
    showTokens(side, event.tokens);
    showExperts(side, event.as === undefined ? event.experts : null);
    if (state.names.length === 2 && event.tokens.length) {
      const mean = event.tokens.reduce((sum, one) => sum + one.kl, 0) / event.tokens.length;
      side.facts.textContent += `, mean KL ${mean.toPrecision(2)} nats`;
    }
    showLegend();
  } else if (event.kind === "error") throw new Error(event.message);
}

async function play() {
  clear();
  state.stop = new AbortController();
  byId("go").disabled = true;
  byId("stop").disabled = false;
  showStatus("answering ...");
  try {
    const asked = { prompt: byId("prompt").value, raw: byId("raw").checked, max_new_tokens: Number(byId("most").value) };
    const options = { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(asked), signal: state.stop.signal };
    const answer = await fetch("/play", options);
    if (!answer.ok) throw new Error((await answer.json()).error);
    await lines(answer.body);
    const same = state.names.length === 2 && state.parted === undefined;
    showStatus(same ? "both wrote the same" : state.parted === undefined ? "" : `the greedy outputs diverge at token ${state.parted + 1}`);
  } catch (fault) {
    if (fault.name === "AbortError") showStatus("stopped");
    else showStatus(fault.message, true);
  } finally {
    byId("go").disabled = false;
    byId("stop").disabled = true;
    document.body.dataset.done = "yes";
  }
}

async function lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    held += value || "";
    const whole = held.split("\n");
    held = whole.pop();
    whole.filter(Boolean).forEach((line) => take(JSON.parse(line)));
    if (done) return;
  }
}

// A prompt can be given in the address, after #prompt=; it is submitted at once.
function fromAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get("most")) byId("most").value = given.get("most");
  if (!given.get("prompt")) return;
  byId("prompt").value = given.get("prompt");
  play();
}

async function begin() {
  const found = await (await fetch("/models")).json();
  state.names = found.models;
  byId("models").textContent = state.names.join(" and ");
  if (!found.chat) {
    byId("raw").checked = true;
    byId("raw").disabled = true;
  }
  clear();
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    play();
  });
  byId("stop").addEventListener("click", () => state.stop.abort());
  fromAddress();
}

begin();
