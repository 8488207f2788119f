// The page gets its content as parts of lines, and then only the lines that changed. HTML is put into the page by
// changing the elements that differ, so that scroll positions, open details and what was typed stay.
"use strict";
const SILENT_MS = 25000; // the server says something every 10 s: after this, the connection has died unnoticed
const parts = {};
let version = "";
let stream = null;
let heard = Date.now();
let lostSince = null;
let steps = null;
let plotly = null; // null: not asked for; else whether it has come

const byId = (id) => document.getElementById(id);
const text = (name) => (parts[name] || []).join("\n");
const json = (name) => (parts[name] ? JSON.parse(text(name)) : null);

async function unpacked(data) {
  const bytes = Uint8Array.from(atob(data), (sign) => sign.charCodeAt(0));
  const inflated = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(inflated).json();
}

function takeWhole(content) {
  const names = new Set([...Object.keys(parts), ...Object.keys(content)]);
  const changed = [...names].filter((name) => text(name) !== (content[name] || []).join("\n") || !(name in parts));
  for (const name of names) delete parts[name];
  Object.assign(parts, content);
  return new Set(changed);
}

function takeChange(edits) {
  for (const [name, places] of Object.entries(edits)) {
    if (places === null) delete parts[name];
    else {
      const lines = parts[name] || (parts[name] = []);
      for (const [start, removed, added] of places) lines.splice(start, removed, ...added);
    }
  }
  return new Set(Object.keys(edits));
}

