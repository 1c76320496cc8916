// Draws every figure of the page, in the reader's colour scheme and for the width of the screen, and again when either changes.
(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 600px)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };

  const colour = (token) => getComputedStyle(document.documentElement).getPropertyValue("--" + token).trim();

  // A copy in which "@ink" is the ink of the current scheme; arrays of numbers are shared, not copied.
  function themed(value) {
    if (typeof value === "string") return value.startsWith("@") ? colour(value.slice(1)) : value;
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(themed) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([key, inner]) => [key, themed(inner)]));
  }

  function merged(base, patch) {
    const out = { ...base };
    for (const [key, inner] of Object.entries(patch)) {
      const nested = inner !== null && typeof inner === "object" && !Array.isArray(inner) && typeof base[key] === "object";
      out[key] = nested ? merged(base[key], inner) : inner;
    }
    return out;
  }

  function layoutOf(figure) {
    const house = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "@ink" },
      hoverlabel: { bgcolor: "@surface", bordercolor: "@muted", font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: "@ink" }, align: "left" },
    };
    const layout = merged(house, figure.layout);
    return themed(narrow.matches ? merged(layout, figure.narrow) : layout);
  }

  // The numbers that fit into their boxes at the present zoom, as one trace of text.
  function fitting(numbers, figure, layout) {
    const [low, high] = layout.xaxis.range;
    const labels = narrow.matches ? 60 : 110; // pixels beside the plot
    const pixels = (document.getElementById(figure.name).clientWidth - labels) / (high - low);
    const rows = Math.abs(layout.yaxis.range[1] - layout.yaxis.range[0]);
    const tallest = Math.min(11, (0.8 * numbers.height * (layout.height - 120)) / rows);
    const out = { x: [], y: [], text: [], colour: [], size: [] };
    numbers.middle.forEach((x, index) => {
      const text = numbers.text[index];
      const size = Math.min(tallest, (numbers.width[index] * pixels * 0.85) / (0.62 * text.length));
      if (size < 7 || x < low || x > high) return;
      out.x.push(x); out.y.push(numbers.y[index]); out.text.push(text);
      out.colour.push(numbers.colour[index]); out.size.push(size);
    });
    return out;
  }

  function numberTrace(numbers, figure, layout) {
    const { x, y, text, colour, size } = fitting(numbers, figure, layout);
    return { type: "scatter", mode: "text", x, y, text, textfont: { color: colour, size }, hoverinfo: "skip", showlegend: false };
  }

  function renumber(figure, layout) {
    const { x, y, text, colour, size } = fitting(figure.numbers, figure, layout);
    const patch = { x: [x], y: [y], text: [text], "textfont.color": [colour], "textfont.size": [size] };
    Plotly.restyle(figure.name, patch, [figure.traces.length]);
  }

  function draw(figure) {
    const plot = document.getElementById(figure.name);
    const layout = layoutOf(figure);
    const traces = themed(figure.choices.length ? figure.choices[figure.chosen ?? 0] : figure.traces);
    if (figure.numbers) traces.push(numberTrace(figure.numbers, figure, layout));
    Plotly.react(plot, traces, layout, config);
    if (figure.numbers && !figure.listens) {
      figure.listens = true;
      plot.on("plotly_relayout", () => renumber(figure, plot.layout));
    }
  }

  const drawAll = () => figures.forEach(draw);
  for (const choice of document.querySelectorAll("select[data-figure]")) {
    choice.addEventListener("change", () => {
      const figure = figures.find((candidate) => candidate.name === choice.dataset.figure);
      figure.chosen = Number(choice.value);
      draw(figure);
    });
  }
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  drawAll();
})();
