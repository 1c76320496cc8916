// What do any settings need and send? Look-ups in tables that Python made, products, sums and maxima: no physics.
//
// Settings are those of the controls, and those that follow from them (`settled`). Nothing is drawn here; what the tables
// are is said in the docstring of `clustersim.results.explorer_tables`, and a test holds these answers to the package's own.
clustersim.explorerModel = (facts) => {
  "use strict";
  const { tables, machine } = facts;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const dot = (row, values) => sum(row.map((factor, place) => factor * values[place]));
  const at = (table, settings) => table.keys.reduce((entry, key) => entry?.[settings[key]], table.values);

  // The entry of a number; beyond the end, as much more with each as the last entry has more than the one before.
  const along = (entries, number) => (number < entries.length ? entries[number] : further(entries.at(-1), entries.at(-2), number - entries.length + 1));

  function further(last, before, times) {
    return Array.isArray(last) ? last.map((element, place) => further(element, before[place], times)) : last + times * (last - before);
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
    return groups.find((reasons) => reasons.length) ?? [];
  }

  // For each pipeline rank its stages: what they hold, by settings.
  const stagesOf = (settings) => at(tables.stages, settings).map((rank) => rank.map(([first, layers, embedding, head, content]) => ({ ...settings, first, layers, embedding, head, content })));

  const row = (name, stage) => along(at(tables.rows[name], stage), stage.content);
  const sizesOf = (settings) => at(tables.sizes, settings).map((part) => dot(part, tables.features.map((name) => settings[name])));

  // Memory of the fullest pipeline rank for each ZeRO stage: {rank, parts, peak}, and of every rank.
  function memory(settings) {
    const placed = stagesOf(settings);
    return [0, 1, 2, 3].map((zero) => {
      const ranks = placed.map((stages, rank) => atPeak({ ...settings, zero }, stages, rank));
      const rank = ranks.reduce((fullest, candidate, place) => (candidate.peak > ranks[fullest].peak ? place : fullest), 0);
      return { zero, rank, ranks, ...ranks[rank], fits: ranks[rank].peak <= machine.capacity };
    });
  }

  const sharing = (settings) => at(tables.sharing, settings);
  // Of experts' parameters, which other ranks hold than all else.
  const sharingOfExperts = (settings) => (tables.experts === null ? sharing(settings) : at(tables.sharing, { ...settings, replicas: settings.edp }));
  const byOwner = (own, ofExperts) => own.map((value, group) => (group === tables.experts ? ofExperts[group] : value));

  // Bytes of a parameter that stays, by use and group.
  function residentOf(settings) {
    const ofExperts = sharingOfExperts(settings).resident;
    return Object.fromEntries(Object.entries(sharing(settings).resident).map(([use, sizes]) => [use, byOwner(sizes, ofExperts[use])]));
  }

  function atPeak(settings, stages, rank) {
    const sizes = sizesOf(settings);
    const parts = resident(settings, stages, sizes);
    const { there: counted } = sharing(settings);
    const there = sizes.map((size, column) => size * counted[column]);
    const fullest = fullestMoment(settings, stages, at(tables.schedules, settings).held[rank], there);
    parts.activations = fullest.activations;
    parts.gradients += fullest.gradients;
    parts.fragmentation = sum(Object.entries(parts).map(([use, size]) => size * tables.fragmentation[settings.recompute][use]));
    return { parts, peak: sum(Object.values(parts)), ofExperts: ofExperts(settings, stages, sizes) };
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
    const { bucket: limits } = sharing(settings);
    const own = stages.map((stage) => byGroup([stage], sizes));
    const waiting = byOwner(sharing(settings).waiting, sharingOfExperts(settings).waiting);
    const bucket = ([first, others], group) => Math.max(...stages.map((stage, place) => Math.min((stage.embedding ? first : others) ?? Infinity, waiting[group] * own[place][group])));
    const groups = sum(tables.buffers.map((table) => at(table, settings)));
    const messages = at(tables.receives, settings) * sizes[tables.columns.indexOf("message")];
    return {
      ...Object.fromEntries(Object.entries(residentOf(settings)).map(([use, size]) => [use, dot(size, counts)])),
      "low-precision parameter copies": sharing(settings).copied * sum(stages.map((stage) => dot(row("cast", stage), sizes))),
      "gathered parameters": gathered(sharing(settings), stages, sizes),
      "messages and buckets": messages + sum(limits.map(bucket)),
      workspaces: Math.max(...stages.map((stage) => along(tables.workspace, stage.content))),
      "communication buffers": groups,
      "driver context": tables.context,
    };
  }

  // What is gathered at once, and the gradients of one unit.
  function gathered({ gathered: whole, reduced, dropped }, stages, sizes) {
    const most = (name, weights) => stages.map((stage) => Math.max(0, ...row(name, { ...stage, dropped }).map((counts) => dot(counts, weights))));
    const [held, gradients] = [whole, reduced].map((fractions) => byColumn(fractions).map((value, column) => value * sizes[column]));
    const fullest = most("gathered", held);
    return (dropped ? Math.max(...fullest) : sum(fullest)) + Math.max(...most("units", gradients));
  }

  // What is said of groups of parameters, for each of their columns, those of parameters used again included.
  function byColumn(groupValues) {
    const columnValues = tables.columns.map(() => 0);
    tables.groups.forEach((columns, group) => [...columns, ...tables.reused[group]].forEach((column) => (columnValues[column] = groupValues[group])));
    return columnValues;
  }

  // Bytes of experts' parameters, by use; nothing where there are none.
  function ofExperts(settings, stages, sizes) {
    if (tables.experts === null) return {};
    const count = byGroup(stages, sizes)[tables.experts];
    return Object.fromEntries(Object.entries(residentOf(settings)).map(([use, groupValues]) => [use, groupValues[tables.experts] * count]));
  }

  // The fullest of a rank's moments: one stage runs backward, each holds some microbatches, and some accumulate gradients.
  function fullestMoment(settings, stages, moments, there) {
    const sizes = sizesOf(settings);
    const kept = stages.map((stage) => dot(row("kept", stage), there));
    const passing = stages.map((stage) => Math.max(0, ...row("moments", stage).map((moment) => dot(moment, there))));
    const each = byOwner(sharing(settings).unreduced, sharingOfExperts(settings).unreduced);
    const unreduced = stages.map((stage) => dot(each, byGroup([stage], sizes)));
    const weights = byColumn(sharing(settings).buffered).map((value, column) => value * sizes[column]);
    const buffer = Math.max(0, ...stages.flatMap((stage) => row("units", stage).map((counts) => dot(counts, weights))));
    const held = moments.map(([place, ...counts]) => ({
      activations: passing[place] + dot(counts.slice(0, stages.length), kept),
      gradients: dot(counts.slice(stages.length, -1), unreduced) + counts.at(-1) * buffer,
    }));
    // A step's only backward creates gradients while it frees activations: all are there in its last layer.
    const created = dot(byOwner(sharing(settings).created, sharingOfExperts(settings).created), byGroup(stages, sizes));
    const whole = Math.max(...tables.columns.map((name, column) => (name.startsWith("whole layer") ? there[column] + there[tables.columns.indexOf(name.replace("whole layer", "layer gradients"))] : 0)));
    if (created > 0) held.push({ activations: whole, gradients: created });
    const total = (moment) => moment.activations + moment.gradients;
    return held.reduce((fullest, moment) => (total(moment) > total(fullest) ? moment : fullest));
  }

  // Bytes that one GPU of a pipeline rank sends in a step, on rings, by role.
  function traffic(settings, rank) {
    const stages = stagesOf(settings)[rank];
    const sizes = sizesOf(settings);
    const { dp, tied } = sharing(settings);
    const sent = (name, weigh = (counts) => counts) => sum(stages.map((stage) => dot(weigh(row(name, stage)), sizes)));
    const inside = ["tp", "cp", "pp", "ep", "etp"].filter((role) => tables.rows[role]);
    const ofParameters = (weights, chosen) => {
      const [passes, there] = [along(weights, settings.microbatches), byColumn(tables.groups.map((_, group) => Number(chosen(group))))];
      return sent("parameters", (counts) => counts.map((count, column) => count * passes[column] * there[column]));
    };
    return {
      ...Object.fromEntries(inside.map((role) => [role, sent(role) * settings.microbatches])),
      dp: ofParameters(dp, (group) => group !== tables.experts),
      ...(tables.experts === null ? {} : { edp: ofParameters(sharingOfExperts(settings).dp, (group) => group === tables.experts) }),
      embedding: sent("tied") * tied,
    };
  }

  // Bytes that a rank sends in one dispatch for each of its tokens; nothing where experts are on one rank.
  const sends = (settings) => (tables.sends === null ? undefined : at(tables.sends, settings));

  // The share of the step that is the schedule's own bubble with some microbatches, where it can run them.
  const bubble = (settings) => at(tables.schedules, settings)?.bubble;
  const microbatchesOf = (settings) => Object.keys(at({ ...tables.schedules, keys: ["schedule", "chunks", "pp"] }, settings) ?? {}).map(Number);

  return { settled, problems, stagesOf, memory, sharing, residentOf, sends, parametersBy, parametersOf, traffic, bubble, microbatchesOf };
};
