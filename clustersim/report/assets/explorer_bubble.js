// What share of the step pipeline ranks stand idle, against the number of microbatches, for the schedules on the shelf.
clustersim.behaviours.explorer_bubble = (figure, _arrays, tools) => {
  "use strict";
  const { explorer } = clustersim;
  const { bubble, runs } = clustersim.passes;
  const STEPS = [1, 1.5]; // between powers of two
  const MOST = 1024; // microbatches that are drawn
  const known = new Map();
  const words = { "1f1b": "1F1B", gpipe: "GPipe" };

  function idle(schedule, pp, m, chunks) {
    const key = [schedule, pp, m, chunks].join();
    if (!known.has(key)) known.set(key, bubble(schedule, pp, m, chunks));
    return known.get(key);
  }

  // Microbatches at which the curve is drawn: powers of two, halves between, the present number.
  function places(present) {
    const most = Math.min(MOST, Math.max(64, 2 * present));
    const doubled = Array.from({ length: Math.floor(Math.log2(most)) + 1 }, (_, power) => 2 ** power);
    const all = doubled.flatMap((low) => STEPS.map((step) => low * step)).filter((m) => Number.isInteger(m) && m <= most);
    return [...new Set([...all, present])].sort((one, other) => one - other);
  }

  function curve(schedule, chunks, settings, { name, symbol, line }) {
    const present = explorer.model.microbatches(settings);
    const legal = places(present).filter((m) => runs(schedule, settings.pp, m) && m * settings.pp * chunks < 2 ** 15);
    return {
      type: "scatter", mode: "lines+markers", name, line, marker: { size: 5, symbol }, x: legal,
      y: legal.map((m) => 100 * idle(schedule, settings.pp, m, chunks)),
      hovertemplate: "%{x} microbatches: %{y:.1f} % of the step<extra></extra>",
    };
  }

  function present(settings) {
    const m = explorer.model.microbatches(settings);
    const value = 100 * idle(settings.schedule, settings.pp, m, explorer.model.chunksOf(settings));
    return {
      type: "scatter", mode: "markers+text", name: "now", x: [m], y: [value], text: [`now: ${value.toFixed(1)} %`], textposition: "top center",
      textfont: { size: 12, color: "@ink" }, marker: { size: 13, symbol: "diamond", color: "@ink", line: { width: 1.5, color: "@surface" } },
      hovertemplate: `${m} microbatches: ${value.toFixed(1)} % of the step<extra></extra>`, cliponaxis: false,
    };
  }

  function say({ settings }) {
    const m = explorer.model.microbatches(settings);
    const { pp } = settings;
    const said = document.getElementById("explorer-bubble-words");
    const chunks = explorer.model.chunksOf(settings);
    const value = (100 * idle(settings.schedule, pp, m, chunks)).toFixed(1);
    const name = words[settings.schedule] ?? `interleaved with ${chunks} chunks`;
    const many = `${tools.count(m)} microbatch${m === 1 ? "" : "es"}`;
    const formula = `(p - 1) / (${chunks > 1 ? "v " : ""}m + p - 1)`;
    const textbook = (100 * (pp - 1)) / (chunks * m + pp - 1);
    const same = Math.abs(textbook - value) < 0.1 ? `, the textbook's ${formula}` : `; the textbook's ${formula} is ${textbook.toFixed(1)} %`;
    said.textContent = pp === 1
      ? "One pipeline rank holds all layers, so nobody waits for another stage: there is no bubble. Take pp 2 or more to see one."
      : `${pp} pipeline ranks, ${many}, ${name}: each rank stands idle for ${value} % of the step${same}.`;
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
      const { settings } = explorer.drawn();
      if (settings.pp === 1) return [];
      const shown = places(explorer.model.microbatches(settings));
      layout.xaxis.range = [-0.06, Math.log10(shown[shown.length - 1]) + 0.12];
      Object.assign(layout.xaxis, { tickvals: shown.filter((m) => Math.log2(m) % 1 === 0), tickmode: "array" });
      layout.yaxis.range = [0, 108 * (1 - 1 / settings.pp)]; // one microbatch: all but one rank wait
      const plain = curve("1f1b", 1, settings, { name: "1F1B, GPipe", symbol: "circle", line: { color: "#0072B2", width: 2 } });
      const chunks = Math.max(2, settings.chunks);
      const cut = curve("interleaved", chunks, settings, { name: `interleaved, ${chunks} chunks`, symbol: "square", line: { color: "#D55E00", width: 2, dash: "dash" } });
      return [plain, cut, present(settings)];
    },
  };
};
