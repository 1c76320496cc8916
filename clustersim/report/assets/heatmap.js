// Draws what all ranks do over time: for every rank the row of its class, as many rows as can be told apart.
//
// arrays.category: [classes, bins] number of a part; seconds: [classes, parts]; simulated: [classes] the rank that was
// simulated; classOf: [ranks] the class of each, NOBODY where it is not in the file; nodeOf: [ranks] the node of each.
clustersim.behaviours.heatmap = (figure, arrays, tools) => {
  "use strict";
  const { parts, axes, first, orders, axisLabels, bins, makespan, size, most } = figure.facts;
  const { category, seconds, simulated, classOf, nodeOf } = arrays;
  const NOBODY = 65535;
  const MOST_TICKS = 12;
  const MOST_RANGES = 4;
  const SIGNS = {
    dot: { symbol: "circle", size: 3.5, color: "#16191d" },
    dash: { symbol: "line-ew", size: 6, line: { width: 1.6, color: "#16191d" } },
  };
  const ACROSS = 60; // signs side by side at most, a third of it on a small screen
  const DOWN = 32;
  const panel = document.getElementById("heatmap-row");
  const asked = document.getElementById("heatmap-rank");
  const rowsOf = orders.map(ordered);
  const colours = parts.flatMap(({ colour }, place) => [place, place + 1].map((edge) => [edge / parts.length, colour]));
  let drawn = []; // the rank of each row of the picture
  let present = 0; // the order that is shown
  let chosen = null; // the rank that the panel tells of
  let picture = null;

  // Ranks before the first are an encoder's own, the first on the pipeline.
  const place = (rank, axis) =>
    rank < first ? -1 : (Math.floor((rank - first) / axes[axis][1]) % axes[axis][0]) + (first > 0 && axis === "pp");
  const large = (axis) => axes[axis][0] > 1;

  // All ranks that are in the file, sorted by their places on the axes, the first axis changing last.
  function ordered(names) {
    const ranks = Array.from({ length: first }, (_, rank) => rank).filter((rank) => classOf[rank] !== NOBODY);
    const step = (depth, rank) => {
      if (depth === names.length) {
        if (classOf[rank] !== NOBODY) ranks.push(rank);
        return;
      }
      const [degree, stride] = axes[names[depth]];
      for (let coordinate = 0; coordinate < degree; coordinate++) step(depth + 1, rank + coordinate * stride);
    };
    step(0, first);
    return Uint32Array.from(ranks);
  }

  const coordinates = (rank, names) =>
    rank < first ? "encoder" : names.filter(large).map((axis) => `${axis} ${place(rank, axis)}`).join(", ");

  const several = nodeOf.some((node) => node !== nodeOf[0]);
  const node = (rank) => (several ? `node ${nodeOf[rank]}` : "");

  const where = (rank) => [coordinates(rank, axisLabels[present]), node(rank)].filter(Boolean).join(", ");

  // How many ranks each class has.
  const members = new Uint32Array(simulated.length);
  for (const rankClass of classOf) if (rankClass !== NOBODY) members[rankClass] += 1;

  function sameAs(rank) {
    const memberCount = members[classOf[rank]];
    const run = simulated[classOf[rank]];
    return memberCount > 1 ? `the same as ${tools.count(memberCount)} ranks, simulated as rank ${run}` : "like no other rank";
  }

  function words(rank, bin) {
    const part = parts[category[classOf[rank] * bins + bin]];
    const [from, to] = [bin, bin + 1].map((edge) => tools.seconds(edge * makespan / bins));
    return `<b>rank ${rank}</b>${where(rank) ? `, ${where(rank)}` : ""}<br>${from} to ${to}: ${part.key}mostly ${part.name}<br>${sameAs(rank)}`;
  }

  // The rows in a range as [low, high], at least one.
  function seen(layout) {
    const rows = rowsOf[present].length;
    const [one, other] = layout.yaxis.range;
    const low = Math.min(Math.max(0, Math.round(Math.min(one, other) + 0.5)), rows - 1);
    return [low, Math.max(low, Math.min(rows - 1, Math.round(Math.max(one, other) - 0.5)))];
  }

  // Of the ranks of some rows the one that fewest others are like, so that none that differs is lost; else the middle one.
  function rarest(ranks, low, high) {
    let smallest = ranks[(low + high) >> 1];
    for (let row = low; row <= high; row++) if (members[classOf[ranks[row]]] < members[classOf[smallest]]) smallest = ranks[row];
    return smallest;
  }

  function traces(layout, plot, order = 0) {
    if (order !== present) layout.yaxis.range = [rowsOf[order].length - 0.5, -0.5];
    present = order;
    const [low, high] = seen(layout);
    const bandRows = Math.ceil((high - low + 1) / most);
    const ranks = rowsOf[present];
    drawn = [];
    const edges = [low - 0.5];
    for (let row = low; row <= high; row += bandRows) {
      const last = Math.min(high, row + bandRows - 1);
      drawn.push(rarest(ranks, row, last));
      edges.push(last + 0.5);
    }
    const z = drawn.map((rank) => category.subarray(classOf[rank] * bins, (classOf[rank] + 1) * bins));
    label(layout, low, high);
    outline(layout);
    const cells = {
      type: "heatmap", z, y: edges, x0: makespan / bins / 2 / size, dx: makespan / bins / size,
      zmin: -0.5, zmax: parts.length - 0.5, colorscale: colours, showscale: false, zsmooth: false,
      hoverinfo: "none", // words for every cell would take longer than drawing them: `attach` shows those of one
    };
    return [cells, ...Object.keys(SIGNS).map((sign) => signs(sign, edges, layout))];
  }

  // Signs on the cells whose part has this one, on a coarse grid: they say without colour which kind a part is of.
  function signs(sign, edges, layout) {
    const [from, to] = layout.xaxis.range.map((edge) => (edge * size * bins) / makespan);
    const first = Math.max(0, Math.min(bins - 1, Math.floor(from)));
    const columns = spaced(first, Math.max(first + 1, Math.min(bins, Math.ceil(to))), tools.narrow() ? ACROSS / 3 : ACROSS);
    const points = spaced(0, drawn.length, DOWN).flatMap((row) => {
      const own = columns.filter((bin) => parts[category[classOf[drawn[row]] * bins + bin]].sign === sign);
      return own.map((bin) => [((bin + 0.5) * makespan) / bins / size, (edges[row] + edges[row + 1]) / 2]);
    });
    return {
      type: "scatter", mode: "markers", x: points.map(([x]) => x), y: points.map(([, y]) => y), marker: SIGNS[sign], hoverinfo: "skip",
    };
  }

  // At most so many of the whole numbers from low up to high, evenly spaced.
  function spaced(low, high, maxCount) {
    const shown = Math.min(maxCount, high - low);
    return Array.from({ length: shown }, (_, place) => low + Math.floor(((place + 0.5) * (high - low)) / shown));
  }

  // Ticks where the axis that changes slowest, but often enough, changes.
  function label(layout, low, high) {
    const ranks = rowsOf[present];
    const names = orders[present].filter(large);
    const single = high - low < MOST_TICKS;
    let ticks = [];
    for (let depth = 1; depth <= Math.max(1, names.length) && (single || ticks.length < 4); depth++) {
      const outer = names.slice(0, depth);
      ticks = [];
      for (let row = low; row <= high; row++) {
        const changes = row === low || outer.some((axis) => place(ranks[row], axis) !== place(ranks[row - 1], axis));
        if (changes) ticks.push([row, ranks[row], outer]);
      }
    }
    const step = Math.ceil(ticks.length / MOST_TICKS);
    ticks = ticks.filter((_, number) => number % step === 0);
    layout.yaxis.tickmode = "array";
    layout.yaxis.tickvals = ticks.map(([row]) => row);
    layout.yaxis.ticktext = ticks.map(([, rank, outer]) => {
      const short = coordinates(rank, outer);
      return (single && !tools.narrow() && short ? `${short} · rank ${rank}` : single ? `rank ${rank}` : short) + " ";
    });
  }

  // A frame around the chosen rank's row.
  function outline(layout) {
    const row = chosen === null ? -1 : rowsOf[present].indexOf(chosen);
    const line = { color: tools.colour("ink"), width: 2 };
    layout.shapes = row < 0 ? [] : [{ type: "rect", xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, line }];
  }

  // Ranks of a class in ranges: "0-7, 16-23 and 112 more".
  function ranges(own) {
    const runs = [];
    for (let rank = 0; rank < classOf.length; rank++) {
      if (classOf[rank] !== own) continue;
      const last = runs.at(-1);
      if (last && last[1] === rank - 1) last[1] = rank;
      else runs.push([rank, rank]);
    }
    const said = runs.slice(0, MOST_RANGES).map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`));
    const rest = runs.slice(MOST_RANGES).reduce((sum, [first, last]) => sum + last - first + 1, 0);
    return said.join(", ") + (rest ? ` and ${tools.count(rest)} more` : "");
  }

  function spent(own) {
    const shares = parts.map((part, number) => ({ ...part, time: seconds[own * parts.length + number] }));
    return shares.filter(({ time }) => time > 5e-4 * makespan).sort((one, other) => other.time - one.time).map((part) =>
      `<span style="white-space:nowrap">${part.key}${part.name} ${tools.seconds(part.time)} ` +
      `(${tools.number(Number((100 * part.time / makespan).toPrecision(3)))} %)</span>`).join(" · ");
  }

  // Tell of a rank below the picture, and frame its row.
  function tell(rank) {
    const own = classOf[rank];
    if (own === undefined || own === NOBODY) {
      panel.innerHTML = own === undefined ? `<p>There are ranks 0 to ${tools.count(classOf.length - 1)}.</p>`
        : `<p>Rank ${rank} differs from all others, and is not among those that the file holds.</p>`;
      return;
    }
    chosen = rank;
    const run = simulated[own];
    const others = members[own] > 1
      ? `${tools.count(members[own])} ranks do the same at the same times: ${ranges(own)}. Rank ${run} was simulated for them.`
      : "No other rank does the same.";
    panel.innerHTML = `<p><b>Rank ${rank}</b>${where(rank) ? `: ${where(rank)}` : ""}. ${others}</p><p class="caption">${spent(own)}</p>`;
    const timeline = tools.figure("timeline");
    if (timeline) panel.append(leading(timeline, rank));
    if (picture) tools.redraw();
  }

  // What leads to the timeline's row of a rank, or of one that does the same; words where there is none.
  function leading(timeline, rank) {
    const shown = timeline.figure.facts.rows.map((row) => row.rank).filter((candidate) => classOf[candidate] === classOf[rank]);
    if (!shown.length) return Object.assign(document.createElement("p"), { className: "caption", textContent: `Rank ${rank} is not shown in the timeline.` });
    const row = shown.includes(rank) ? rank : shown[0];
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: `rank ${row} in the timeline` });
    button.addEventListener("click", () => timeline.behaviour?.show?.(row));
    return button;
  }

  const cell = ({ points: [point] }) => point.pointIndex ?? point.pointNumber;

  // Text at the pointer.
  function hovering(plot) {
    const tip = document.createElement("div");
    tip.id = "heatmap-words";
    tip.style.cssText = "position:fixed;display:none;z-index:9;pointer-events:none;max-width:300px;padding:4px 8px;font-size:12px;" +
      "background:var(--surface);color:var(--ink);border:1px solid var(--muted);border-radius:3px";
    document.body.append(tip);
    plot.on("plotly_hover", (event) => {
      const [row, bin] = cell(event);
      tip.innerHTML = words(drawn[row], bin);
      tip.style.display = "block";
      const { clientX, clientY } = event.event;
      const room = document.documentElement.clientWidth - tip.offsetWidth - 8;
      tip.style.left = `${Math.max(0, Math.min(clientX + 14, room))}px`;
      tip.style.top = `${clientY + 14}px`;
    });
    plot.on("plotly_unhover", () => { tip.style.display = "none"; });
  }

  function attach(plot) {
    picture = plot;
    hovering(plot);
    plot.on("plotly_click", (event) => {
      const rank = drawn[cell(event)[0]];
      asked.value = rank;
      tell(rank);
    });
    asked.addEventListener("change", () => asked.value !== "" && tell(Number(asked.value)));
  }

  return { traces, attach, tell };
};
