// In which order do pipeline ranks work, and how long do they stand idle? The schedules of clustersim's `schedules`.
clustersim.passes = (() => {
  "use strict";
  const rounds = (ranks, m) => Math.max(1, Math.floor(m / ranks));

  // For each pipeline rank its passes, in order: {stage, back, microbatch}.
  function order(schedule, ranks, m, chunks) {
    return Array.from({ length: ranks }, (_, rank) => orderOf(schedule, rank, { ranks, m, chunks }));
  }

  function orderOf(schedule, rank, { ranks, m, chunks }) {
    const size = schedule === "interleaved" ? m / rounds(ranks, m) : m;
    const stages = Array.from({ length: chunks }, (_, chunk) => rank + chunk * ranks);
    const forwards = passes(false, stages, m, size);
    const backwards = passes(true, [...stages].reverse(), m, size);
    const before = schedule === "interleaved" ? (chunks - 1) * size + 2 * (ranks - 1 - rank) : ranks - 1 - rank;
    return alternate(forwards, backwards, schedule === "gpipe" ? forwards.length : Math.min(before, forwards.length));
  }

  // Rounds of `size` microbatches through the stages, one stage after the other.
  function passes(back, stages, m, size) {
    const out = [];
    for (let first = 0; first < m; first += size) {
      for (const stage of stages) for (let place = 0; place < size; place++) out.push({ stage, back, microbatch: first + place });
    }
    return out;
  }

  // `warmup` forwards, a forward and a backward in turn, the backwards that are left.
  function alternate(forwards, backwards, warmup) {
    const out = forwards.slice(0, warmup);
    for (let place = warmup; place < forwards.length; place++) out.push(forwards[place], backwards[place - warmup]);
    return out.concat(backwards.slice(forwards.length - warmup));
  }

  // Share of the step that ranks stand idle, with equal stages whose backward takes twice their forward.
  function bubble(schedule, ranks, m, chunks) {
    const orders = order(schedule, ranks, m, chunks);
    const last = ranks * chunks - 1;
    const ends = new Map();
    const next = Array(ranks).fill(0);
    const free = Array(ranks).fill(0);
    const key = (stage, back, microbatch) => (microbatch * (last + 1) + stage) * 2 + (back ? 1 : 0);
    const cause = ({ stage, back, microbatch }) => {
      if (!back) return stage === 0 ? 0 : ends.get(key(stage - 1, false, microbatch));
      return ends.get(stage === last ? key(stage, false, microbatch) : key(stage + 1, true, microbatch));
    };
    for (let left = ranks, moved = true; left && moved; ) {
      moved = false;
      for (let rank = 0; rank < ranks; rank++) {
        for (let begin; next[rank] < orders[rank].length && (begin = cause(orders[rank][next[rank]])) !== undefined; moved = true) {
          const { stage, back, microbatch } = orders[rank][next[rank]++];
          free[rank] = Math.max(free[rank], begin) + (back ? 2 : 1);
          ends.set(key(stage, back, microbatch), free[rank]);
          left -= next[rank] === orders[rank].length ? 1 : 0;
        }
      }
    }
    return 1 - (3 * m * chunks) / Math.max(...free);
  }

  // Whether a schedule can run so many microbatches.
  const runs = (schedule, ranks, m) => schedule !== "interleaved" || (ranks > 1 && m % rounds(ranks, m) === 0);

  return { order, rounds, bubble, runs };
})();
