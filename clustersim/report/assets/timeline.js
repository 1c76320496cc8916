// The pipeline figure that people know, from the whole step down to one kernel.
//
// What is in the file: boxes (a stage's forward of a microbatch, a message ...), the spans that they join, the kernels inside
// (as patterns, because runs of one block are equal), and the critical path. What is drawn: what the axes show. Boxes shorter
// than a pixel are merged with their neighbours in the colour of what lasts longest there; where kernels are wide enough to be
// seen they have a lane of their own below the pass that they belong to. Messages, in thin lanes, are merged below two pixels.
clustersim.behaviours.timeline = (figure, arrays, tools) => {
  "use strict";
  const MOST_BOXES = 6000, MOST_KERNELS = 3000, MOST_VISITED = 200000, MOST_PATH = 800, MOST_NUMBERS = 1500; // shapes: below 10,000
  const COARSEST = 4; // pixels: kernels that must be merged more are not shown
  const WIDE = 24; // pixels: kernels of passes that are narrower on average are not shown
  const SHADOWED = 12; // dependants drawn on hover
  const { rows, lanes, looks, texts, labels, bands, tick, size, whole, perStep, several } = figure.facts;
  const { row, lane, look, microbatch, chunk, cause, first } = arrays;
  const count = row.length;
  const start = (box) => arrays.start[box] * tick;
  const end = (box) => arrays.end[box] * tick;
  let dependants = null;
  let kernelsShown = false;

  // ---------------------------------------------------------------- what is seen

  function view(layout, plot) {
    const [from, to] = [...layout.xaxis.range].map((at) => at * size).sort((a, b) => a - b);
    const [low, high] = [...layout.yaxis.range].sort((a, b) => a - b);
    const width = plot._fullLayout?.xaxis?._length || Math.max(100, plot.clientWidth - (tools.narrow() ? 60 : 140));
    const height = plot._fullLayout?.yaxis?._length || layout.height - 120;
    return { from, to, low, high, pixel: (to - from) / width, perRow: height / (high - low) };
  }

  const seen = (shown, place) => place >= shown.low - 0.5 && place <= shown.high + 0.5;

  // Runs of things that are drawn as one: `next` says where the present run ends.
  class Merger {
    constructor(bin) {
      this.bin = bin;
      this.out = [];
      this.weights = new Float64Array(looks.length);
      this.open = null;
    }

    // One thing of a lane; things of a lane come in order of their start.
    add(key, from, to, kind, id, bin = this.bin) {
      const { open } = this;
      const short = to - from < bin;
      const at = short ? Math.floor(from / bin) : -1;
      if (open && short && open.key === key && open.at === at) {
        open.to = Math.max(open.to, to);
        open.last = id;
        open.many += 1;
        this.weights[kind] += to - from;
        return;
      }
      this.close();
      this.open = { key, from, to, at, kind, first: id, last: id, many: 1 };
      if (short) this.weights[kind] = to - from;
    }

    close() {
      const { open, weights } = this;
      if (!open) return;
      if (open.many > 1) open.kind = weights.indexOf(Math.max(...weights));
      weights.fill(0);
      this.out.push(open);
      this.open = null;
    }
  }

  // Boxes in view, at most MOST_BOXES.
  function boxesIn(shown) {
    for (let bin = shown.pixel; ; bin *= 2) {
      const merger = new Merger(bin);
      for (let box = 0; box < count; box++) {
        if (!seen(shown, row[box]) || end(box) < shown.from || start(box) > shown.to) continue;
        const fine = lane[box] ? 2 * bin : bin;
        merger.add(row[box] * lanes.length + lane[box], start(box), end(box), look[box], box, fine);
        if (merger.out.length > MOST_BOXES) break;
      }
      merger.close();
      if (merger.out.length <= MOST_BOXES) return merger.out;
    }
  }

  // Kernels of the passes in view; null where there are too many to be seen.
  function kernelsIn(shown, boxes) {
    if (!arrays.pattern.length) return null;
    const computing = boxes.filter((each) => lane[each.first] === 0);
    const passes = computing.filter((each) => each.many === 1);
    const many = computing.reduce((sum, each) => sum + each.many, 0);
    const lasting = computing.reduce((sum, each) => sum + each.to - each.from, 0);
    if (lasting < WIDE * shown.pixel * many) return null;
    let operations = 0;
    for (const { first: box } of passes) {
      for (let span = first[box]; span < first[box + 1]; span++) {
        const pattern = arrays.pattern[span];
        operations += pattern < 0 ? 1 : arrays.patternFirst[pattern + 1] - arrays.patternFirst[pattern];
      }
      if (operations > MOST_VISITED) return null;
    }
    for (let merged = 1; merged <= COARSEST; merged *= 2) {
      const found = mergedKernels(shown, passes, shown.pixel * merged);
      if (found) return found;
    }
    return null;
  }

  function mergedKernels(shown, passes, bin) {
    const merger = new Merger(bin);
    for (const { first: box } of passes) {
      for (let span = first[box]; span < first[box + 1]; span++) {
        eachKernel(span, (from, to, kind, id) => {
          if (to >= shown.from && from <= shown.to) merger.add(row[box], from, to, kind, [box, span, ...id]);
        });
        if (merger.out.length > MOST_KERNELS) return null;
      }
    }
    merger.close();
    return merger.out.length > MOST_KERNELS ? null : merger.out;
  }

  // Calls tell(from, to, look, [label, operation]) for what runs inside a span; the span itself where that is not known.
  function eachKernel(span, tell) {
    const pattern = arrays.pattern[span];
    const begins = arrays.spanStart[span] * tick;
    if (pattern < 0) {
      tell(begins, arrays.spanEnd[span] * tick, arrays.spanLook[span], [-1, -1]);
      return;
    }
    let at = begins;
    for (let place = arrays.patternFirst[pattern]; place < arrays.patternFirst[pattern + 1]; place++) {
      const from = at + arrays.gap[place];
      at = from + arrays.duration[place];
      tell(from, at, labels[arrays.label[place]].look, [arrays.label[place], place]);
    }
  }

  // ---------------------------------------------------------------- words

  const numberOf = (box) => (perStep ? microbatch[box] % perStep : microbatch[box]);
  const text = (number) => tools.escape(texts[number]).replaceAll("\n", "<br>");
  const rowWords = (place) => tools.escape(rows[place].words);
  const lasting = (from, to) => `${tools.seconds(from)} → ${tools.seconds(to)} · <b>${tools.seconds(to - from)}</b>`;

  function what(box) {
    let words = looks[look[box]].label;
    if (microbatch[box] >= 0) words += ` of microbatch ${numberOf(box)}`;
    if (chunk[box] > 0) words += `, chunk ${chunk[box]}`;
    if (perStep && microbatch[box] >= 0) words += `, step ${Math.floor(microbatch[box] / perStep) + 1}`;
    return tools.escape(words);
  }

  function causeWords(box) {
    const waited = arrays.waiting[box] * tick;
    const after = cause[box] >= 0 ? `${what(cause[box])} on ${tools.escape(rows[row[cause[box]]].title)}` : "";
    if (waited > 0) return [`waited ${tools.seconds(waited)}${after ? ` for ${after}` : ""}`];
    return after ? [`after ${after}`] : [];
  }

  function boxText(box) {
    const lines = [`<b>${what(box)}</b>`, rowWords(row[box]), lasting(start(box), end(box))];
    if (arrays.name[box] >= 0) lines.push(text(arrays.name[box]));
    if (arrays.detail[box] >= 0) lines.push(text(arrays.detail[box]));
    if (arrays.bytes[box] > 0) lines.push(`${tools.bytes(arrays.bytes[box])} moved`);
    lines.push(...causeWords(box));
    if (arrays.waited[box] > 0) lines.push(`waits ${tools.seconds(arrays.waited[box])} inside for ranks that it meets`);
    if (arrays.slowed[box] > 0) lines.push(`slowed by communication by ${tools.seconds(arrays.slowed[box])}`);
    return lines.join("<br>");
  }

  function mergedText(each, place, ofWhat) {
    const words = `<b>${each.many.toLocaleString("en-US")} ${ofWhat}</b>, mostly ${tools.escape(looks[each.kind].label)}`;
    return [words, rowWords(place), lasting(each.from, each.to), "zoom in to see each"].join("<br>");
  }

  function kernelText([box, , number], from, to) {
    if (number < 0) return boxText(box);
    const label = labels[number];
    const seconds = to - from;
    const lines = [`<b>${tools.escape(label.name)}</b>`, `in ${what(box)}, ${rowWords(row[box])}`, lasting(from, to)];
    lines.push(...label.lines.map(tools.escape));
    const work = [];
    if (label.flop) work.push(`${tools.flop(label.flop)} at ${tools.flops(label.flop / seconds)}`);
    if (label.bytes) work.push(`${tools.bytes(label.bytes)} of memory traffic at ${tools.rate(label.bytes / seconds)}`);
    if (label.payload) work.push(`${tools.bytes(label.payload)} payload`);
    if (work.length && seconds > 0) lines.push(work.join(", "));
    return lines.join("<br>");
  }

  // ---------------------------------------------------------------- traces

  // Centre (relative to the row) and height of a lane; passes give their lower half to kernels where these are seen.
  function band(number, kernels) {
    const [centre, height] = bands[number];
    if (number > 0 || !kernelsShown) return [centre, height];
    return kernels ? [centre + height / 4, height / 2] : [centre - height / 4, height / 2];
  }

  const empty = () => ({ y: [], base: [], x: [], width: [], fill: [], edge: [], words: [], box: [] });

  function put(columns, place, [centre, height], each, fill, words, box, pixel) {
    columns.y.push(place + centre);
    columns.width.push(height);
    columns.base.push(each.from / size);
    columns.x.push((each.to - each.from) / size);
    columns.fill.push(fill);
    columns.edge.push(Math.min(0.6, Math.max(0, (each.to - each.from) / pixel / 16))); // or edges would hide what is thin
    columns.words.push(words);
    columns.box.push(box);
  }

  function bars(number, columns) {
    const { label, pattern, colour } = looks[number];
    if (!columns.y.length) put(columns, -9, [0, 0], { from: 0, to: 0 }, colour, "", -1, 1); // out of view: keeps its place in the legend
    const marker = { color: columns.fill.length ? columns.fill : colour, line: { width: columns.edge, color: "@surface" } };
    if (pattern) marker.pattern = { shape: pattern, size: 6, solidity: 0.25, fgcolor: "@surface", bgcolor: columns.fill };
    return {
      type: "bar", orientation: "h", name: label, uid: `look-${number}`, legendgroup: label, showlegend: true,
      y: columns.y, base: columns.base, x: columns.x, width: columns.width, marker, textposition: "none",
      hovertext: columns.words, hovertemplate: "%{hovertext}<extra></extra>", customdata: columns.box,
    };
  }

  const shade = (number, box) => looks[number].shades[Math.max(0, chunk[box])] ?? looks[number].colour;

  function traces(layout, plot) {
    const shown = view(layout, plot);
    const boxes = boxesIn(shown);
    const kernels = kernelsIn(shown, boxes);
    kernelsShown = kernels !== null && kernels.length > 0;
    const columns = new Map(figure.facts.present.map((number) => [number, empty()]));
    for (const each of boxes) {
      const box = each.first, place = row[box];
      const words = each.many > 1 ? mergedText(each, place, figure.facts.boxWord) : boxText(box);
      const fill = each.many > 1 ? looks[each.kind].colour : shade(each.kind, box);
      put(columns.get(each.kind), place, band(lane[box], false), each, fill, words, each.many > 1 ? -1 : box, shown.pixel);
    }
    for (const each of kernels ?? []) {
      const place = row[each.first[0]];
      const words = each.many > 1 ? mergedText(each, place, "kernels and exchanges") : kernelText(each.first, each.from, each.to);
      put(columns.get(each.kind), place, band(0, true), each, looks[each.kind].colour, words, -2, shown.pixel);
    }
    plot.dataset.boxes = String(boxes.length);
    plot.dataset.kernels = String(kernels?.length ?? 0);
    return [
      track(), ...[...columns].map(([number, each]) => bars(number, each)), ...path(shown),
      numbers(shown, boxes),
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

  // Numbers of microbatches where they fit.
  function numbers(shown, boxes) {
    const out = { x: [], y: [], text: [], colour: [], size: [] };
    const [centre, height] = band(0, false);
    const tallest = Math.min(12, 0.8 * height * shown.perRow);
    const digits = String(figure.facts.microbatches - 1).length; // all fit alike, or runs of numbers would break off at 9
    for (const each of several ? boxes : []) {
      const box = each.first;
      if (each.many > 1 || lane[box] !== 0 || microbatch[box] < 0 || out.x.length >= MOST_NUMBERS) continue;
      const words = String(numberOf(box));
      const from = Math.max(each.from, shown.from), to = Math.min(each.to, shown.to);
      const font = Math.min(tallest, (((to - from) / shown.pixel) * 0.8) / (0.62 * digits));
      if (font < 7) continue;
      out.x.push((from + to) / 2 / size);
      out.y.push(row[box] + centre);
      out.text.push(words);
      out.colour.push(looks[look[box]].inks[Math.max(0, chunk[box])]);
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

  // ---------------------------------------------------------------- arrows, keys, and rows that others point to

  function overlay(plot) {
    plot.style.position = "relative";
    plot.insertAdjacentHTML(
      "beforeend",
      `<svg class="arrows" aria-hidden="true"><defs><marker id="${figure.name}-tip" viewBox="0 0 8 8" refX="7" refY="4" ` +
        'markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z"/></marker></defs><g></g></svg>',
    );
    return plot.querySelector(".arrows g");
  }

  function arrow(plot, from, to, kind) {
    const { xaxis, yaxis } = plot._fullLayout;
    const inside = (at, most) => Math.max(0, Math.min(most, at));
    const x = (box, at) => xaxis._offset + inside(xaxis.l2p(at / size), xaxis._length);
    const y = (box) => yaxis._offset + inside(yaxis.l2p(row[box] + band(lane[box], false)[0]), yaxis._length);
    const [x0, y0, x1, y1] = [x(from, end(from)), y(from), x(to, start(to)), y(to)];
    const bend = Math.max(12, Math.abs(x1 - x0) / 2);
    return `<path class="${kind}" d="M${x0},${y0} C${x0 + bend},${y0} ${x1 - bend},${y1} ${x1},${y1}" marker-end="url(#${figure.name}-tip)"/>`;
  }

  function dependantsOf(box) {
    if (!dependants) {
      dependants = new Map();
      for (let each = 0; each < count; each++) {
        if (cause[each] < 0) continue;
        if (!dependants.has(cause[each])) dependants.set(cause[each], []);
        dependants.get(cause[each]).push(each);
      }
    }
    return (dependants.get(box) ?? []).slice(0, SHADOWED);
  }

  function arrowsOf(plot, box) {
    const before = cause[box] >= 0 ? [arrow(plot, cause[box], box, "cause")] : [];
    return [...before, ...dependantsOf(box).map((each) => arrow(plot, box, each, "effect"))].join("");
  }

  const KEYS = [["whole step", 0, 0], ["−", 2, 0], ["+", 0.5, 0], ["←", 1, -0.5], ["→", 1, 0.5]];
  const NAMES = { "−": "zoom out", "+": "zoom in", "←": "earlier", "→": "later" };

  // Buttons for those who cannot drag.
  function keys(plot) {
    const bar = document.createElement("div");
    bar.className = "keys";
    for (const [sign, zoom, shift] of KEYS) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = sign;
      if (NAMES[sign]) button.setAttribute("aria-label", NAMES[sign]);
      button.addEventListener("click", () => move(plot, zoom, shift));
      bar.append(button);
    }
    plot.before(bar);
  }

  function move(plot, zoom, shift) {
    const most = figure.layout.xaxis.range[1];
    const [low, high] = plot.layout.xaxis.range;
    const width = zoom ? Math.min(most, (high - low) * zoom) : most;
    const from = zoom ? Math.max(0, Math.min(most - width, (low + high - width) / 2 + shift * width)) : 0;
    const change = { "xaxis.range": [from, from + width] };
    if (!zoom) change["yaxis.range"] = [...figure.layout.yaxis.range];
    Plotly.relayout(plot, change);
  }

  function attach(plot) {
    keys(plot);
    const layer = overlay(plot);
    plot.on("plotly_hover", ({ points }) => {
      const box = points[0]?.customdata;
      layer.innerHTML = box >= 0 ? arrowsOf(plot, box) : "";
    });
    const clear = () => (layer.innerHTML = "");
    plot.on("plotly_unhover", clear);
    plot.on("plotly_relayout", clear);
  }

  // Bring the row of a rank into view and mark it; whether there is one.
  function show(rank) {
    const place = rows.findIndex((each) => each.rank === rank);
    if (place < 0) return false;
    const plot = document.getElementById(figure.name);
    plot.scrollIntoView({ behavior: "smooth", block: "center" });
    const { xaxis, yaxis } = plot._fullLayout;
    const [top, bottom] = [place - 0.5, place + 0.48].map((at) => yaxis._offset + yaxis.l2p(at));
    const mark = `<rect class="shown" x="${xaxis._offset}" width="${xaxis._length}" y="${top}" height="${bottom - top}"/>`;
    plot.querySelector(".arrows g").innerHTML = mark;
    return true;
  }

  return { traces, attach, show };
};
