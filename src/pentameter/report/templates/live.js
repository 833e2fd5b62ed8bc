// Follows the server while the page is visible: the table of runs row by row, any other page whole.
const live = document.body.dataset.live;
const tell = (text) => {
  const link = document.getElementById("link");
  if (link.textContent !== text) link.textContent = text;
};
const made = (name, values = {}, ...children) => {
  const element = document.createElement(name);
  for (const key in values) element.setAttribute(key, values[key]);
  element.append(...children);
  return element;
};
const drawn = (name, values) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in values) element.setAttribute(key, values[key]);
  return element;
};

// The table of runs.
const board = document.querySelector("table.board"), runs = new Map(), ticked = new Set();
let session = "", version = -1, columns = [];

const spark = (points) => {
  const svg = drawn("svg", {viewBox: "0 0 120 30", class: "spark", "aria-hidden": "true"});
  if (points.length < 2) return svg;
  const first = points[0][0], last = points[points.length - 1][0];
  const settled = points.filter(([step]) => step >= first + (last - first) / 10).map(([, loss]) => loss);
  const low = Math.min(...points.map(([, loss]) => loss)), high = Math.max(...settled);
  const place = ([step, loss]) => [
    2 + 112 * (step - first) / (last - first || 1),
    27 - 24 * Math.min(1.1, (loss - low) / (high - low || 1)),
  ].map((value) => value.toFixed(1)).join(",");
  const [x, y] = place(points[points.length - 1]).split(",");
  svg.append(drawn("polyline", {points: points.map(place).join(" ")}), drawn("circle", {cx: x, cy: y, r: 2.2}));
  return svg;
};
const fill = (cell, key, ...children) => {
  cell.dataset.key = key ?? "";
  cell.replaceChildren(...children);
};
const showTicks = () => {
  const addresses = [...ticked], button = document.getElementById("compare");
  const enough = addresses.length > 1;
  button.setAttribute("aria-disabled", String(!enough));
  button.textContent = enough ? `Compare ${addresses.length} runs` : "Compare";
  if (enough) button.href = `/compare?runs=${addresses.join(",")}`;
  else button.removeAttribute("href");
  document.getElementById("ticked").textContent = enough ? "" : "Tick two runs or more to compare them.";
};
const newRow = ({name, address}) => {
  const row = made("tr"), box = made("input", {type: "checkbox", "aria-label": `Compare ${name}`});
  box.addEventListener("change", () => {
    if (box.checked) ticked.add(address); else ticked.delete(address);
    row.cells[0].dataset.key = box.checked ? 0 : 1;
    showTicks();
  });
  row.append(made("td", {"data-key": 1}, box), made("th", {scope: "row"}));
  for (const kind of ["", "", "number", "", "number", "number", "where"]) row.append(made("td", {class: kind}));
  return {row, box, points: []};
};
const showRow = (run, news) => {
  const cells = run.row.cells, broken = news.state === "broken";
  if (news.anew) run.points = [];
  run.points.push(...news.points);
  run.box.disabled = broken;
  const title = broken ? made("b", {}, news.name)
    : made("a", {href: `/run/${news.address}`}, news.name);
  const below = [news.title, news.why, ...(news.unread ?? [])].filter(Boolean).join(" – ");
  const inner = made("div", {}, title);
  if (below) inner.append(made("small", {title: below}, below));
  fill(cells[1], news.name, inner);
  fill(cells[2], news.state, made("span", {class: `badge ${news.kind}`}, news.state));
  while (cells.length > 9) cells[9].remove();
  if (broken) {
    for (const _ of columns) run.row.append(made("td"));  // as many as heads, by which rows are sorted
    for (let i = 3; i < cells.length; i++) fill(cells[i], "");
    return;
  }
  const done = made("div", {class: `progress ${news.kind}`}), filled = made("i");
  filled.style.width = `${100 * (news.percent ?? 0)}%`;
  done.append(filled);
  const percent = news.percent === null ? "" : `${Math.floor(100 * news.percent)} %, `;
  fill(cells[3], news.percent, done, made("small", {}, `${percent}step ${news.steps.toLocaleString("en")}`));
  fill(cells[4], news.left[0], news.left[1]);
  fill(cells[5], news.loss[0], made("div", {class: "loss"}, spark(run.points), news.loss[1]));
  fill(cells[6], news.best[0], news.best[1]);
  fill(cells[7], news.speed[0], news.speed[1]);
  fill(cells[8], news.where, news.where);
  for (const path of columns) {
    const text = news.settings[path] ?? "–", number = Number(text.replaceAll(",", ""));
    const cell = made("td", Number.isNaN(number) ? {} : {class: "number"});
    fill(cell, Number.isNaN(number) ? text : number, text);
    run.row.append(cell);
  }
};
const showColumns = (paths) => {
  if (paths.join() === columns.join()) return;
  columns = paths;
  const heads = board.tHead.rows[0];
  while (heads.cells.length > 9) heads.cells[9].remove();
  for (const path of columns) {
    const button = made("button", {type: "button"}), words = path.split(/(?<=[._])/);
    for (const word of words) button.append(word, made("wbr"));
    heads.append(made("th", {scope: "col"}, button));
  }
};
const followRuns = async () => {
  const reply = await fetch(`${live}?session=${session}&after=${version}`);
  if (!reply.ok) throw new Error(await reply.text());
  const news = await reply.json(), addresses = new Set(news.addresses);
  [session, version] = [news.session, news.version];
  showColumns(news.columns);
  for (const [address, run] of runs) {
    if (addresses.has(address)) continue;
    run.row.remove();
    runs.delete(address);
    ticked.delete(address);
  }
  const focused = document.activeElement;
  for (const row of news.rows) {
    if (!runs.has(row.address)) runs.set(row.address, newRow(row));
    const run = runs.get(row.address), held = run.row.contains(focused) && focused.tagName === "A";
    showRow(run, row);
    if (!run.row.isConnected) board.tBodies[0].append(run.row);
    if (held) run.row.querySelector("a")?.focus({preventScroll: true});
    run.state = row.state;
  }
  if (news.rows.length) resort(board);
  showTicks();
  const states = new Map();
  for (const {state} of runs.values()) states.set(state, (states.get(state) ?? 0) + 1);
  document.getElementById("counts").textContent = [...states].map(([state, n]) => `${n} ${state}`).join(", ");
  document.getElementById("empty").hidden = runs.size > 0;
  for (const id of ["folder", "where"]) document.getElementById(id).textContent = news.folder;
};

