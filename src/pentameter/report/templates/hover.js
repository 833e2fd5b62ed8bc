const showValues = () => { for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const plot = JSON.parse(svg.dataset.hover), [left, top, right, bottom] = plot.box;
  const make = (name, values) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in values) made.setAttribute(key, values[key]);
    return made;
  };
  const scale = plot.log ? Math.log : (value) => value;
  const [low, high] = plot.y.map(scale);
  const toX = (x) => left + (x - plot.x[0]) / (plot.x[1] - plot.x[0]) * (right - left);
  const toY = (y) => bottom - (scale(y) - low) / (high - low) * (bottom - top);
  const said = (value) => value.toLocaleString("en", {maximumSignificantDigits: 5});
  const nearest = (curve, x) => {
    let best = 0;
    curve.x.forEach((at, i) => { if (Math.abs(at - x) < Math.abs(curve.x[best] - x)) best = i; });
    return best;
  };
  const marks = make("g", {visibility: "hidden", "pointer-events": "none"});
  const line = make("line", {y1: top, y2: bottom, stroke: "var(--muted)", "stroke-width": .8});
  marks.append(line);
  for (const curve of plot.curves) {
    curve.dot = make("circle", {r: 3.2, fill: curve.colour});
    marks.append(curve.dot);
  }
  svg.append(marks);
  const box = document.createElement("div");
  box.className = plot.curves.length > 10 ? "hover many" : "hover";
  box.hidden = true;
  svg.parentNode.append(box);
  const hide = () => { box.hidden = true; marks.setAttribute("visibility", "hidden"); };
  const densest = plot.curves.reduce((a, b) => a.x.length >= b.x.length ? a : b);
  const show = (event) => {
    const frame = svg.getBoundingClientRect();
    const unit = frame.width / svg.viewBox.baseVal.width;
    const at = (event.clientX - frame.left) / unit;
    if (at < left - 8 || at > right + 8) return hide();
    const asked = plot.x[0] + (at - left) / (right - left) * (plot.x[1] - plot.x[0]);
    const x = densest.x[nearest(densest, asked)];
    line.setAttribute("x1", toX(x));
    line.setAttribute("x2", toX(x));
    box.replaceChildren(`${plot.unit} ${said(x)}`);
    for (const curve of plot.curves) {
      const i = nearest(curve, x), y = toY(curve.y[i]);
      curve.dot.setAttribute("cx", toX(curve.x[i]));
      curve.dot.setAttribute("cy", y);
      curve.dot.setAttribute("visibility", y < top - 1 || y > bottom + 1 ? "hidden" : "inherit");
      const row = document.createElement("div"), key = document.createElement("i");
      key.style.background = curve.colour;
      const where = curve.x[i] === x ? "" : ` at ${said(curve.x[i])}`;
      row.append(key, `${curve.name} ${said(curve.y[i])}${where}`);
      box.append(row);
    }
    marks.setAttribute("visibility", "visible");
    box.hidden = false;
    const room = svg.parentNode.clientWidth - box.offsetWidth;
    const inset = frame.left - svg.parentNode.getBoundingClientRect().left;
    const beside = toX(x) * unit + inset + 14;
    box.style.left = `${Math.max(0, Math.min(beside, room))}px`;
    if (beside > room) box.style.left = `${Math.max(0, beside - 28 - box.offsetWidth)}px`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", hide);
} };
showValues();
