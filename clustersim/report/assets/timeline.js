// The pipeline figure that people know, from the whole step down to one kernel.
//
// What is in the file: boxes (a stage's forward of a microbatch, a message ...), the spans that they join, the kernels inside
// (as templates, because runs of one block are equal), and the critical path. What is drawn: what the axes show. Boxes shorter
// than a pixel are merged with their neighbours in the colour of what lasts longest there; where kernels are wide enough to be
// seen they have a lane of their own below the pass that they belong to. Messages, in thin lanes, are merged below two pixels.
clustersim.behaviours.timeline = (figure, arrays, tools) => {
  "use strict";
  const MOST_PATH = 800, MOST_WAITS = 500, MOST_NUMBERS = 1500; // shapes
  const APART = 4; // pixels between the ends of steps
  const { rows, styles, bands, tick, size, whole, several } = figure.facts;
  const { row, lane, style, microbatch, chunk } = arrays;
  const boxed = clustersim.parts.timelineBoxes(figure, arrays);
  const { start, boxesIn, kernelsIn } = boxed;
  const words = clustersim.parts.timelineWords(figure, arrays, tools, boxed);
  const { numberOf, rowWords, lasting, causeWords, boxText, mergedText, kernelText } = words;
  let kernelsShown = false;

  // ---------------------------------------------------------------- what is seen

  function view(layout, plot) {
    const [from, to] = [...layout.xaxis.range].map((at) => at * size).sort((a, b) => a - b);
    const [low, high] = [...layout.yaxis.range].sort((a, b) => a - b);
    const width = plot._fullLayout?.xaxis?._length || Math.max(100, plot.clientWidth - (tools.narrow() ? 60 : 140));
    const height = plot._fullLayout?.yaxis?._length || layout.height - 120;
    return { from, to, low, high, pixel: (to - from) / width, perRow: height / (high - low) };
  }

  // ---------------------------------------------------------------- traces

  // Centre (relative to the row) and height of a lane; passes give their lower half to kernels where these are seen.
  function band(number, kernels) {
    const [centre, height] = bands[number];
    if (number > 0 || !kernelsShown) return [centre, height];
    return kernels ? [centre + height / 4, height / 2] : [centre - height / 4, height / 2];
  }

  // The first box is out of view: a category keeps its place and its colour in the legend.
  const empty = (fill) => ({ y: [-9], base: [0], x: [0], width: [0], fill: [fill], edge: [0], words: [""], box: [-1] });

  function put(columns, place, [centre, height], mark, fill, words, box, pixel) {
    columns.y.push(place + centre);
    columns.width.push(height);
    columns.base.push(mark.from / size);
    columns.x.push((mark.to - mark.from) / size);
    columns.fill.push(fill);
    columns.edge.push(Math.min(0.6, Math.max(0, (mark.to - mark.from) / pixel / 16))); // or edges would hide what is thin
    columns.words.push(words);
    columns.box.push(box);
  }

  function bars(number, columns) {
    const { label, pattern } = styles[number];
    const marker = { color: columns.fill, line: { width: columns.edge, color: "@surface" } };
    if (pattern) marker.pattern = { shape: pattern, size: 6, solidity: 0.25, fgcolor: "@surface", bgcolor: columns.fill };
    return {
      type: "bar", orientation: "h", name: label, uid: `look-${number}`, legendgroup: label, showlegend: true,
      y: columns.y, base: columns.base, x: columns.x, width: columns.width, marker, textposition: "none",
      hovertext: columns.words, hovertemplate: "%{hovertext}<extra></extra>", customdata: columns.box,
    };
  }

  const shade = (number, box) => styles[number].shades[Math.max(0, chunk[box])] ?? styles[number].colour;

  function traces(layout, plot) {
    const shown = view(layout, plot);
    const boxes = boxesIn(shown);
    const kernels = kernelsIn(shown, boxes);
    kernelsShown = kernels !== null && kernels.length > 0;
    const columns = new Map(figure.facts.present.map((number) => [number, empty(styles[number].colour)]));
    for (const mark of boxes.filter(({ kind }) => columns.has(kind))) {
      const box = mark.first, place = row[box];
      const words = mark.count > 1 ? mergedText(mark, place, figure.facts.boxWord) : boxText(box);
      const fill = mark.count > 1 ? styles[mark.kind].colour : shade(mark.kind, box);
      put(columns.get(mark.kind), place, band(lane[box], false), mark, fill, words, mark.count > 1 ? -1 : box, shown.pixel);
    }
    for (const mark of kernels ?? []) {
      const place = row[mark.first[0]];
      const words = mark.count > 1 ? mergedText(mark, place, "kernels and communication") : kernelText(mark.first, mark.from, mark.to);
      put(columns.get(mark.kind), place, band(0, true), mark, styles[mark.kind].colour, words, -2, shown.pixel);
    }
    plot.dataset.boxes = String(boxes.length);
    plot.dataset.kernels = String(kernels?.length ?? 0);
    return [
      track(), waits(shown, boxes), ...[...columns].map(([number, drawn]) => bars(number, drawn)), ...path(shown),
      numbers(shown, boxes), stepEnds(shown),
    ];
  }

  // A pale band behind every lane of computation: where it shows, the row computes nothing.
  function track() {
    const [centre, height] = bands[0];
    return {
      type: "bar", orientation: "h", name: "idle", uid: "idle", showlegend: true, hoverinfo: "skip",
      y: rows.map((_, place) => place + centre), width: rows.map(() => height), x: rows.map(() => whole / size),
      marker: { color: "@track", line: { width: 0 } },
    };
  }

  // What stands still says what it waits for: nothing is drawn, but it can be pointed at.
  function waits(shown, boxes) {
    const out = { y: [], base: [], x: [], width: [], words: [], box: [] };
    const [centre, height] = bands[0];
    for (const { first: box, count } of boxes) {
      const since = start(box) - arrays.waiting[box] * tick;
      if (count > 1 || lane[box] !== 0 || start(box) - since < 2 * shown.pixel || out.y.length >= MOST_WAITS) continue;
      out.y.push(row[box] + centre);
      out.width.push(height);
      out.base.push(since / size);
      out.x.push((start(box) - since) / size);
      out.words.push([`<b>idle</b>, ${rowWords(row[box])}`, lasting(since, start(box)), ...causeWords(box)].join("<br>"));
      out.box.push(box);
    }
    return {
      type: "bar", orientation: "h", name: "idle", uid: "waits", showlegend: false, y: out.y, base: out.base, x: out.x,
      width: out.width, marker: { color: "rgba(0,0,0,0)", line: { width: 0 } }, textposition: "none",
      hovertext: out.words, hovertemplate: "%{hovertext}<extra></extra>", customdata: out.box,
    };
  }

  // Numbers of microbatches where they fit.
  function numbers(shown, boxes) {
    const out = { x: [], y: [], text: [], colour: [], size: [] };
    const [centre, height] = band(0, false);
    const tallest = Math.min(12, 0.8 * height * shown.perRow);
    const digits = String(figure.facts.microbatches - 1).length; // all fit alike, or runs of numbers would break off at 9
    for (const mark of several ? boxes : []) {
      const box = mark.first;
      if (mark.count > 1 || lane[box] !== 0 || microbatch[box] < 0 || out.x.length >= MOST_NUMBERS) continue;
      const words = String(numberOf(box));
      const from = Math.max(mark.from, shown.from), to = Math.min(mark.to, shown.to);
      const font = Math.min(tallest, (((to - from) / shown.pixel) * 0.8) / (0.62 * digits));
      if (font < 7) continue;
      out.x.push((from + to) / 2 / size);
      out.y.push(row[box] + centre);
      out.text.push(words);
      out.colour.push(styles[style[box]].inks[Math.max(0, chunk[box])]);
      out.size.push(font);
    }
    return {
      type: "scatter", mode: "text", uid: "numbers", x: out.x, y: out.y, text: out.text, hoverinfo: "skip", showlegend: false,
      textfont: { color: out.colour, size: out.size },
    };
  }

  // The critical path: outlines of its pieces, and dotted lines between pieces that follow each other.
  function path(shown) {
    const pieces = [];
    for (let piece = 0; piece < arrays.pathRow.length; piece++) {
      const from = arrays.pathStart[piece] * tick, to = arrays.pathEnd[piece] * tick;
      if (to < shown.from || from > shown.to) continue;
      const last = pieces.at(-1);
      const place = arrays.pathRow[piece], on = arrays.pathLane[piece], follows = arrays.pathFollows[piece] > 0;
      const touching = last && follows && last.place === place && last.on === on && from - last.to < shown.pixel;
      if (touching) last.to = to;
      else pieces.push({ place, on, from, to, follows: follows && pieces.length > 0 });
    }
    const longest = pieces.length > MOST_PATH ? new Set([...pieces].sort((a, b) => b.to - b.from - a.to + a.from).slice(0, MOST_PATH)) : null;
    const kept = longest ? pieces.filter((piece) => longest.has(piece)) : pieces;
    const middle = (piece) => piece.place + bands[piece.on][0];
    const outline = {
      type: "bar", orientation: "h", name: "critical path", uid: "path", legendgroup: "path", showlegend: true, hoverinfo: "skip",
      y: kept.map(middle), width: kept.map((piece) => bands[piece.on][1]), base: kept.map((piece) => piece.from / size),
      x: kept.map((piece) => (piece.to - piece.from) / size),
      marker: { color: "rgba(0,0,0,0)", line: { width: 1.8, color: "@ink" } },
    };
    const x = [], y = [];
    kept.forEach((piece, place) => {
      if (!piece.follows || place === 0) return;
      x.push(kept[place - 1].to / size, piece.from / size, null);
      y.push(middle(kept[place - 1]), middle(piece), null);
    });
    const line = {
      type: "scatter", mode: "lines", name: "critical path", uid: "path-line", legendgroup: "path", showlegend: false,
      hoverinfo: "skip", x, y, line: { width: 1.4, color: "@ink", dash: "dot" },
    };
    return [outline, line];
  }

  // Dashed lines where steps end, no closer than can be told apart.
  function stepEnds(shown) {
    const x = [], y = [];
    let last = -Infinity;
    for (const stepEnd of arrays.ends) {
      const at = stepEnd * tick;
      if (at < shown.from || at > shown.to || at - last < APART * shown.pixel) continue;
      x.push(at / size, at / size, null);
      y.push(-0.55, rows.length - 0.5, null);
      last = at;
    }
    return {
      type: "scatter", mode: "lines", uid: "ends", name: "end of a step", hoverinfo: "skip", x, y,
      showlegend: arrays.ends.length > 0, line: { width: 1, color: "@muted", dash: "dash" },
    };
  }

  const middle = (box) => row[box] + band(lane[box], false)[0];
  return { traces, ...clustersim.parts.timelinePointer(figure, arrays, boxed, middle) };
};
