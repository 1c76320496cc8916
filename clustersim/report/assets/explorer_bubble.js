// What share of the step is bubble, against the number of microbatches, for the schedules on the shelf.
clustersim.behaviours.explorer_bubble = async (figure, _arrays, tools) => {
  "use strict";
  await clustersim.opened;
  const { explorer } = clustersim;
  const { bubble, microbatchesOf } = explorer.model;
  const MOST = 1024; // microbatches that are drawn
  const words = { "1f1b": "1F1B", gpipe: "GPipe", interleaved: "interleaved", bfs: "breadth-first" };

  // Microbatches at which a curve is drawn: all that are known of the schedule, up to some more than the present number.
  const places = (settings) => microbatchesOf(settings).filter((m) => m <= Math.min(MOST, Math.max(64, 2 * settings.microbatches)));

  function curve(settings, { name, symbol, line }) {
    const known = places(settings);
    return {
      type: "scatter", mode: "lines+markers", name, line, marker: { size: 5, symbol }, x: known,
      y: known.map((microbatches) => 100 * bubble({ ...settings, microbatches })),
      hovertemplate: "%{x} microbatches: %{y:.1f} % of the step<extra></extra>",
    };
  }

  function present(settings) {
    const m = settings.microbatches;
    const value = 100 * bubble(settings);
    return {
      type: "scatter", mode: "markers+text", name: "now", x: [m], y: [value], text: [`now: ${value.toFixed(1)} %`], textposition: "top center",
      textfont: { size: 12, color: "@ink" }, marker: { size: 13, symbol: "diamond", color: "@ink", line: { width: 1.5, color: "@surface" } },
      hovertemplate: `${m} microbatches: ${value.toFixed(1)} % of the step<extra></extra>`, cliponaxis: false,
    };
  }

  function say({ settings }) {
    const { pp, chunks, microbatches: m } = settings;
    const name = words[settings.schedule] + (chunks > 1 ? ` with ${chunks} chunks` : "");
    const microbatchCount = `${tools.count(m)} microbatch${m === 1 ? "" : "es"}`;
    const textbook = `Textbooks have (p - 1) / (${chunks > 1 ? "v " : ""}m + p - 1), with microbatches in rounds of p.`;
    document.getElementById("explorer-bubble-words").textContent = pp === 1
      ? "One pipeline rank holds all layers, so nobody waits for another stage: there is no bubble. Take pp 2 or more to see one."
      : `There are ${pp} pipeline ranks and ${microbatchCount}, ${name}. ${explorer.bubbleWords(settings)} ${textbook}`;
  }

  explorer.onDraw((drawn) => {
    say(drawn);
    const plot = document.getElementById(figure.name);
    const slot = plot.closest(".slot");
    const appears = slot.hidden;
    slot.hidden = drawn.settings.pp === 1;
    if (!plot.layout || slot.hidden) return;
    tools.redraw();
    if (appears) Plotly.Plots.resize(plot);
  });

  return {
    traces(layout) {
      const { settings, chosen } = explorer.drawn();
      if (settings.pp === 1) return [];
      const plain = curve({ ...settings, schedule: "1f1b", chunks: 1 }, { name: "1F1B, GPipe", symbol: "circle", line: { color: "#0072B2", width: 2 } });
      const { chunks } = chosen;
      const cut = curve({ ...settings, schedule: "interleaved", chunks }, { name: `interleaved, breadth-first, ${chunks} chunks`, symbol: "square", line: { color: "#D55E00", width: 2, dash: "dash" } });
      layout.xaxis.range = [-0.06, Math.log10(plain.x.at(-1)) + 0.12];
      Object.assign(layout.xaxis, { tickvals: plain.x.filter((m) => Math.log2(m) % 1 === 0), tickmode: "array" });
      layout.yaxis.range = [0, 1.08 * plain.y[0]]; // with one microbatch most ranks wait
      return [plain, cut, present(settings)];
    },
  };
};
