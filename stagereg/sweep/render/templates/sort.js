// Sorts a table by the column whose heading is used. Gaps come last whichever way.
"use strict";

const opposite = { ascending: "descending", descending: "ascending" };

function sort(table, rows, column) {
  const heads = [...table.tHead.rows[0].cells];
  const way = opposite[heads[column].ariaSort] ?? heads[column].dataset.first;
  const key = (row) => row.cells[column].dataset.key;
  const filled = rows.filter((row) => key(row) !== undefined);
  const numeric = filled.every((row) => !Number.isNaN(Number(key(row))));
  filled.sort((one, other) => numeric ? key(one) - key(other) : key(one).localeCompare(key(other)));
  if (way === "descending") filled.reverse();
  for (const head of heads) head.ariaSort = head === heads[column] ? way : "none";
  table.tBodies[0].append(...filled, ...rows.filter((row) => key(row) === undefined));
  document.querySelector(".live").textContent = `Sorted by ${heads[column].innerText.trim()}, ${way}.`;
}

for (const table of document.querySelectorAll("table")) {
  const rows = [...table.tBodies[0].rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sort(table, rows, column));
  });
}
