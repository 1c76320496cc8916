// Who talks to whom, about how many bytes, over which tier? Groups, tiers and exchanges of any settings.
//
// Bytes are those that one GPU sends where a collective goes round a ring: (n - 1) / n of the buffer for an all-gather or
// a reduce-scatter, twice that for an all-reduce. Small sums (of the gradients' norm) are left out.
clustersim.explorerExchanges = (facts, model) => {
  "use strict";
  const AXES = ["tp", "cp", "dp", "pp"];
  const { dpOf, microbatches, modelOf, shardOf, bytesOf, stagesOf, ofRank, recomputed, parametersOf } = model;
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // Bytes that one GPU of a pipeline rank sends in a step, on rings, by axis.
  function traffic(settings, rank) {
    const stages = ofRank(stagesOf(settings), rank, settings.pp);
    const replicas = dpOf(settings) * settings.cp;
    const units = stages.flatMap((stage) => parametersOf(settings, stage));
    const head = stages.some((stage) => stage.head) ? units[units.length - 1] : 0;
    return {
      tp: tensorTraffic(settings, stages),
      cp: ringTraffic(settings, stages),
      dp: dataTraffic(settings, sum(units), head) * (1 - 1 / replicas),
      embedding: tiedTraffic(settings, stages) / (settings.zero > 1 ? replicas : 1),
      pp: sum(stages.map((stage) => !stage.head + !stage.embedding)) * pipelineMessage(settings) * microbatches(settings),
    };
  }

  const ringsOf = (settings, mode) => facts.ring_volumes[settings.split ? "split" : "whole"][mode];
  const modeOf = (settings) => (settings.recompute.startsWith("layers:") ? "none" : settings.recompute);
  const pipelineMessage = (settings) => (settings.pp > 1 ? bytesOf(settings).activation / settings.tp : 0);

  function tensorTraffic(settings, stages) {
    const { activation, tokens } = bytesOf(settings);
    const plain = ringsOf(settings, modeOf(settings));
    const full = ringsOf(settings, "full");
    const arrives = settings.split || settings.pp === 1 ? 0 : 1; // a stage's input is gathered where it is whole
    const each = stages.map((stage) => {
      const again = recomputed(settings, stage);
      const ends = (stage.embedding ? sum(plain.embedding) : 0) + (stage.head ? sum(plain.head) : 0);
      const gathers = arrives * (!stage.embedding + !stage.head);
      const rounds = again * sum(full.layer) + (stage.layers - again) * sum(plain.layer) + ends + gathers;
      return rounds * activation + (stage.head ? plain.small * tokens : 0);
    });
    return sum(each) * microbatches(settings) * (1 - 1 / settings.tp);
  }

  function ringTraffic(settings, stages) {
    const { kv_heads: heads, head_dim: width } = modelOf(settings).dimensions;
    const keys = 2 * settings.microbatch * settings.sequence * Math.max(1, Math.floor(heads / settings.tp)) * width;
    const each = stages.map((stage) => {
      const again = recomputed(settings, stage);
      return again * sum(ringsOf(settings, "full").ring) + (stage.layers - again) * sum(ringsOf(settings, modeOf(settings)).ring);
    });
    return sum(each) * keys * facts.formats[settings.format].activation * microbatches(settings) * (1 - 1 / settings.cp);
  }

  // Buffers of gradients that are reduced and of parameters that are gathered, an all-reduce counted twice.
  function dataTraffic(settings, parameters, head) {
    const format = facts.formats[settings.format];
    const m = microbatches(settings);
    const gradients = parameters * format.gradients;
    const weights = parameters * format.compute;
    if (settings.zero === 0) return 2 * gradients;
    if (settings.zero < 3) return gradients * (settings.zero === 2 ? m : 1) + weights;
    const again = facts.strategies[3].reshards ? weights - head * format.compute : 0; // the head stays between its passes
    return m * (weights + again + gradients);
  }

  // The gradient of a matrix that the first and the last pipeline rank both hold; of two ranks each sends it once.
  function tiedTraffic(settings, stages) {
    const ends = settings.pp > 1 && modelOf(settings).tied && stages.some((stage) => stage.embedding || stage.head);
    return ends ? shardOf(settings).rows * modelOf(settings).dimensions.hidden * facts.formats[settings.format].gradients : 0;
  }

  // Ranks are numbered along the order of axes, the first one fastest.
  function strides(settings) {
    const degrees = { tp: settings.tp, cp: settings.cp, dp: dpOf(settings), pp: settings.pp };
    let step = 1;
    return Object.fromEntries(facts.order.map((axis) => [axis, [step, (step *= degrees[axis], degrees[axis])]]));
  }

  function coordinates(settings, rank) {
    const steps = strides(settings);
    return Object.fromEntries(AXES.map((axis) => [axis, Math.floor(rank / steps[axis][0]) % steps[axis][1]]));
  }

  function rankAt(settings, at) {
    const steps = strides(settings);
    return sum(AXES.map((axis) => at[axis] * steps[axis][0]));
  }

  // Ranks that differ from a rank along some axes only, in ascending order.
  function group(settings, rank, axes) {
    const steps = strides(settings);
    let ranks = [rank - sum(axes.map((axis) => coordinates(settings, rank)[axis] * steps[axis][0]))];
    for (const axis of axes) {
      const [step, degree] = steps[axis];
      ranks = ranks.flatMap((first) => Array.from({ length: degree }, (_, place) => first + place * step));
    }
    return ranks.sort((one, other) => one - other);
  }

  // The first tier in one of whose units all ranks are (facts.machine.levels).
  function tier(ranks) {
    if (ranks.length < 2) return "gpu";
    const found = facts.machine.levels.find(([, unit]) => ranks.every((rank) => unit[rank] === unit[ranks[0]]));
    return found ? found[0] : facts.machine.top;
  }

  return { traffic, pipelineMessage, coordinates, rankAt, group, tier };
};