// Makes an element like another one. What scripts or the reader have changed stays: marked elements, open details,
// the order of a table.
function liken(old, made) {
  if (old.isEqualNode(made)) return;
  if (old.nodeType !== Node.ELEMENT_NODE || old.nodeName !== made.nodeName) {
    old.replaceWith(made);
    return;
  }
  if (old.hasAttribute("data-scripted")) return;
  const kept = new Set(["open", "aria-sort", "data-key"]);
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name) && !kept.has(name)) old.removeAttribute(name);
  for (const { name, value } of made.attributes) {
    if (!kept.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const [before, after] = [[...old.childNodes], [...made.childNodes]];
  after.forEach((child, index) => (index < before.length ? liken(before[index], child) : old.append(child)));
  for (const child of before.slice(after.length)) child.remove();
}

function put(place, html) {
  const made = document.createElement("template");
  made.innerHTML = html;
  const wanted = place.cloneNode(false);
  wanted.append(made.content);
  liken(place, wanted);
}

// A table's columns as the report's script reads them: each different cell once, in the column's order.
function byColumn(lines) {
  const [{ labels, numeric, filtered }, ...rows] = lines.map((line) => JSON.parse(line));
  const columns = labels.map(function (_, index) {
    const cells = rows.map(([cells]) => cells[index]);
    const different = new Map(cells.map((cell) => [JSON.stringify(cell), cell]));
    const ordered = [...different.entries()].sort(([, a], [, b]) => inOrder(a, b));
    const codes = new Map(ordered.map(([key], code) => [key, code]));
    return {
      texts: ordered.map(([, [text]]) => text),
      codes: cells.map((cell) => codes.get(JSON.stringify(cell))),
      known: ordered.filter(([, [, sort]]) => sort !== null).length,
      strong: ordered.flatMap(([, [, , strong]], code) => (strong ? [code] : [])),
    };
  });
  const groups = filtered ? rows.map(([, group]) => group) : null;
  const values = filtered ? rows.map(([, , value]) => value) : null;
  return { labels, numeric, columns, groups, values };
}

// Numbers first, then words, then cells with neither.
function inOrder([a_text, a], [b_text, b]) {
  const kind = (sort) => (sort === null ? 2 : typeof sort === "string" ? 1 : 0);
  if (kind(a) !== kind(b)) return kind(a) - kind(b);
  const [x, y] = typeof a === "string" ? [a.toLowerCase(), b.toLowerCase()] : [a, b];
  if (x !== y && kind(a) < 2) return x < y ? -1 : 1;
  return a_text < b_text ? -1 : a_text > b_text ? 1 : 0;
}

function drawSections(changed) {
  const { name, sections } = json("contents") || { name: "", sections: [] };
  document.title = name ? `${name} – carbonopt watch` : "carbonopt watch";
  const place = byId("sections");
  for (const section of [...place.children]) if (!sections.includes(section.dataset.key)) section.remove();
  sections.forEach(function (key, index) {
    let section = [...place.children].find((one) => one.dataset.key === key);
    const isNew = !section;
    if (isNew) {
      section = document.createElement("div");
      section.dataset.key = key;
    }
    if (place.children[index] !== section) place.insertBefore(section, place.children[index] || null);
    if (isNew || changed.has(`section ${key}`)) put(section, text(`section ${key}`));
  });
}

function drawTables(changed) {
  for (const name of Object.keys(parts).filter((part) => part.startsWith("table "))) {
    const id = name.slice("table ".length);
    const element = byId(id);
    const known = tables[id];
    if (known && known.element === element) {
      if (changed.has(name)) known.update(byColumn(parts[name]));
    } else {
      tables[id] = longTable(element, byColumn(parts[name]));
      tables[id].filter(() => true);
    }
  }
  for (const filters of document.querySelectorAll(".filters")) {
    if (!rowFilters.some((known) => known.element === filters)) rowFilters.push(rowFilter(filters, json("steps")));
  }
}

function drawFigure(changed) {
  const place = byId("interactive");
  if (!parts.figure || !place) return;
  if (plotly === null) {
    plotly = false;
    const script = document.createElement("script");
    script.src = "/plotly.js";
    script.onload = function () {
      plotly = true;
      drawFigure(new Set(["figure"]));
      if (steps) steps.update(json("steps"));
    };
    document.head.append(script);
  }
  if (!plotly) return;
  if (!interactive || interactive.element !== place) interactive = interactiveFigure(json("figure"));
  else if (changed.has("figure") || changed.has("table all-trials")) interactive.update(json("figure"));
}

function drawSteps(changed) {
  const field = byId("step-number");
  if (!parts.steps || !field) return;
  if (!steps || steps.element !== field) steps = stepControl(json("steps"));
  if (changed.has("steps") || changed.has("figure")) steps.update(json("steps"));
}

function draw(changed) {
  const chosen = [...document.querySelectorAll(".filters select")].map((one) => [one, one.selectedOptions[0].textContent]);
  if (changed.has("trouble")) {
    byId("trouble").textContent = text("trouble");
    byId("trouble").hidden = !text("trouble");
  }
  if (changed.has("now")) put(byId("now"), text("now"));
  if (changed.has("header")) put(byId("header"), text("header"));
  drawSections(changed);
  drawTables(changed);
  for (const [select, group] of chosen) {
    const option = [...select.options].find((one) => one.textContent === group);
    if (select.isConnected) select.value = option ? option.value : "";
  }
  for (const filter of rowFilters) if (filter.isUsed && changed.has(`table ${filter.element.dataset.for}`)) filter.apply();
  drawFigure(changed);
  drawSteps(changed);
  tick();
}

function elapsed(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  const two = (value) => String(value).padStart(2, "0");
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
}

function tick() {
  for (const one of document.querySelectorAll("time.elapsed")) {
    one.textContent = `since ${elapsed((Date.now() - Date.parse(one.dateTime)) / 1000)}`;
  }
  const line = byId("connection");
  const said = lostSince === null
    ? "Connected: what changes is drawn at once."
    : `Not connected since ${new Date(lostSince).toLocaleString()}; trying again. Below is what was read last.`;
  if (line.textContent !== said) line.textContent = said;
  line.classList.toggle("lost", lostSince !== null);
}

let work = Promise.resolve(); // messages are taken one after the other

function onMessage(take) {
  return function (event) {
    const source = stream;
    heard = Date.now();
    lostSince = null;
    work = work.then(async function () {
      const content = await unpacked(event.data);
      if (source !== stream) return; // of a connection that was given up: the next one begins at `version`
      draw(take(content));
      version = event.lastEventId;
    });
  };
}

function lose() {
  if (lostSince === null) lostSince = Date.now();
  tick();
}

function close() {
  if (stream) stream.close();
  stream = null;
}

function connect() {
  close();
  heard = Date.now();
  stream = new EventSource(`/events?since=${encodeURIComponent(version)}`);
  stream.addEventListener("whole", onMessage(takeWhole));
  stream.addEventListener("change", onMessage(takeChange));
  stream.addEventListener("open", function () {
    heard = Date.now();
    lostSince = null;
    tick();
  });
  stream.addEventListener("alive", function () {
    heard = Date.now();
  });
  stream.addEventListener("error", function () {
    lose();
    if (stream && stream.readyState === EventSource.CLOSED) close(); // the timer below connects again
  });
}

// A page that nobody sees needs no connection, of which a browser has only six for one server.
document.addEventListener("visibilitychange", function () {
  if (document.hidden) close();
  else connect();
});
setInterval(function () {
  tick();
  if (document.hidden) return;
  if (!stream) connect();
  else if (Date.now() - heard > SILENT_MS) {
    lose();
    connect();
  }
}, 1000);
connect();
