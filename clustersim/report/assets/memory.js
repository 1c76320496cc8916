// What one stage holds over time, stacked by category; the reader chooses the stage.
clustersim.behaviours.memory = (figure, arrays) => {
  "use strict";
  const { stages, looks, end, size, gib } = figure.facts;

  // One category of a stage: of what never changes only the amount is in the file.
  function held(stage, amount) {
    if (typeof amount === "number") return new Array(stage.moments + 1).fill(amount / gib);
    const values = Array.from(arrays.held.subarray(amount.first, amount.first + stage.moments), (bytes) => bytes / gib);
    return [...values, values.at(-1)];
  }

  function traces(layout, plot, chosen) {
    const stage = stages[chosen];
    const times = Array.from(arrays.time.subarray(stage.first, stage.first + stage.moments), (seconds) => seconds / size);
    times.push(Math.max(end / size, times.at(-1)));
    const shown = looks.map((look, place) => ({ look, amount: stage.held[place] })).filter(({ amount }) => amount !== 0);
    return shown.map(({ look, amount }) => ({
      type: "scatter", mode: "lines", stackgroup: "held", name: look.label, x: times, y: held(stage, amount),
      line: { shape: "hv", width: 0.8, color: look.colour },
      fillcolor: look.colour,
      fillpattern: { shape: look.pattern, size: 6, solidity: 0.25, fgcolor: "@surface", bgcolor: look.colour },
      hovertemplate: "%{y:.2f} GiB",
    }));
  }

  return { traces };
};
