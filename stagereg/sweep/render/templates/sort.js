// Sorts a table by the column whose heading is used. Gaps come last whichever way, and rows marked data-last after all.
"use strict";

const opposite = { ascending: "descending", descending: "ascending" };

function sort(table, rows, column) {
  const heads = [...table.tHead.rows[0].cells];
  const head = heads[column];
  const way = opposite[head.getAttribute("aria-sort")] ?? head.dataset.first;
  const sign = way === "ascending" ? 1 : -1;
  const key = (row) => row.cells[column]?.dataset.key;
  const rank = (row) => ("last" in row.dataset ? 2 : key(row) === undefined ? 1 : 0);
  const numeric = rows.every((row) => rank(row) > 0 || !Number.isNaN(Number(key(row))));
  const compared = (one, other) =>
    numeric ? Number(one) - Number(other) : one.localeCompare(other, undefined, { numeric: true });
  const sorted = [...rows].sort(
    (one, other) => rank(one) - rank(other) || (rank(one) === 0 ? sign * compared(key(one), key(other)) : 0),
  );
  for (const each of heads) each.setAttribute("aria-sort", each === head ? way : "none");
  table.tBodies[0].append(...sorted);
  document.querySelector(".live").textContent = `Sorted by ${head.innerText.trim()}, ${way}.`;
}

for (const table of document.querySelectorAll("table.sortable")) {
  const rows = [...table.tBodies[0].rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sort(table, rows, column));
  });
}
