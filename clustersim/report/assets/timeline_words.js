// What the boxes and kernels of the timeline say when one points at them.
clustersim.parts.timelineWords = (figure, arrays, tools, boxes) => {
  "use strict";
  const { start, end } = boxes;
  const { rows, styles, texts, labels, tick, perStep } = figure.facts;
  const { row, style, microbatch, chunk, cause } = arrays;

  const numberOf = (box) => (perStep ? microbatch[box] % perStep : microbatch[box]);
  const text = (number) => tools.escape(texts[number]).replaceAll("\n", "<br>");
  const rowWords = (place) => tools.escape(rows[place].words);
  const lasting = (from, to) => `${tools.seconds(from)} → ${tools.seconds(to)} · <b>${tools.seconds(to - from)}</b>`;

  function what(box) {
    let words = styles[style[box]].label;
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

  function mergedText(mark, place, ofWhat) {
    const words = `<b>${mark.count.toLocaleString("en-US")} ${ofWhat}</b>, mostly ${tools.escape(styles[mark.kind].label)}`;
    return [words, rowWords(place), lasting(mark.from, mark.to), "zoom in to see each"].join("<br>");
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

  return { numberOf, rowWords, lasting, causeWords, boxText, mergedText, kernelText };
};
