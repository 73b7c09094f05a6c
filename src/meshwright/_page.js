// Tables that sort and filter, the data to download, and folded parts open on paper. Without
// scripts the page says the same. Nothing is loaded, and nothing of the page's text is run.
(() => {
  "use strict";
  const units = {B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40, us: 1e-6, ms: 1e-3, s: 1};

  // What a cell says as a number, in bytes or seconds where it has such a unit.
  const number = (text) => {
    const read = /(-?[\d,]*\.?\d+(?:e[+-]?\d+)?)\s*([A-Za-z%]*)/.exec(text);
    return read ? parseFloat(read[1].replaceAll(",", "")) * (units[read[2]] ?? 1) : -Infinity;
  };

  const sort = (table, column, heading) => {
    const numeric = heading.classList.contains("number");
    const before = heading.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numeric;
    const text = (row) => row.cells[column].textContent.trim();
    const body = table.tBodies[0];
    const rows = [...body.rows].sort((a, b) => {
      const order = numeric
        ? number(text(a)) - number(text(b))
        : text(a).localeCompare(text(b), undefined, {numeric: true});
      return down ? -order : order;
    });
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows);
  };

  const filtered = (table, words) => {
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  };

  for (const table of document.querySelectorAll("main .wide > table")) {
    if (!table.tHead || table.tBodies[0].rows.length < 2) continue;
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      if (!heading.textContent.trim()) return;
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      button.addEventListener("click", () => sort(table, column, heading));
      heading.append(button);
    });
    if (table.tBodies[0].rows.length > 8) {
      const input = document.createElement("input");
      input.type = "search";
      input.placeholder = "filter rows";
      input.setAttribute("aria-label", `Filter: ${table.parentElement.getAttribute("aria-label")}`);
      input.addEventListener("input", () =>
        filtered(table, input.value.toLowerCase().split(/\s+/).filter(Boolean)));
      table.parentElement.before(input);
    }
  }

  const data = document.getElementById("meshwright-data");
  const link = document.getElementById("meshwright-download");
  if (data && link) {
    link.href = URL.createObjectURL(new Blob([data.textContent], {type: "application/json"}));
    link.hidden = false;
  }
  addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
  });
})();
