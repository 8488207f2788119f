// The Pareto figure. It takes its text and grid colours from the page, so that it follows light and dark.
const pareto = (function () {
  if (!content.figure) return null;
  const place = document.getElementById("pareto");
  const details = document.getElementById("details");
  const trials = content.tables["all-trials"];
  const { data, layout } = content.figure;
  const narrow = () => place.clientWidth < 560;

  // Plotly reads simple HTML in what it shows at a mark.
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function lines(row) {
    const [trial, ...others] = trials.labels.map((label, column) => [label, cellText(trials, row, column)]);
    const named = others.map(([label, text]) => `${escaped(label)}: ${escaped(text.slice(0, 60))}`);
    return [`<b>Trial ${trial[1]}</b>`, ...named].join("<br>");
  }

  for (const trace of data) {
    if (trace.customdata) trace.text = trace.customdata.map(lines);
    trace.hovertemplate = "%{text}<extra></extra>";
  }
  const recommended = data.findIndex((trace) => trace.meta === "recommended");

  function themed() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--line"), linecolor: colour("--muted") };
    return Object.assign({}, layout, {
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow() ? 11 : 13, color: colour("--ink") },
      xaxis: Object.assign({}, layout.xaxis, axis),
      yaxis: Object.assign({}, layout.yaxis, axis),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--ink") },
    });
  }

  function draw() {
    Plotly.react(place, data, themed(), {
      responsive: true,
      displaylogo: false,
      plotlyServerURL: "",
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]], // none that uploads
    });
  }

  // A click keeps what the trial is below the figure, settings that all share included.
  function keep(row) {
    const list = document.createElement("dl");
    trials.labels.forEach(function (label, column) {
      const item = document.createElement("div");
      for (const [tag, text] of [["dt", label], ["dd", cellText(trials, row, column)]]) {
        item.appendChild(document.createElement(tag)).textContent = text;
      }
      list.append(item);
    });
    const shared = document.createElement("p");
    shared.className = "note";
    shared.textContent = content.constant && `The same in every trial: ${content.constant}.`;
    details.replaceChildren(list, shared);
    details.hidden = false;
  }

  draw();
  place.on("plotly_click", function (event) {
    const row = event.points.map((point) => point.customdata).find((one) => one !== undefined);
    if (row !== undefined) keep(row);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return {
    target(value, shown, answer) {
      const [line] = layout.shapes;
      Object.assign(line, { y0: value, y1: value });
      line.label.text = `target ${shown}`;
      const [x, y] = answer.place || [null, null]; // null: no mark; an empty list would take all marks away
      const moved = { x: [x], y: [y], customdata: [answer.row], text: [answer.place ? lines(answer.row) : ""] };
      Object.assign(data[recommended], moved);
      Plotly.relayout(place, { shapes: layout.shapes });
      // Of thousands of marks this one alone is drawn again.
      const at_once = { transition: { duration: 0 }, frame: { duration: 0, redraw: false }, mode: "immediate" };
      Plotly.animate(place, { data: [moved], traces: [recommended] }, at_once).catch(function (error) {
        if (error !== undefined) throw error; // without one, a later target has overtaken this one
      });
    },
  };
})();
