// Sorts a table by the column whose heading is used. Gaps come last whichever way, and rows marked data-last after all.
"use strict";

const live = document.querySelector(".live");

function compared(one, other, numeric) {
  return numeric ? Number(one) - Number(other) : one.localeCompare(other, undefined, { numeric: true });
}

function sort(table, rows, column) {
  const heads = table.tHead.rows[0].cells;
  const head = heads[column];
  const opposite = { ascending: "descending", descending: "ascending" };
  const way = opposite[head.getAttribute("aria-sort")] ?? head.dataset.first;
  const numeric = "numeric" in head.dataset;
  const sign = way === "ascending" ? 1 : -1;
  const place = new Map(rows.map((row, index) => [row, index]));
  const key = (row) => row.cells[column]?.dataset.key;
  const rank = (row) => ("last" in row.dataset ? 2 : key(row) === undefined ? 1 : 0);
  const sorted = [...rows].sort(
    (one, other) =>
      rank(one) - rank(other) ||
      (rank(one) === 0 ? sign * compared(key(one), key(other), numeric) : 0) ||
      place.get(one) - place.get(other),
  );
  for (const one of heads) one.setAttribute("aria-sort", one === head ? way : "none");
  table.tBodies[0].append(...sorted);
  if (live) live.textContent = `Sorted by ${head.innerText.trim()}, ${way}.`;
}

for (const table of document.querySelectorAll("table.sortable")) {
  const rows = [...table.tBodies[0].rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sort(table, rows, column));
  });
}