// Any other page: `main` is replaced where it stands, with what is open, chosen and sorted.
const followPage = async () => {
  const reply = await fetch(live);
  if (!reply.ok) throw new Error(await reply.text());
  const {version: newest} = await reply.json();
  if (newest === document.body.dataset.version) return;
  const page = await fetch(location.href);
  if (!page.ok) throw new Error(await page.text());
  const next = new DOMParser().parseFromString(await page.text(), "text/html");
  if (next.body.dataset.version === document.body.dataset.version) return;
  document.body.dataset.version = next.body.dataset.version;
  const main = document.querySelector("main"), focused = document.activeElement?.id;
  const open = [...main.querySelectorAll("details[open][id]")].map(({id}) => id);
  const chosen = [...main.querySelectorAll("input:checked")].map(({id}) => id);
  const sorted = [...main.querySelectorAll("th[aria-sort]")].map((head) => [head.cellIndex, head.ariaSort]);
  const across = [...main.querySelectorAll(".scroll")].map((box) => box.scrollLeft);
  main.replaceChildren(...document.adoptNode(next.querySelector("main")).childNodes);
  document.title = next.title;
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  for (const id of chosen) { const box = document.getElementById(id); if (box) box.checked = true; }
  const table = main.querySelector("table.sortable");
  for (const [column, order] of table ? sorted : []) {
    table.querySelector("th[aria-sort]")?.removeAttribute("aria-sort");
    table.tHead.rows[0].cells[column]?.setAttribute("aria-sort", order);
    resort(table);
  }
  main.querySelectorAll(".scroll").forEach((box, i) => { box.scrollLeft = across[i] ?? 0; });
  if (focused) document.getElementById(focused)?.focus({preventScroll: true});
  showValues();
};

let waiting = 0;
const follow = async () => {
  clearTimeout(waiting);
  if (document.hidden) return;
  let seconds = 2;
  try {
    await (board ? followRuns() : followPage());
    tell("");
  } catch (error) {
    seconds = 5;
    tell(`not live: ${error instanceof TypeError ? "watch does not answer" : error.message}`);
  }
  clearTimeout(waiting);
  waiting = setTimeout(follow, 1000 * seconds);
};
document.addEventListener("visibilitychange", follow);
follow();
