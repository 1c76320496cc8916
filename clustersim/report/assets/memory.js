// What one stage holds over time, stacked by category; the reader chooses the stage.
clustersim.behaviours.memory = (figure, arrays) => {
  "use strict";
  const { moments, styles, end, size, gib } = figure.facts;

  function traces(layout, plot, chosen) {
    const first = moments.slice(0, chosen).reduce((sum, length) => sum + length, 0), count = moments[chosen];
    const times = Array.from(arrays.time.subarray(first, first + count), (seconds) => seconds / size);
    times.push(Math.max(end / size, times.at(-1)));
    const held = (place) => arrays.held.subarray(styles.length * first + place * count, styles.length * first + (place + 1) * count);
    const shown = styles.map((style, place) => ({ style, held: held(place) })).filter(({ held }) => held.some((bytes) => bytes));
    return shown.map(({ style, held }) => ({
      type: "scatter", mode: "lines", stackgroup: "held", name: style.label, x: times,
      y: Array.from([...held, held.at(-1)], (bytes) => bytes / gib),
      line: { shape: "hv", width: 0.8, color: style.colour },
      fillcolor: style.colour,
      fillpattern: { shape: style.pattern, size: 6, solidity: 0.25, fgcolor: "@surface", bgcolor: style.colour },
      hovertemplate: "%{y:.2f} GiB",
    }));
  }

  return { traces };
};
