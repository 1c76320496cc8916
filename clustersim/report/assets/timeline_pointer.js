// Arrows to causes and effects of the box that one points at, buttons for those who cannot drag, and rows that others point to.
//
// middle: where the lane of a box has its middle at the present zoom, on the y axis.
clustersim.parts.timelinePointer = (figure, arrays, boxes, middle) => {
  "use strict";
  const { start, end } = boxes;
  const SHADOWED = 12; // dependants drawn on hover
  const { rows, size } = figure.facts;
  const { row, cause } = arrays;
  let dependants = null;

  function overlay(plot) {
    plot.style.position = "relative";
    plot.insertAdjacentHTML(
      "beforeend",
      `<svg class="arrows" aria-hidden="true"><defs><marker id="${figure.name}-tip" viewBox="0 0 8 8" refX="7" refY="4" ` +
        'markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs><g></g></svg>',
    );
    return plot.querySelector(".arrows g");
  }

  function arrow(plot, from, to, kind) {
    const { xaxis, yaxis } = plot._fullLayout;
    const inside = (at, most) => Math.max(0, Math.min(most, at));
    const x = (box, at) => xaxis._offset + inside(xaxis.l2p(at / size), xaxis._length);
    const y = (box) => yaxis._offset + inside(yaxis.l2p(middle(box)), yaxis._length);
    const [x0, y0, x1, y1] = [x(from, end(from)), y(from), x(to, start(to)), y(to)];
    const bend = Math.max(12, Math.abs(x1 - x0) / 2);
    return `<path class="${kind}" d="M${x0},${y0} C${x0 + bend},${y0} ${x1 - bend},${y1} ${x1},${y1}" marker-end="url(#${figure.name}-tip)"/>`;
  }

  function dependantsOf(box) {
    if (!dependants) {
      dependants = new Map();
      for (let dependant = 0; dependant < row.length; dependant++) {
        if (cause[dependant] < 0) continue;
        if (!dependants.has(cause[dependant])) dependants.set(cause[dependant], []);
        dependants.get(cause[dependant]).push(dependant);
      }
    }
    return (dependants.get(box) ?? []).slice(0, SHADOWED);
  }

  function arrowsOf(plot, box) {
    const before = cause[box] >= 0 ? [arrow(plot, cause[box], box, "cause")] : [];
    return [...before, ...dependantsOf(box).map((dependant) => arrow(plot, box, dependant, "effect"))].join("");
  }

  const KEYS = [["full step", 0, 0], ["−", 2, 0], ["+", 0.5, 0], ["←", 1, -0.5], ["→", 1, 0.5]];
  const NAMES = { "−": "zoom out", "+": "zoom in", "←": "earlier", "→": "later" };

  // Buttons for those who cannot drag.
  function keys(plot) {
    const bar = document.createElement("div");
    bar.className = "keys";
    for (const [sign, zoom, shift] of KEYS) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = sign;
      if (NAMES[sign]) button.setAttribute("aria-label", NAMES[sign]);
      button.addEventListener("click", () => move(plot, zoom, shift));
      bar.append(button);
    }
    plot.before(bar);
  }

  function move(plot, zoom, shift) {
    const most = figure.layout.xaxis.range[1];
    const [low, high] = plot.layout.xaxis.range;
    const width = zoom ? Math.min(most, (high - low) * zoom) : most;
    const from = zoom ? Math.max(0, Math.min(most - width, (low + high - width) / 2 + shift * width)) : 0;
    const change = { "xaxis.range": [from, from + width] };
    if (!zoom) change["yaxis.range"] = [...figure.layout.yaxis.range];
    Plotly.relayout(plot, change);
  }

  function attach(plot) {
    keys(plot);
    const layer = overlay(plot);
    plot.on("plotly_hover", ({ points }) => {
      const box = points[0]?.customdata;
      layer.innerHTML = box >= 0 ? arrowsOf(plot, box) : "";
    });
    const clear = () => (layer.innerHTML = "");
    plot.on("plotly_unhover", clear);
    plot.on("plotly_relayout", clear);
  }

  function mark(plot, place) {
    const { xaxis, yaxis } = plot._fullLayout;
    const [top, bottom] = [place - 0.5, place + 0.48].map((at) => yaxis._offset + yaxis.l2p(at));
    const around = `<rect class="shown" x="${xaxis._offset}" width="${xaxis._length}" y="${top}" height="${bottom - top}"/>`;
    plot.querySelector(".arrows g").innerHTML = around;
  }

  // Bring the row of a rank into view and mark it; whether there is one.
  function show(rank) {
    const place = rows.findIndex((candidate) => candidate.rank === rank);
    if (place < 0) return false;
    const plot = document.getElementById(figure.name);
    plot.scrollIntoView({ behavior: "smooth", block: "center" });
    Plotly.relayout(plot, { "yaxis.range": [...figure.layout.yaxis.range] }).then(() => mark(plot, place));
    return true;
  }

  return { attach, show };
};
