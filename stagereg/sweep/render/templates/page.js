// Sorts and filters the table. An A/A row always stays below the row that it repeats. The buttons cover column heads
// but do not contain their text, because browsers omit buttons from heads that are repeated on printed pages.
const table = document.getElementById("table-0"), body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
const groups = [];
for (const row of body.rows) {
  if (row.classList.contains("aa") && groups.length) groups.at(-1).push(row);
  else groups.push([row]);
}
const known = (text) => text !== "" && text !== "nan";
function order(one, other, sign) {
  if (!known(one) || !known(other)) return known(other) - known(one);
  const [a, b] = [one, other].map((text) => Number(text.replace("inf", "Infinity")));
  return sign * (Number.isNaN(a) || Number.isNaN(b) ? one.localeCompare(other) : a - b || 0);
}
heads.forEach((head, at) => {
  const button = document.createElement("button");
  button.type = "button";
  button.ariaLabel = `Sort by ${head.dataset.name}`;
  head.append(button);
  button.addEventListener("click", () => {
    const first = head.dataset.first || "ascending", second = first === "ascending" ? "descending" : "ascending";
    const way = head.getAttribute("aria-sort") === first ? second : first;
    for (const each of heads) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", way);
    const value = (group) => group[0].cells[at].dataset.value;
    groups.sort((one, other) => order(value(one), value(other), way === "ascending" ? 1 : -1));
    body.append(...groups.flat());
  });
});
if (body.rows.length > Number(table.dataset.most)) {
  const label = document.createElement("label"), input = document.createElement("input"), count = document.createElement("output");
  input.type = "search";
  label.append("Filter ", input);
  const filter = document.createElement("p");
  filter.className = "note filter";
  filter.append(label, " ", count);
  table.parentElement.before(filter);
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/);
    for (const group of groups) {
      const text = group[0].textContent.toLowerCase();
      for (const row of group) row.hidden = !words.every((word) => text.includes(word));
    }
    count.value = `${[...body.rows].filter((row) => !row.hidden).length} of ${body.rows.length} rows`;
  });
}
