// Long tables: sorted by a click on a column's head, a second one the other way round; filtered; a page at a time.
// What has no value to sort by stays last. All texts come from the report; only counts are made here.
const PAGE_ROWS = {{ page_rows }};
const tables = {}; // by the element's id
const rowFilters = [];

function cellText(table, row, column) {
  return table.columns[column].texts[table.columns[column].codes[row]];
}

function longTable(element, content) {
  const pager = document.querySelector(`.pager[data-for="${element.id}"]`);
  const body = element.tBodies[0];
  let source, count, strong, order, kept;
  let sorted = null; // [column, whether descending]
  let keep = () => true;
  let page = 0;

  function show() {
    page = Math.min(page, Math.max(0, Math.ceil(kept.length / PAGE_ROWS) - 1));
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
    body.replaceChildren(...rows);
    const last = Math.min((page + 1) * PAGE_ROWS, kept.length);
    const number = (value) => value.toLocaleString("en");
    const of = kept.length === count ? number(count) : `${number(kept.length)} (of ${number(count)} in all)`;
    pager.querySelector("span").textContent = kept.length ? `${number(page * PAGE_ROWS + 1)}–${number(last)} of ${of}` : "none";
    pager.hidden = count <= PAGE_ROWS && kept.length === count;
    pager.querySelector("[data-turn='-1']").disabled = page === 0;
    pager.querySelector("[data-turn='1']").disabled = last === kept.length;
  }

  function take(content) {
    source = content;
    count = source.columns[0].codes.length;
    strong = source.columns.map((column) => new Set(column.strong));
    order = Array.from({ length: count }, (_, row) => row);
    if (sorted) arrange();
    kept = order.filter(keep);
  }

  function arrange() {
    const [index, descending] = sorted;
    const { codes, known } = source.columns[index];
    const sign = descending ? -1 : 1;
    order.sort(function (a, b) {
      const x = codes[a], y = codes[b];
      if (x >= known || y >= known) return (x >= known) - (y >= known) || a - b;
      return sign * (x - y) || a - b;
    });
  }

  function refresh() {
    kept = order.filter(keep);
    page = 0;
    show();
  }

  element.tHead.addEventListener("click", function (event) {
    const head = event.target.closest("th");
    if (!event.target.closest("button")) return;
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of element.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    sorted = [head.cellIndex, descending];
    arrange();
    refresh();
  });
  for (const button of pager.querySelectorAll("button")) {
    button.addEventListener("click", function () {
      page += Number(button.dataset.turn);
      show();
    });
  }
  take(content);
  return {
    element,
    get source() {
      return source;
    },
    filter(wanted) {
      keep = wanted;
      refresh();
    },
    // Shows other content, in the same order and on the same page.
    update(content) {
      take(content);
      show();
    },
  };
}

// Rows are picked by words anywhere in them, by group, and by whether their value reaches the chosen step.
function rowFilter(filters, steps) {
  const table = tables[filters.dataset.for];
  const [text, group, reaches, number] =
    ["text", "group", "value", "number"].map((name) => filters.querySelector(`[data-filter="${name}"]`));
  const rising = !steps || steps.rising;
  let target = steps && steps.own;
  let searched = null; // the content that `lines` were made of, at the first search
  let lines = [];

  function searchable(source) {
    const low = source.columns.map((column) => column.texts.map((one) => one.toLowerCase()));
    return source.columns[0].codes.map((_, row) =>
      source.columns.map((column, index) => low[index][column.codes[row]]).join("\n"));
  }

  function apply() {
    const { groups, values } = table.source;
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = group.value === "" ? null : Number(group.value);
    if (words.length && searched !== table.source) {
      searched = table.source;
      lines = searchable(searched);
    }
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
  return {
    element: filters,
    get isUsed() {
      return text.value !== "" || group.value !== "" || Boolean(reaches && reaches.checked);
    },
    apply,
    step(value, shown) {
      target = value;
      if (!reaches) return;
      number.textContent = shown;
      if (reaches.checked) apply();
    },
  };
}
