"use strict";

// The figure takes its text and grid colours from the page, so that it follows light and dark.
(function () {
  const source = document.getElementById("figure");
  if (!source) return;
  const place = document.getElementById("pareto");
  const figure = JSON.parse(source.textContent);
  const narrow = () => place.clientWidth < 560;

  function themed() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: colour("--line"), linecolor: colour("--muted") };
    return Object.assign({}, figure.layout, {
      font: { family: getComputedStyle(document.body).fontFamily, size: narrow() ? 11 : 13, color: colour("--ink") },
      xaxis: Object.assign({}, figure.layout.xaxis, axis),
      yaxis: Object.assign({}, figure.layout.yaxis, axis),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--ink") },
    });
  }

  function draw() {
    Plotly.react(place, figure.data, themed(), {
      responsive: true,
      displaylogo: false,
      plotlyServerURL: "",
      modeBarButtons: [["toImage"], ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]], // none that uploads
    });
  }
  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();

// A click on a column's head sorts by it, a second one the other way round; what has no value stays last.
(function () {
  function compare(a, b) {
    const x = Number(a), y = Number(b);
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
  }

  function sort(table, index, head) {
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const value = (row) => row.cells[index].dataset.sort;
    const rows = Array.from(table.tBodies[0].rows);
    rows.sort(function (a, b) {
      const x = value(a), y = value(b);
      if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
      return descending ? compare(y, x) : compare(x, y);
    });
    table.tBodies[0].append(...rows);
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    Array.from(table.tHead.rows[0].cells).forEach(function (head, index) {
      head.querySelector("button").addEventListener("click", () => sort(table, index, head));
    });
  }
})();
