// What is DDP, what do ZeRO's stages, tensor and pipeline parallelism do? In plain words, with the present choice's numbers.
(async () => {
  "use strict";
  await clustersim.opened;
  const { explorer, tools } = clustersim;
  const { facts, model, groups, bubbleWords } = explorer;
  const TIERS = { nvlink: "inside one NVLink domain", host: "inside one node", node: "inside one node" };
  const bytes = (value) => tools.bytes(value);
  const NOTHING = "Here there is one replica only, so there is nothing to share out: take more GPUs than tp × cp × pp.";

  const verdict = (stage) => `${bytes(stage.peak)} of ${bytes(facts.machine.capacity)}: it ${stage.fits ? "fits" : "does not fit"}`;
  const sends = (settings, stage) => bytes(model.traffic({ ...settings, zero: stage.zero }, stage.rank).dp);

  function ddp({ settings, stages: [stage] }, replicas) {
    if (replicas === 1) return NOTHING;
    const own = stage.parts.parameters + stage.parts.gradients + stage.parts["optimizer state"];
    return `Each of ${tools.count(replicas)} replicas computes its own sequences with its own copy of everything: parameters, gradients and optimizer state take ${bytes(own)} on the peak-memory GPU, which is the same on all ${tools.count(replicas)}${settings.edp === undefined ? "" : `, but for experts, of which ${tools.count(settings.edp)} rank${settings.edp > 1 ? "s have" : " has"} the same`}. Once a step gradients are summed, for which it sends ${sends(settings, stage)}. In all ${verdict(stage)}.`;
  }

  // Experts are held by fewer ranks than all else.
  const ofExperts = ({ edp }) => (edp === undefined ? "" : ` (of experts' ${edp > 1 ? `1/${tools.count(edp)}` : "all, as no other rank has them"})`);

  function zero1({ settings, stages: [before, stage] }, replicas) {
    if (replicas === 1) return NOTHING;
    return `Each replica keeps the optimizer state of 1/${tools.count(replicas)} of the parameters only: ${bytes(stage.parts["optimizer state"])} instead of ${bytes(before.parts["optimizer state"])}${ofExperts(settings)}. It updates that part and gathers the rest; the peak-memory GPU sends ${sends(settings, stage)} a step (DDP: ${sends(settings, before)}). In all ${verdict(stage)}.`;
  }

  function zero2({ settings, stages: [, before, stage] }, replicas) {
    if (replicas === 1) return NOTHING;
    const m = settings.microbatches;
    const { every } = model.sharing({ ...settings, zero: 2 });
    if (!every) return `Gradients would be kept as parts, too, but here they are whole until the last microbatch of a step, as frameworks do with a pipeline: ${bytes(stage.parts.gradients)}, and as much to send as with ZeRO 1, ${sends(settings, stage)} a step. In all ${verdict(stage)}.`;
    return `Gradients are kept as parts, too: ${bytes(stage.parts.gradients)} instead of ${bytes(before.parts.gradients)}. The price: whole gradients are reduced after every microbatch, ${tools.count(m)} time${m > 1 ? "s" : ""} a step, so the peak-memory GPU sends ${sends(settings, stage)} a step. In all ${verdict(stage)}.`;
  }

  function zero3({ settings, stages: [, , before, stage] }, replicas) {
    if (replicas === 1) return NOTHING;
    const { every, again, shards } = model.sharing({ ...settings, zero: 3 });
    const when = again ? "for each microbatch's forward and again for its backward" : every ? "for each microbatch's forward, and stay until its backward" : "once a step, and stay until the last backward, which reduces the gradients, as PyTorch has it with a pipeline";
    const cut = shards < replicas ? ` They are cut over ${tools.count(shards)} ranks and equal on ${tools.count(replicas / shards)} such groups, across which gradients are summed (hybrid sharding).` : "";
    return `Parameters are parts as well: ${bytes(stage.parts.parameters)} instead of ${bytes(before.parts.parameters)}, and ${bytes(stage.parts["gathered parameters"])} for layers that are gathered while they are used.${cut} They are gathered ${when}, so the peak-memory GPU sends ${sends(settings, stage)} a step. In all ${verdict(stage)}. PyTorch calls it ${cut ? "HSDP" : "FSDP"}.`;
  }

  function tensor({ settings, stages }) {
    const { tp } = settings;
    if (tp === 1) return "Here every GPU has whole layers (tp 1). With tp 2 two GPUs would each hold half the heads and half the MLP of every layer, and sum their results twice in each layer, forward and backward.";
    const { rank } = stages[settings.zero];
    const { heads } = facts.models[settings.model].dimensions;
    const place = TIERS[groups.tier(groups.group(settings, 0, "tp"))] ?? "across the network, which is slow for it";
    const split = settings.split ? " Norms and residuals are cut along the sequence (sequence parallelism), so their activations shrink, too." : "";
    return `${tp} GPUs share every layer: each has ${tools.count(heads / tp)} of ${tools.count(heads)} heads and 1/${tp} of the MLP. No GPU goes on before their parts are summed, so this axis has the most communication: the peak-memory GPU sends ${bytes(model.traffic(settings, rank).tp)} a step, ${place}.${split}`;
  }

  function pipeline({ settings, ranks, stages }) {
    const { pp } = settings;
    if (pp === 1) return "Here every GPU works on all layers (pp 1). With pp 2 the first half of the layers would be on one GPU and the second on another, which hands on activations only, but each waits for the other at the beginning and end of a step.";
    const counts = ranks.flat().map((stage) => stage.layers);
    const m = settings.microbatches;
    const { rank } = stages[settings.zero];
    const least = Math.min(...counts);
    const most = Math.max(...counts);
    const layerRange = `${least === most ? "" : `${least} to `}${most} layer${most > 1 ? "s" : ""}`;
    return `The ${counts.reduce((all, one) => all + one, 0)} layers lie on ${pp} GPUs one after the other${settings.chunks > 1 ? `, in ${counts.length} virtual stages` : ""}, ${layerRange} a stage. Only activations are handed on: the peak-memory GPU sends ${bytes(model.traffic(settings, rank).pp)} a step, which has ${tools.count(m)} microbatch${m > 1 ? "es" : ""}. ${bubbleWords(settings)}`;
  }

  explorer.onDraw((drawn) => {
    const words = { ddp, zero1, zero2, zero3, tensor, pipeline };
    for (const [name, write] of Object.entries(words)) document.getElementById(`explain-${name}`).textContent = write(drawn, drawn.settings.replicas);
    const { settings, stages } = drawn;
    const said = document.getElementById("explorer-verdict");
    const stage = stages[settings.zero];
    const { dp, microbatches: m } = settings;
    said.className = `fits ${stage.fits ? (facts.verdict_suffix ? "" : "yes") : "no"}`;
    said.querySelector("b").textContent = stage.fits ? `fits${facts.verdict_suffix}` : "does not fit";
    said.querySelector("span").textContent = `${bytes(stage.peak)} of ${bytes(facts.machine.capacity)} on the peak-memory GPU, of pipeline rank ${stage.rank}; tp ${settings.tp} × cp ${settings.cp} × pp ${settings.pp} × dp ${tools.count(dp)} (what is left), ${tools.count(m)} microbatch${m > 1 ? "es" : ""} a step on each replica`;
    said.querySelector("i").style.width = `${Math.min(100, (100 * stage.peak) / facts.machine.capacity)}%`;
  });
})();
