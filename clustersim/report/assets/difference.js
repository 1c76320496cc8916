// Two timelines, one time axis: what is shown of one is shown of the other.
(() => {
  "use strict";
  const root = document.documentElement;

  function link(plots) {
    plots.forEach((plot, index) => {
      const other = plots[1 - index];
      plot.on("plotly_relayout", () => {
        const [low, high] = plot.layout.xaxis.range;
        const [there, end] = other.layout.xaxis.range;
        if (low !== there || high !== end) Plotly.relayout(other, { "xaxis.range": [low, high] });
      });
    });
  }

  function start() {
    const plots = ["timeline-a", "timeline-b"].map((name) => document.getElementById(name));
    if (plots.every((plot) => plot !== null)) link(plots);
  }

  new MutationObserver((_, observer) => {
    if (root.dataset.ready !== "yes") return;
    observer.disconnect();
    start();
  }).observe(root, { attributes: true, attributeFilter: ["data-ready"] });
})();
