// Long tables: sorted by a click on a column's head, a second one the other way round; filtered; a page at a time.
// What has no value to sort by stays last. All texts come from the report; only counts are made here.
const PAGE_ROWS = {{ page_rows }};
const tables = {};

function cellText(table, row, column) {
  return table.columns[column].texts[table.columns[column].codes[row]];
}

function longTable(id) {
  const element = document.getElementById(id);
  if (!element) return null;
  const source = content.tables[id];
  const count = source.columns[0].codes.length;
  const pager = document.querySelector(`.pager[data-for="${id}"]`);
  const strong = source.columns.map((column) => new Set(column.strong));
  const heads = Array.from(element.tHead.rows[0].cells);
  let order = Array.from({ length: count }, (_, row) => row);
  let kept = order;
  let keep = () => true;
  let page = 0;

  function show() {
    const rows = kept.slice(page * PAGE_ROWS, (page + 1) * PAGE_ROWS).map(function (row) {
      const line = document.createElement("tr");
      source.columns.forEach(function (column, index) {
        const cell = line.insertCell();
        cell.textContent = column.texts[column.codes[row]];
        if (source.numeric[index]) cell.classList.add("number");
        if (strong[index].has(column.codes[row])) cell.classList.add("strong");
      });
      return line;
    });
    element.tBodies[0].replaceChildren(...rows);
    const last = Math.min((page + 1) * PAGE_ROWS, kept.length);
    const number = (value) => value.toLocaleString("en");
    const of = kept.length === count ? number(count) : `${number(kept.length)} (of ${number(count)} in all)`;
    pager.querySelector("span").textContent = kept.length ? `${number(page * PAGE_ROWS + 1)}–${number(last)} of ${of}` : "none";
    pager.hidden = count <= PAGE_ROWS && kept.length === count;
    pager.querySelector("[data-turn='-1']").disabled = page === 0;
    pager.querySelector("[data-turn='1']").disabled = last === kept.length;
  }

  function refresh() {
    kept = order.filter(keep);
    page = 0;
    show();
  }

  function sort(index) {
    const descending = heads[index].getAttribute("aria-sort") === "ascending";
    for (const head of heads) head.setAttribute("aria-sort", "none");
    heads[index].setAttribute("aria-sort", descending ? "descending" : "ascending");
    const { codes, known } = source.columns[index];
    const sign = descending ? -1 : 1;
    order.sort(function (a, b) {
      const x = codes[a], y = codes[b];
      if (x >= known || y >= known) return (x >= known) - (y >= known) || a - b;
      return sign * (x - y) || a - b;
    });
    refresh();
  }

  heads.forEach((head, index) => head.querySelector("button").addEventListener("click", () => sort(index)));
  for (const button of pager.querySelectorAll("button")) {
    button.addEventListener("click", function () {
      page += Number(button.dataset.turn);
      show();
    });
  }
  return {
    source,
    filter(wanted) {
      keep = wanted;
      refresh();
    },
  };
}

for (const id of Object.keys(content.tables)) tables[id] = longTable(id);

// Rows are picked by words anywhere in them, by group, and by whether their value reaches the chosen step.
const stepFilters = Array.from(document.querySelectorAll(".filters")).map(function (filters) {
  const table = tables[filters.dataset.for];
  const { groups, values } = table.source;
  const [text, group, reaches, number] =
    ["text", "group", "value", "number"].map((name) => filters.querySelector(`[data-filter="${name}"]`));
  const rising = !content.steps || content.steps.rising;
  let target = content.steps && content.steps.own;
  let lines = null; // made at the first search

  function searchable() {
    const low = table.source.columns.map((column) => column.texts.map((one) => one.toLowerCase()));
    return table.source.columns[0].codes.map((_, row) =>
      table.source.columns.map((column, index) => low[index][column.codes[row]]).join("\n"));
  }

  function apply() {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = group.value === "" ? null : Number(group.value);
    if (words.length && !lines) lines = searchable();
    table.filter(function (row) {
      if (wanted !== null && groups[row] !== wanted) return false;
      if (reaches && reaches.checked) {
        if (values[row] === null || (rising ? values[row] > target : values[row] < target)) return false;
      }
      return words.every((word) => lines[row].includes(word));
    });
  }

  text.addEventListener("input", apply);
  group.addEventListener("change", apply);
  if (reaches) reaches.addEventListener("change", apply);
  return function (value, shown) {
    target = value;
    if (!reaches) return;
    number.textContent = shown;
    if (reaches.checked) apply();
  };
});
