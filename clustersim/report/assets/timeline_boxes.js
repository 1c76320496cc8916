// Which boxes and kernels of the timeline are drawn: those in view, and as one what is shorter than a pixel.
clustersim.parts.timelineBoxes = (figure, arrays) => {
  "use strict";
  const MOST_BOXES = 5000, MOST_KERNELS = 3000, MOST_VISITED = 200000; // with the rest below 10,000 shapes
  const COARSEST = 4; // pixels: kernels that must be merged more are not shown
  const WIDE = 24; // pixels: kernels of passes that are narrower on average are not shown
  const { lanes, styles, labels, tick } = figure.facts;
  const { row, lane, style, first } = arrays;
  const start = (box) => arrays.start[box] * tick;
  const end = (box) => arrays.end[box] * tick;
  const seen = (shown, place) => place >= shown.low - 0.5 && place <= shown.high + 0.5;

  // Runs of things that are drawn as one: `next` says where the present run ends.
  class Merger {
    constructor(bin) {
      this.bin = bin;
      this.out = [];
      this.weights = new Float64Array(styles.length);
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
        open.count += 1;
        this.weights[kind] += to - from;
        return;
      }
      this.close();
      this.open = { key, from, to, at, kind, first: id, last: id, count: 1 };
      if (short) this.weights[kind] = to - from;
    }

    close() {
      const { open, weights } = this;
      if (!open) return;
      if (open.count > 1) open.kind = weights.indexOf(Math.max(...weights));
      weights.fill(0);
      this.out.push(open);
      this.open = null;
    }
  }

  // Boxes in view, at most MOST_BOXES.
  function boxesIn(shown) {
    for (let bin = shown.pixel; ; bin *= 2) {
      const merger = new Merger(bin);
      for (let box = 0; box < row.length; box++) {
        if (!seen(shown, row[box]) || end(box) < shown.from || start(box) > shown.to) continue;
        const fine = lane[box] ? 2 * bin : bin;
        merger.add(row[box] * lanes.length + lane[box], start(box), end(box), style[box], box, fine);
        if (merger.out.length > MOST_BOXES) break;
      }
      merger.close();
      if (merger.out.length <= MOST_BOXES) return merger.out;
    }
  }

  // Kernels of the passes in view; null where there are too many to be seen.
  function kernelsIn(shown, boxes) {
    if (!arrays.template.length) return null;
    const computing = boxes.filter((mark) => lane[mark.first] === 0);
    const passes = computing.filter((mark) => mark.count === 1);
    const spanCount = computing.reduce((sum, mark) => sum + mark.count, 0);
    const lasting = computing.reduce((sum, mark) => sum + mark.to - mark.from, 0);
    if (lasting < WIDE * shown.pixel * spanCount) return null;
    let operations = 0;
    for (const { first: box } of passes) {
      for (let span = first[box]; span < first[box + 1]; span++) {
        const template = arrays.template[span];
        operations += template < 0 ? 1 : arrays.templateFirst[template + 1] - arrays.templateFirst[template];
      }
      if (operations > MOST_VISITED) return null;
    }
    for (let merged = 1; merged <= COARSEST; merged *= 2) {
      const kernels = mergedKernels(shown, passes, shown.pixel * merged);
      if (kernels) return kernels;
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
    const template = arrays.template[span];
    const begins = arrays.spanStart[span] * tick;
    if (template < 0) {
      tell(begins, arrays.spanEnd[span] * tick, arrays.spanStyle[span], [-1, -1]);
      return;
    }
    let at = begins;
    for (let place = arrays.templateFirst[template]; place < arrays.templateFirst[template + 1]; place++) {
      const from = at + arrays.gap[place];
      at = from + arrays.duration[place];
      tell(from, at, labels[arrays.label[place]].style, [arrays.label[place], place]);
    }
  }

  return { start, end, boxesIn, kernelsIn };
};
