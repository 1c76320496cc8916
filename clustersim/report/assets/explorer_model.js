// What does a layout need? Whether any settings are legal, and the memory that they take, from the tables that Python made.
//
// Settings: model and format (numbers in their lists), gpus, tp, cp, pp, split (sequence parallelism), zero, schedule,
// chunks, recompute, microbatch, sequence, batch. Nothing is drawn here; the formulas are those of clustersim's
// `memory`, `schedules` and `parallel`, and a test holds them to these.
clustersim.explorerModel = (facts) => {
  "use strict";
  const MOST_PASSES = 2 ** 17;
  const MEGATRON_BUCKET = [40e6, 1e6]; // elements, and elements per rank
  const OUTSIDE = ["communication buffers", "driver context"]; // not the framework's allocator's
  const { order, rounds } = clustersim.passes;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const { count } = clustersim.tools;
  const divisors = (number) => Array.from({ length: number }, (_, place) => place + 1).filter((each) => number % each === 0);

  // The nearest legal values below and above, for a sentence.
  function around(wanted, legal) {
    const below = legal.filter((value) => value < wanted).pop();
    const above = legal.find((value) => value > wanted);
    return [below, above].filter((value) => value !== undefined).map(count).join(" or ");
  }

  const multiples = (wanted, step) => around(wanted, [Math.floor(wanted / step), Math.floor(wanted / step) + 1].filter(Boolean).map((many) => many * step));

  const modelOf = (settings) => facts.models[settings.model];
  const shardOf = (settings) => modelOf(settings).shards[`${facts.formats[settings.format].key} tp${settings.tp}${settings.split ? " split" : ""}`];
  const replica = (settings) => settings.tp * settings.cp * settings.pp;
  const dpOf = (settings) => settings.gpus / replica(settings);
  const microbatches = (settings) => settings.batch / (dpOf(settings) * settings.microbatch);
  const chunksOf = (settings) => (settings.schedule === "interleaved" ? settings.chunks : 1);

  // Layers of each virtual stage; where they do not divide, the ends give up layers first.
  function splitLayers(layers, stages) {
    const most = Math.ceil(layers / stages);
    const counts = Array(stages).fill(most);
    for (let place = 0; place < most * stages - layers; place++) {
      counts[place % 2 === 0 ? stages - 1 - place / 2 : (place - 1) / 2] -= 1;
    }
    return counts;
  }

  function layersOf(settings) {
    const stages = settings.pp * chunksOf(settings);
    const own = facts.layers_per_stage;
    if (own && settings.model === 0 && own.length === stages) return own;
    return splitLayers(modelOf(settings).dimensions.layers, stages);
  }

  // Virtual stages in model order, with their first layer.
  function stagesOf(settings) {
    const counts = layersOf(settings);
    let first = 0;
    return counts.map((layers, number) => {
      const stage = { number, layers, first, embedding: number === 0, head: number === counts.length - 1 };
      first += layers;
      return stage;
    });
  }

  const ofRank = (stages, rank, pp) => stages.filter((stage) => stage.number % pp === rank);

  // Why settings are impossible, one sentence each; none if they are legal.
  function problems(settings) {
    if (settings.gpus % replica(settings)) return [uneven(settings)];
    return [...cuts(settings), ...pipeline(settings), ...batch(settings), ...sequence(settings)];
  }

  function uneven({ gpus, tp, cp, pp }) {
    const product = `tp ${tp} × cp ${cp} × pp ${pp} = ${count(tp * cp * pp)}`;
    return `${product} GPUs for one replica do not divide ${count(gpus)} GPUs; take ${multiples(gpus, tp * cp * pp)} GPUs or smaller degrees`;
  }

  function* cuts(settings) {
    const { heads, kv_heads: keys, ffn, vocab } = modelOf(settings).dimensions;
    const { tp } = settings;
    const name = modelOf(settings).name;
    if (heads % tp) yield `tp ${tp} does not divide the ${heads} heads of ${name}; tp ${around(tp, divisors(heads))} does`;
    else if (keys % tp && tp % keys) yield `tp ${tp} neither divides the ${keys} key and value heads of ${name} nor is a multiple of them`;
    if (ffn % tp) yield `tp ${tp} does not divide the MLP's width ${count(ffn)} of ${name}`;
    if (vocab % tp) yield `tp ${tp} does not divide the vocabulary of ${name}, ${count(vocab)}; Megatron-LM would pad it to ${count(Math.ceil(vocab / (128 * tp)) * 128 * tp)}`;
  }

  function* pipeline(settings) {
    const { pp, recompute } = settings;
    const chunks = chunksOf(settings);
    const counts = layersOf(settings);
    const { layers } = modelOf(settings).dimensions;
    if (counts.slice(1, -1).includes(0) || !counts.some(Boolean)) {
      yield `pp ${pp} × ${chunks} chunks = ${pp * chunks} stages, but ${modelOf(settings).name} has only ${layers} layers`;
      return;
    }
    if (chunks > 1 && pp === 1) yield "interleaved stages need a pipeline, but pp is 1; take 1F1B";
    const again = recompute.startsWith("layers:") ? Number(recompute.slice(7)) : 0;
    if (again > Math.max(...counts)) yield `${again} layers of each stage cannot be recomputed: no stage holds more than ${Math.max(...counts)}`;
  }

  function* batch(settings) {
    const dp = dpOf(settings);
    const { batch: sequences, microbatch, pp } = settings;
    const whole = dp * microbatch;
    const m = microbatches(settings);
    const chunks = chunksOf(settings);
    if (sequences < whole) yield `a batch of ${count(sequences)} sequences cannot feed dp ${count(dp)} replicas with microbatches of ${microbatch}; ${count(whole)} sequences would`;
    else if (sequences % whole) yield `a batch of ${count(sequences)} sequences is not a multiple of dp ${count(dp)} × microbatch ${microbatch} = ${count(whole)}; ${multiples(sequences, whole)} is`;
    else if (pp * chunks * m > MOST_PASSES) yield `${count(m)} microbatches on ${pp * chunks} stages are more passes than ${count(MOST_PASSES)}, the most of a step here`;
    else if (chunks > 1 && pp > 1 && m % rounds(pp, m)) yield `interleaved stages on ${pp} pipeline ranks cannot split ${count(m)} microbatches into ${rounds(pp, m)} equal rounds`;
  }

  function* sequence(settings) {
    const model = modelOf(settings);
    const { sequence: tokens, cp, tp, split } = settings;
    if (model.positions && tokens > model.positions) yield `${count(tokens)} tokens are more than the ${count(model.positions)} learned positions of ${model.name}`;
    const parts = (cp > 1 ? 2 * cp : 1) * (split ? tp : 1);
    if (tokens % parts) yield `${count(tokens)} tokens do not divide into ${parts} parts; ${multiples(tokens, parts)} do`;
  }

  // Bytes of what one microbatch keeps and needs, on the shard of one rank.
  function bytesOf(settings) {
    const shard = shardOf(settings);
    const format = facts.formats[settings.format];
    const tokens = (settings.microbatch * settings.sequence) / settings.cp;
    const kept = (name) => tokens * (shard.layer[name][0] + shard.layer[name][1] * settings.sequence);
    const mode = settings.recompute in shard.layer ? settings.recompute : "none";
    return {
      tokens,
      format,
      shard,
      input: tokens * shard.layer_input,
      layer: kept("none"),
      kept: kept(mode),
      embedding: tokens * shard.embedding,
      head: tokens * shard.head,
      logits: tokens * shard.rows,
      activation: tokens * modelOf(settings).dimensions.hidden * format.activation,
    };
  }

  function recomputed(settings, stage) {
    if (settings.recompute === "full") return stage.layers;
    return settings.recompute.startsWith("layers:") ? Math.min(Number(settings.recompute.slice(7)), stage.layers) : 0;
  }

  // What a microbatch keeps on a stage from forward to backward.
  function kept(settings, bytes, stage) {
    const again = recomputed(settings, stage);
    const ends = (stage.embedding ? bytes.embedding : 0) + (stage.head ? bytes.head : 0);
    return again * bytes.input + (stage.layers - again) * bytes.kept + ends;
  }

  // What a backward needs at its fullest beside what was kept; sharded: gradients are counted with gathered units.
  function passing(settings, bytes, stage, sharded) {
    const width = bytes.format.activation;
    const [embedding, layer, head] = bytes.shard.largest.map((elements) => (sharded ? 0 : elements * width));
    const again = recomputed(settings, stage);
    const moments = [0];
    let freed = 0;
    if (stage.head) {
      moments.push(bytes.logits * (facts.loss_width || width), bytes.logits * (width - 4) + head);
      freed += bytes.head;
    }
    for (const [layers, each] of [[stage.layers - again, bytes.kept], [again, bytes.input]]) {
      if (!layers) continue;
      moments.push(bytes.layer - each + layer - freed);
      freed += layers * each;
    }
    if (stage.embedding) moments.push(embedding - freed);
    return Math.max(...moments);
  }

  // The most that activations take on each pipeline rank.
  function peaks(settings, stages, sharded) {
    const bytes = bytesOf(settings);
    const held = stages.map((stage) => kept(settings, bytes, stage));
    const more = stages.map((stage) => passing(settings, bytes, stage, sharded));
    const orders = order(settings.schedule, settings.pp, microbatches(settings), chunksOf(settings));
    return orders.map((actions) => {
      let now = 0;
      let most = 0;
      for (const { stage, back } of actions) {
        now += back ? more[stage] : held[stage];
        most = Math.max(most, now);
        if (back) now -= held[stage] + more[stage];
      }
      return most;
    });
  }

  function parametersOf(settings, stage) {
    const [layer, embedding, head, tied] = shardOf(settings).parameters;
    const last = modelOf(settings).tied && stage.embedding ? tied : head;
    return [...(stage.embedding ? [embedding] : []), ...Array(stage.layers).fill(layer), ...(stage.head ? [last] : [])];
  }

  // What stays for the whole step, by part, on a rank that holds `units` parameters.
  function resident(settings, zero, units) {
    const { format, activation } = bytesOf(settings);
    const replicas = dpOf(settings) * settings.cp;
    const total = sum(units);
    const shards = (stage) => (zero >= stage ? replicas : 1);
    const degrees = [settings.tp, settings.cp, dpOf(settings), settings.pp];
    const receives = settings.pp === 1 ? 0 : (2 * chunksOf(settings) * activation) / settings.tp;
    const groups = degrees.filter((degree) => degree > 1).length * facts.machine.communicator;
    return {
      parameters: (total * format.compute) / shards(3),
      gradients: (total * format.gradients) / shards(2),
      "optimizer state": (total * format.state) / shards(1),
      "gathered parameters": gathered(format, zero, replicas, units),
      "communication buffers": groups + receives + bucket(format, zero, replicas, total),
      "driver context": facts.machine.context,
    };
  }

  function gathered(format, zero, replicas, units) {
    if (zero < 3 || replicas === 1) return 0;
    const { ahead, reshards } = facts.strategies[3];
    const sorted = [...units].sort((one, other) => other - one);
    const whole = sum(reshards ? sorted.slice(0, ahead + 1) : sorted);
    return whole * format.compute + sorted[0] * format.gradients;
  }

  function bucket(format, zero, replicas, total) {
    if (zero !== 2 || replicas === 1) return 0;
    const rule = Math.max(MEGATRON_BUCKET[0], MEGATRON_BUCKET[1] * replicas) * format.gradients;
    return Math.min(facts.strategies[2].bucket ?? rule, total * format.gradients);
  }

  // Memory of the fullest pipeline rank for each ZeRO stage: {rank, parts, peak}, and of every rank.
  function memory(settings) {
    const stages = stagesOf(settings);
    const whole = peaks(settings, stages, false);
    const sharded = dpOf(settings) * settings.cp > 1 ? peaks(settings, stages, true) : whole;
    const units = whole.map((_, rank) => ofRank(stages, rank, settings.pp).flatMap((stage) => parametersOf(settings, stage)));
    return [0, 1, 2, 3].map((zero) => {
      const ranks = units.map((own, rank) => atPeak(resident(settings, zero, own), (zero === 3 ? sharded : whole)[rank]));
      const rank = ranks.reduce((fullest, each, place) => (each.peak > ranks[fullest].peak ? place : fullest), 0);
      return { zero, rank, ranks, ...ranks[rank], fits: ranks[rank].peak <= facts.machine.capacity };
    });
  }

  function atPeak(parts, activations) {
    const all = { ...parts, activations };
    const allocated = sum(Object.entries(all).map(([name, size]) => (OUTSIDE.includes(name) ? 0 : size)));
    all.fragmentation = allocated * (facts.machine.fragmentation - 1);
    return { parts: all, peak: sum(Object.values(all)) };
  }

  return {
    problems, dpOf, microbatches, chunksOf, modelOf, shardOf, bytesOf, stagesOf, ofRank, recomputed, parametersOf, memory,
  };
};
