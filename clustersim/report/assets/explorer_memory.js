// Memory by part, ZeRO 0 to 3 side by side, against what a GPU has; and the same as a table of numbers.
clustersim.behaviours.explorer_memory = async (figure, _arrays, tools) => {
  "use strict";
  await clustersim.opened;
  const GIB = 2 ** 30;
  const { explorer } = clustersim;
  const { parts } = figure.facts;
  const { capacity } = explorer.facts.machine;
  const labels = ["DDP, ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"];

  const verdict = (stage) => (stage.fits ? "fits" : "does not fit");
  const x = (settings) => labels.map((label, zero) => (zero === settings.zero ? `<b>▸ ${label}</b>` : label));

  function bars({ settings, stages }) {
    return parts.map((part) => ({
      type: "bar",
      name: part.label,
      x: x(settings),
      y: stages.map((stage) => stage.parts[part.name] / GIB),
      customdata: stages.map((stage) => tools.bytes(stage.parts[part.name])),
      marker: { color: part.colour, line: { width: 0.6, color: "@surface" }, ...(part.pattern ? { pattern: hatch(part) } : {}) },
      hovertemplate: `<b>${tools.escape(part.label)}</b>: %{customdata}<extra></extra>`,
    }));
  }

  const hatch = (part) => ({ shape: part.pattern, size: 6, solidity: 0.25, fgcolor: "@surface", bgcolor: part.colour });

  // Labels cover the line of the capacity, which would cross them.
  function totals(stages) {
    return stages.map((stage, zero) => ({
      x: zero, y: stage.peak / GIB, yanchor: "bottom", showarrow: false, bgcolor: tools.colour("surface"), borderpad: 1,
      text: `${stage.fits ? "✓" : "✕"} ${tools.bytes(stage.peak)}${tools.narrow() ? "" : `, ${verdict(stage)}`}`,
      font: { size: tools.narrow() ? 10 : 12, color: tools.colour("ink") },
    }));
  }

  // The capacity is written next to its line, on small screens above the plot.
  function capacityLabel() {
    const shared = { xref: "paper", x: 1, showarrow: false, font: { color: tools.colour("alarm"), size: 12 } };
    if (tools.narrow()) return { ...shared, yref: "paper", y: 1, xanchor: "right", yanchor: "bottom", text: `dashed: a GPU has ${tools.bytes(capacity)}` };
    return { ...shared, y: capacity / GIB, xanchor: "left", xshift: 6, align: "left", text: `a GPU has<br>${tools.bytes(capacity)}` };
  }

  function limit(layout, stages) {
    const most = Math.max(capacity, ...stages.map((stage) => stage.peak));
    layout.yaxis.range = [0, (most * 1.12) / GIB];
    layout.shapes = [{
      type: "line", xref: "paper", x0: 0, x1: 1, y0: capacity / GIB, y1: capacity / GIB, line: { color: tools.colour("alarm"), width: 2, dash: "dash" },
    }];
    layout.annotations = [...totals(stages), capacityLabel()];
  }

  function cell(tag, text, kind = "") {
    return Object.assign(document.createElement(tag), { textContent: text, className: kind });
  }

  function row(name, texts, kind = "", key = "") {
    const line = document.createElement("tr");
    line.className = kind;
    line.append(cell("th", name), ...texts.map((text) => cell("td", text)));
    line.firstChild.insertAdjacentHTML("afterbegin", key);
    return line;
  }

  function table({ settings, stages }) {
    const { pp } = settings;
    const body = parts.flatMap((part) => {
      const whole = row(part.label, stages.map((stage) => tools.bytes(stage.parts[part.name])), "", part.key);
      if (!(part.name in stages[0].ofExperts)) return [whole];
      return [whole, row("of which experts'", stages.map((stage) => tools.bytes(stage.ofExperts[part.name])), "part")];
    });
    body.push(row("all", stages.map((stage) => tools.bytes(stage.peak)), "sum"));
    body.push(row(`of ${tools.bytes(capacity)}`, stages.map(verdict)));
    if (pp > 1) body.push(row("peak-memory pipeline rank", stages.map((stage) => String(stage.rank))));
    document.getElementById("explorer-memory-table").replaceChildren(...body);
  }

  explorer.onDraw((drawn) => {
    table(drawn);
    const plot = document.getElementById(figure.name);
    if (plot.layout) tools.redraw();
  });

  return {
    traces(layout) {
      const drawn = explorer.drawn();
      limit(layout, drawn.stages);
      return bars(drawn);
    },
    attach(plot) {
      plot.on("plotly_click", ({ points: [point] }) => explorer.set({ zero: point.pointNumber }));
    },
  };
};
