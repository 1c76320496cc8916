// Draws every figure of the page, in the reader's colour scheme and for the width of the screen, and again when either changes.
//
// A figure with a behaviour has more data than it draws: its behaviour (another asset) makes plotly traces of packed arrays
// for the ranges that the axes have, and is asked again when they change.
window.clustersim = (() => {
  "use strict";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 600px)");
  const config = { responsive: true, displaylogo: false, displayModeBar: false, scrollZoom: false };
  const behaviours = {};
  const drawn = new Map();

  const colour = (token) => getComputedStyle(document.documentElement).getPropertyValue("--" + token).trim();

  const TOKENS = new Set(["@ink", "@muted", "@surface", "@page", "@grid", "@track", "@edge", "@good", "@alarm", "@accent"]);

  // A copy in which "@ink" is the ink of the current scheme; arrays of numbers are shared, not copied.
  function themed(value) {
    if (typeof value === "string") return TOKENS.has(value) ? colour(value.slice(1)) : value;
    if (ArrayBuffer.isView(value)) return value;
    if (Array.isArray(value)) return typeof value[0] === "object" || typeof value[0] === "string" ? value.map(themed) : value;
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

  const ARRAYS = {
    u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array,
  };

  // A typed array from what Python's `packed` wrote: base64 of zlib of little-endian numbers.
  async function unpacked({ dtype, z }) {
    const text = atob(z);
    const bytes = new Uint8Array(text.length);
    for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new ARRAYS[dtype](await new Response(stream).arrayBuffer());
  }

  // Four significant digits, as Python's units write them.
  const digits = (value) => {
    const rounded = Number(value.toPrecision(4));
    return Math.abs(rounded) >= 1000 ? rounded.toLocaleString("en-US") : String(rounded);
  };

  function scaled(value, unit, steps) {
    const [prefix, size] = steps.findLast((step) => Math.abs(value) >= step[1]) ?? steps[0];
    return `${digits(value / size)} ${prefix}${unit}`;
  }

  const DECIMAL = [["", 1], ["M", 1e6], ["G", 1e9], ["T", 1e12], ["P", 1e15], ["E", 1e18]];
  const BINARY = [["", 1], ["Ki", 2 ** 10], ["Mi", 2 ** 20], ["Gi", 2 ** 30], ["Ti", 2 ** 40], ["Pi", 2 ** 50]];
  const SHORT = [["n", 1e-9], ["u", 1e-6], ["m", 1e-3], ["", 1]];
  const LONG = [[7200, "min", "s", 1, 60], [172800, "h", "min", 60, 60], [Infinity, "d", "h", 3600, 24]];

  function seconds(value) {
    if (Math.abs(value) <= 120) return value ? scaled(value, "s", SHORT) : "0 s";
    const [, large, small, size, divisor] = LONG.find((row) => Math.abs(value) < row[0]);
    const whole = Math.round(Math.abs(value) / size);
    return `${value < 0 ? "-" : ""}${Math.floor(whole / divisor).toLocaleString("en-US")} ${large} ${whole % divisor} ${small}`;
  }

  const ENTITIES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;" };
  const tools = {
    colour,
    themed,
    seconds,
    narrow: () => narrow.matches,
    bytes: (value) => scaled(value, "B", BINARY),
    rate: (value) => scaled(value, "B/s", DECIMAL),
    flops: (value) => scaled(value, "FLOP/s", DECIMAL),
    flop: (value) => scaled(value, "FLOP", DECIMAL),
    number: digits,
    count: (value) => value.toLocaleString("en-US"),
    escape: (text) => String(text).replace(/[&<>"']/g, (sign) => ENTITIES[sign]),
    figure: (name) => drawn.get(name),
  };

  function layoutOf(figure) {
    const family = getComputedStyle(document.body).fontFamily;
    const house = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: 12, color: "@ink" },
      hoverlabel: { bgcolor: "@surface", bordercolor: "@muted", font: { family, size: 12, color: "@ink" }, align: "left" },
    };
    const layout = merged(house, figure.layout);
    return themed(narrow.matches ? merged(layout, figure.narrow) : layout);
  }

  // A figure that is drawn: what it is, where, and by which behaviour.
  class Drawing {
    constructor(figure) {
      this.figure = figure;
      this.plot = document.getElementById(figure.name);
      this.chosen = 0;
      this.behaviour = null;
    }

    async draw() {
      const { figure, plot } = this;
      if (figure.behaviour && !this.behaviour) {
        const packed = Object.entries(figure.arrays);
        const arrays = Object.fromEntries(await Promise.all(packed.map(async ([name, array]) => [name, await unpacked(array)])));
        figure.arrays = {};
        this.behaviour = await behaviours[figure.behaviour](figure, arrays, { ...tools, redraw: () => this.redraw() });
        this.again();
        this.behaviour.attach?.(plot);
        plot.on("plotly_relayout", (change) => this.relayout(change));
      } else this.again();
    }

    // From the beginning: colours, sizes and words of the present scheme and width.
    again() {
      const layout = layoutOf(this.figure);
      if (this.behaviour && this.plot.layout) this.keepRanges(layout);
      this.react(layout);
    }

    keepRanges(layout) {
      for (const name of ["xaxis", "yaxis"]) {
        const present = this.plot.layout[name]?.range;
        if (present && layout[name]) layout[name].range = [...present];
      }
    }

    // The same picture with other data, after a zoom.
    redraw() {
      this.react(this.plot.layout);
    }

    react(layout) {
      const { figure, plot } = this;
      const plain = figure.choices.length ? figure.choices[this.chosen] : figure.traces;
      const more = this.behaviour ? this.behaviour.traces(layout, plot, this.chosen) : [];
      Plotly.react(plot, [...themed(plain), ...themed(more)], layout, config);
      plot.dataset.drawn = String(Number(plot.dataset.drawn ?? 0) + 1);
    }

    relayout(change) {
      const moved = Object.keys(change).some((key) => /^[xy]axis\.(range|autorange)/.test(key) || key === "autosize");
      if (!moved) return;
      if (change["xaxis.autorange"] || change["yaxis.autorange"]) {
        const whole = layoutOf(this.figure);
        for (const name of ["xaxis", "yaxis"]) if (whole[name].range) this.plot.layout[name].range = [...whole[name].range];
        for (const name of ["xaxis", "yaxis"]) if (whole[name].range) this.plot.layout[name].autorange = false;
      }
      this.redraw();
    }
  }

  async function library() {
    const script = document.createElement("script");
    const packed = document.getElementById("plotly").textContent;
    script.textContent = new TextDecoder().decode(await unpacked({ dtype: "u1", z: packed }));
    document.head.append(script);
  }

  async function start() {
    await library();
    const figures = JSON.parse(document.getElementById("figures").textContent);
    for (const figure of figures) drawn.set(figure.name, new Drawing(figure));
    for (const choice of document.querySelectorAll("select[data-figure]")) {
      choice.addEventListener("change", () => {
        const drawing = drawn.get(choice.dataset.figure);
        drawing.chosen = Number(choice.value);
        drawing.draw();
      });
    }
    for (const drawing of drawn.values()) {
      await drawing.draw();
      await new Promise((next) => setTimeout(next)); // what is drawn is seen before the next is begun
    }
    reach();
    addEventListener("resize", reach);
    addEventListener("toggle", reach, true); // tables in what is unfolded
    const all = () => drawn.forEach((drawing) => drawing.plot.layout && drawing.again());
    dark.addEventListener("change", all);
    narrow.addEventListener("change", all);
    addEventListener("beforeprint", () => printing(true));
    addEventListener("afterprint", () => printing(false));
    document.documentElement.dataset.ready = "yes";
  }

  // Tables that are wider than the screen scroll, so the keyboard must get to them; it need not stop at others.
  function reach() {
    for (const table of document.querySelectorAll("table, .scrolls, .scroll")) {
      if (table.scrollWidth > table.clientWidth || table.scrollHeight > table.clientHeight + 1) table.tabIndex = 0;
      else table.removeAttribute("tabindex");
    }
  }

  // Paper is narrower than most screens: figures are drawn again for its width, and what is folded is opened.
  function printing(now) {
    document.documentElement.classList.toggle("printing", now);
    for (const folded of document.querySelectorAll("details")) folded.open = now;
    const size = (plot) => (now ? { width: plot.clientWidth } : { width: null, autosize: true });
    for (const drawing of drawn.values()) {
      if (!drawing.plot.layout) continue;
      drawing.again(); // ink on white, whatever the screen has
      Plotly.relayout(drawing.plot, size(drawing.plot)); // at once: printing does not wait
    }
  }

  addEventListener("DOMContentLoaded", start);
  return { behaviours, parts: {}, tools, unpacked };
})();
