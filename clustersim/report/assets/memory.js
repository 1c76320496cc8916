// What one stage holds over time, stacked by category; the reader chooses the stage.
clustersim.behaviours.memory = (figure, arrays) => {
  "use strict";
  const { moments, looks, end, size, gib } = figure.facts;

  function traces(layout, plot, chosen) {
    const first = moments.slice(0, chosen).reduce((sum, each) => sum + each, 0), many = moments[chosen];
    const times = Array.from(arrays.time.subarray(first, first + many), (seconds) => seconds / size);
    times.push(Math.max(end / size, times.at(-1)));
    const held = (place) => arrays.held.subarray(looks.length * first + place * many, looks.length * first + (place + 1) * many);
    const shown = looks.map((look, place) => ({ look, held: held(place) })).filter(({ held }) => held.some((bytes) => bytes));
    return shown.map(({ look, held }) => ({
      type: "scatter", mode: "lines", stackgroup: "held", name: look.label, x: times,
      y: Array.from([...held, held.at(-1)], (bytes) => bytes / gib),
      line: { shape: "hv", width: 0.8, color: look.colour },
      fillcolor: look.colour,
      fillpattern: { shape: look.pattern, size: 6, solidity: 0.25, fgcolor: "@surface", bgcolor: look.colour },
      hovertemplate: "%{y:.2f} GiB",
    }));
  }

  return { traces };
};
