// The interactive figure. It takes its text and grid colours from the page, so that it follows light and dark.
let interactive = null;

function interactiveFigure(content) {
  const place = document.getElementById("interactive");
  const details = document.getElementById("details");
  const narrow = () => place.clientWidth < 560;
  let data, layout, following, rows, shape_label, row_note;

  // Plotly reads simple HTML in what it shows at a mark.
  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function lines(row) {
    const [first, ...others] = rows.labels.map((label, column) => [label, cellText(rows, row, column)]);
    const named = others.map(([label, text]) => `${escaped(label)}: ${escaped(text.slice(0, 60))}`);
    return [`<b>${escaped(first[0])} ${escaped(first[1])}</b>`, ...named].join("<br>");
  }

  function take(content) {
    ({ data, layout, shape_label, row_note } = content);
    rows = tables[content.rows_in].source;
    for (const trace of data) {
      if (trace.customdata) trace.text = trace.customdata.map(lines);
      trace.hovertemplate = "%{text}<extra></extra>";
    }
    following = data.findIndex((trace) => trace.meta === content.moved);
  }

  function themed() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--line"), linecolor: colour("--muted") };
    return Object.assign({}, layout, {
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow() ? 11 : 13, color: colour("--ink") },
      xaxis: Object.assign({}, layout.xaxis, axis),
      yaxis: Object.assign({}, layout.yaxis, axis),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--ink") },
      uirevision: "kept", // what the reader has zoomed to stays when other data is drawn
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

  // A click keeps the mark's row below the figure.
  function keep(row) {
    const list = document.createElement("dl");
    rows.labels.forEach(function (label, column) {
      const item = document.createElement("div");
      for (const [tag, text] of [["dt", label], ["dd", cellText(rows, row, column)]]) {
        item.appendChild(document.createElement(tag)).textContent = text;
      }
      list.append(item);
    });
    const note = document.createElement("p");
    note.className = "note";
    note.textContent = row_note;
    details.replaceChildren(list, note);
    details.hidden = false;
  }

  take(content);
  draw();
  place.on("plotly_click", function (event) {
    const row = event.points.map((point) => point.customdata).find((one) => one !== undefined);
    if (row !== undefined) keep(row);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  return {
    element: place,
    update(content) {
      take(content);
      draw();
    },
    step(value, shown, step) {
      const [line] = layout.shapes;
      Object.assign(line, { y0: value, y1: value });
      line.label.text = `${shape_label} ${shown}`;
      const [edge] = layout.annotations;
      const { type, range } = layout.yaxis;
      const [low, high] = type === "log" ? range.map((end) => 10 ** end) : range;
      const text = `${line.label.text}, outside the frame`;
      Object.assign(edge, { text, visible: value < low || value > high, y: value > high ? 1 : 0 });
      const [x, y] = step.place || [null, null]; // null: no mark; an empty list would take all marks away
      const moved = { x: [x], y: [y], customdata: [step.row], text: [step.place ? lines(step.row) : ""] };
      Object.assign(data[following], moved);
      Plotly.relayout(place, { shapes: layout.shapes, annotations: layout.annotations });
      // Of thousands of marks this one alone is drawn again.
      const at_once = { transition: { duration: 0 }, frame: { duration: 0, redraw: false }, mode: "immediate" };
      Plotly.animate(place, { data: [moved], traces: [following] }, at_once).catch(function (error) {
        if (error !== undefined) throw error; // without one, a later step has overtaken this one
      });
    },
  };
}
