// A click, or Enter, on a column's head sorts the table by it; again turns the order round.
const keyOf = (row, column) => row.cells[column].dataset.key ?? "";
const numbers = /(\d+(?:\.\d+)?)/;  // run-9 comes before run-10, and lr0.001 before lr0.01
const compareTexts = (a, b) => {
  const [left, right] = [a.split(numbers), b.split(numbers)];
  for (let i = 0; i < Math.min(left.length, right.length); i++) {
    const order = i % 2 ? Number(left[i]) - Number(right[i]) : left[i].localeCompare(right[i], "en");
    if (order) return order;
  }
  return left.length - right.length;
};
const sortRows = (table, column, ascending) => {
  const sign = ascending ? 1 : -1;
  const rows = [...table.tBodies[0].rows].map((row) => ({row, key: keyOf(row, column)}));
  rows.sort((a, b) => {
    if (a.key === "" || b.key === "") return (a.key === "") - (b.key === "");  // unknown ones last
    const difference = Number(a.key) - Number(b.key);
    return sign * (Number.isNaN(difference) ? compareTexts(a.key, b.key) : difference);
  });
  table.tBodies[0].append(...rows.map(({row}) => row));
};
const resort = (table) => {
  const head = table.querySelector("th[aria-sort]");
  if (head) sortRows(table, head.cellIndex, head.ariaSort === "ascending");
};
document.addEventListener("click", (event) => {
  const button = event.target.closest("table.sortable thead button");
  if (!button) return;
  const head = button.closest("th"), table = button.closest("table");
  const ascending = head.ariaSort !== "ascending";
  for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  resort(table);
});
