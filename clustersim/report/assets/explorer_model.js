// What do any settings need and send? Look-ups in tables that Python made, products, sums and maxima: no physics.
//
// Settings are those of the controls, and those that follow from them (`settled`). Nothing is drawn here; what the tables
// are is said in clustersim's `analysis.exploration`, and a test holds these answers to the package's own.
clustersim.explorerModel = (facts) => {
  "use strict";
  const { tables, machine } = facts;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const dot = (row, values) => sum(row.map((each, place) => each * values[place]));
  const at = (table, settings) => table.keys.reduce((found, key) => found?.[settings[key]], table.values);

  // The entry of a number; beyond the end, as much more with each as the last entry has more than the one before.
  const along = (entries, number) => (number < entries.length ? entries[number] : further(entries.at(-1), entries.at(-2), number - entries.length + 1));

  function further(last, before, times) {
    return Array.isArray(last) ? last.map((each, place) => further(each, before[place], times)) : last + times * (last - before);
  }

  // Settings with all that follows from them.
  function settled(chosen) {
    const all = { ...chosen, chunks: at(tables.chunks, chosen) };
    const product = (keys) => keys.reduce((total, key) => total * all[key], 1);
    for (const [name, factors, divisors] of tables.derived) all[name] = product(factors) / product(divisors);
    for (const [name, table] of Object.entries(tables.flags)) all[name] = at(table, all);
    return all;
  }

  // Why settings are impossible, one sentence each; none if they are legal.
  function problems(settings) {
    const groups = tables.rules.map((group) => group.flatMap((table) => at(table, settings) ?? []));
    return groups.find((found) => found.length) ?? [];
  }

  // For each pipeline rank its stages: what they hold, beside all settings.
  const stagesOf = (settings) => at(tables.stages, settings).map((rank) => rank.map(([first, layers, embedding, head]) => ({ ...settings, first, layers, embedding, head })));

  const row = (name, stage) => along(at(tables.rows[name], stage), stage.layers);
  const sizesOf = (settings) => at(tables.sizes, settings).map((part) => dot(part, tables.features.map((name) => settings[name])));

  // Memory of the fullest pipeline rank for each ZeRO stage: {rank, parts, peak}, and of every rank.
  function memory(settings) {
    const placed = stagesOf(settings);
    return [0, 1, 2, 3].map((zero) => {
      const ranks = placed.map((stages, rank) => atPeak({ ...settings, zero }, stages, rank));
      const rank = ranks.reduce((fullest, each, place) => (each.peak > ranks[fullest].peak ? place : fullest), 0);
      return { zero, rank, ranks, ...ranks[rank], fits: ranks[rank].peak <= machine.capacity };
    });
  }

  const sharing = (settings) => at(tables.sharing, settings);

  function atPeak(settings, stages, rank) {
    const sizes = sizesOf(settings);
    const parts = resident(settings, stages, sizes);
    const { there: counted } = sharing(settings);
    const there = sizes.map((size, column) => size * counted[column]);
    parts.activations = activations(stages, at(tables.schedules, settings).held[rank], there);
    parts.fragmentation = sum(Object.entries(parts).map(([use, size]) => size * tables.fragmentation[use]));
    return { parts, peak: sum(Object.values(parts)) };
  }

  // Parameters of stages, by their group.
  const byGroup = (stages, sizes) => tables.groups.map((columns) => sum(stages.map((stage) => {
    const counts = row("parameters", stage);
    return sum(columns.map((column) => counts[column] * sizes[column]));
  })));
  const parametersBy = (stages) => byGroup(stages, sizesOf(stages[0]));
  const parametersOf = (stages) => sum(parametersBy(stages));

  // What stays for the whole step, by use.
  function resident(settings, stages, sizes) {
    const counts = byGroup(stages, sizes);
    const { resident: of, gathers, bucket: limits } = sharing(settings);
    const own = stages.map((stage) => byGroup([stage], sizes));
    const bucket = ([first, others, each], group) => Math.max(...stages.map((stage, place) => Math.min((stage.embedding ? first : others) ?? Infinity, each * own[place][group])));
    const has = (end) => stages.some((stage) => stage[end]);
    const whole = { ...settings, gathers, embedding: has("embedding"), head: has("head") };
    const groups = sum(tables.buffers.map((table) => at(table, settings)));
    const messages = at(tables.receives, settings) * sizes[tables.columns.indexOf("message")];
    return {
      ...Object.fromEntries(Object.entries(of).map(([use, size]) => [use, dot(size, counts)])),
      "gathered parameters": along(at(tables.gathered, whole), sum(stages.map((stage) => stage.layers))),
      "messages and buckets": messages + sum(limits.map(bucket)),
      workspaces: tables.workspace,
      "communication buffers": groups,
      "driver context": tables.context,
    };
  }

  // The fullest of a rank's moments: one stage runs backward, and each holds some microbatches.
  function activations(stages, moments, sizes) {
    const kept = stages.map((stage) => dot(row("kept", stage), sizes));
    const passing = stages.map((stage) => Math.max(0, ...row("moments", stage).map((moment) => dot(moment, sizes))));
    return Math.max(...moments.map(([place, ...held]) => passing[place] + dot(held, kept)));
  }

  // Bytes that one GPU of a pipeline rank sends in a step, on rings, by role.
  function traffic(settings, rank) {
    const stages = stagesOf(settings)[rank];
    const sizes = sizesOf(settings);
    const { dp, tied } = sharing(settings);
    const sent = (name, weigh = (counts) => counts) => sum(stages.map((stage) => dot(weigh(row(name, stage)), sizes)));
    const weights = along(dp, settings.microbatches);
    return {
      ...Object.fromEntries(["tp", "cp", "pp"].map((role) => [role, sent(role) * settings.microbatches])),
      dp: sent("parameters", (counts) => counts.map((count, column) => count * weights[column])),
      embedding: sent("tied") * tied,
    };
  }

  // The share of the step that is the schedule's own bubble with some microbatches, where it can run them.
  const bubble = (settings) => at(tables.schedules, settings)?.bubble;
  const microbatchesOf = (settings) => Object.keys(at({ ...tables.schedules, keys: ["schedule", "chunks", "pp"] }, settings) ?? {}).map(Number);

  return { settled, problems, stagesOf, memory, sharing, parametersBy, parametersOf, traffic, bubble, microbatchesOf };
};
