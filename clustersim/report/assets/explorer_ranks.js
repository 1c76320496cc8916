// Who holds what, and who talks to whom? Ranks on their nodes; the chosen one's share of the model, and its groups.
(async () => {
  "use strict";
  await clustersim.opened;
  const { explorer, tools } = clustersim;
  const { facts, model, groups } = explorer;
  const experts = clustersim.explorerExperts(explorer, tools);
  const MOST_NODES = 8;
  const COLUMNS = Math.min(8, facts.machine.per_node); // boxes side by side
  const MOST_STAGES = 64; // rows of the table of stages
  const TIERS = {
    gpu: "itself", nvlink: "NVLink", host: "the node's host", node: "the node", leaf: "leaf switches", spine: "spine switches",
    core: "core switches", network: "the network",
  };
  const grid = document.getElementById("explorer-ranks");
  const about = document.getElementById("explorer-rank");
  const talks = document.getElementById("explorer-talks");
  const stagesTable = document.getElementById("explorer-stages");
  const chosenInput = document.getElementById("explorer-chosen");
  let chosen = 0;

  const element = (tag, text, kind = "") => Object.assign(document.createElement(tag), { textContent: text, className: kind });

  // A row of a table; words are those cells that may break.
  function tableRow(name, cells) {
    const line = document.createElement("tr");
    line.append(element("th", name), ...cells.map((text) => element("td", text, "words")));
    return line;
  }

  // The ranks that hold the next and the previous stages.
  const pipelineNeighbours = (settings, rank) => [...new Set(["pp_previous", "pp_next"].flatMap((role) => groups.partners(settings, rank, role)))];

  // What each rank is to the chosen one, in words; the first that holds.
  function relations(settings, rank) {
    const relationOf = new Map();
    const note = (ranks, word) => ranks.forEach((partner) => relationOf.has(partner) || relationOf.set(partner, word));
    note([rank], "chosen");
    note(groups.group(settings, rank, "tp"), "tp");
    note(groups.group(settings, rank, "cp"), "cp");
    note(pipelineNeighbours(settings, rank), "pp");
    if (experts.there) ["etp", "ep"].forEach((role) => note(groups.group(settings, rank, role), role));
    note(groups.group(settings, rank, "dp"), "dp");
    if (experts.there) note(groups.group(settings, rank, "edp"), "edp");
    return relationOf;
  }

  // Nodes that are drawn: the first ones, and those of the chosen rank's groups; all if they are few.
  function nodesShown(settings, relationOf) {
    const { per_node: size } = facts.machine;
    const nodes = Math.ceil(settings.gpus / size);
    if (nodes <= MOST_NODES) return Array.from({ length: nodes }, (_, node) => node);
    const wanted = [chosen, ...[...relationOf.keys()].filter((rank) => relationOf.get(rank) !== "dp"), 0, size, ...relationOf.keys()];
    const unique = [...new Set(wanted.map((rank) => Math.floor(rank / size)))];
    return unique.slice(0, MOST_NODES).sort((one, other) => one - other);
  }

  function rankButton(settings, rank, word) {
    const at = groups.coordinates(settings, rank);
    const button = element("button", "", `rank stage${at.pp % 8} ${word ?? ""}`);
    const place = [`t${at.tp}`, ...(settings.cp > 1 ? [`c${at.cp}`] : []), `d${at.dp}`, ...(experts.there ? [`e${at.ep}`] : []), `p${at.pp}`].join(" ");
    button.type = "button";
    button.dataset.rank = rank;
    button.tabIndex = rank === chosen ? 0 : -1;
    button.setAttribute("aria-pressed", String(rank === chosen));
    button.setAttribute("aria-label", `rank ${rank}: tp ${at.tp}, cp ${at.cp}, dp ${at.dp}, pp ${at.pp}${experts.there ? `, ep ${at.ep}, etp ${at.etp}` : ""}${word ? `, ${word}` : ""}`);
    button.append(element("b", tools.count(rank)), element("small", place), element("i", word ?? ""));
    return button;
  }

  function drawGrid(settings, relationOf) {
    const { per_node: size } = facts.machine;
    const shown = nodesShown(settings, relationOf);
    const rows = [];
    shown.forEach((node, place) => {
      const skipped = node - (place ? shown[place - 1] + 1 : 0);
      if (skipped) rows.push(element("p", `… ${tools.count(skipped)} node${skipped > 1 ? "s" : ""} like these …`, "skipped"));
      const row = element("div", "", "node");
      const ranks = Array.from({ length: Math.min(size, settings.gpus - node * size) }, (_, gpu) => node * size + gpu);
      const boxes = element("div", "");
      boxes.style.setProperty("--columns", COLUMNS);
      boxes.append(...ranks.map((rank) => rankButton(settings, rank, relationOf.get(rank))));
      row.append(element("span", `node ${tools.count(node)}`), boxes);
      rows.push(row);
    });
    const after = Math.ceil(settings.gpus / size) - 1 - shown[shown.length - 1];
    if (after > 0) rows.push(element("p", `… ${tools.count(after)} more node${after > 1 ? "s" : ""} …`, "skipped"));
    grid.replaceChildren(...rows);
  }

  const parameters = (amount) => (amount >= 1e9 ? `${tools.number(amount / 1e9)} G` : `${tools.number(amount / 1e6)} M`);

  const span = (first, extent, word) => (extent === 1 ? `${word} ${tools.count(first)}` : `${word}s ${tools.count(first)} to ${tools.count(first + extent - 1)}`);

  // A part of a whole that is cut evenly: "columns 0 to 6,655 of 53,248".
  const part = (place, parts, whole, word) => (parts === 1 ? `all ${tools.count(whole)} ${word}s` : `${span((place * whole) / parts, whole / parts, word)} of ${tools.count(whole)}`);

  function holds(stages) {
    const names = stages.map((stage) => {
      const layers = stage.layers ? [span(stage.first, stage.layers, "layer")] : [];
      return [...(stage.embedding ? ["the embedding"] : []), ...layers, ...(stage.head ? ["final norm, logits and loss"] : [])].join(", ");
    });
    return names.length === 1 ? names[0] : names.map((name, chunk) => `chunk ${chunk}: ${name}`).join("; ");
  }

  function slices(settings, at) {
    const { heads, kv_heads: keys, ffn, shared: sharedFfn, vocab } = facts.models[settings.model].dimensions;
    const columns = [["MLP", ffn], ["shared experts", sharedFfn]].filter(([, wide]) => wide);
    const { tp } = settings;
    if (tp === 1) return `every weight of these layers${experts.there ? " but experts" : ""}, whole`;
    const shared = tp > keys ? `key and value head ${Math.floor((at.tp * keys) / tp)} of ${keys} (with ${tp / keys - 1} other rank${tp / keys > 2 ? "s" : ""})` : `key and value ${part(at.tp, tp, keys, "head")}`;
    return `attention: query ${part(at.tp, tp, heads, "head")}, ${shared}; ${columns.map(([name, wide]) => `${name}: ${part(at.tp, tp, wide, "column")}; `).join("")}embedding and logits: ${part(at.tp, tp, vocab, "row")}; norms whole`;
  }

  function samples(settings, at) {
    const sequences = settings.batch / settings.dp;
    const tokens = settings.cp > 1 ? `, of each ${tools.count(settings.sequence / settings.cp)} of ${tools.count(settings.sequence)} tokens: pieces ${at.cp} and ${2 * settings.cp - 1 - at.cp} of ${2 * settings.cp}` : "";
    const m = settings.microbatches;
    return `${tools.count(sequences)} of the ${tools.count(settings.batch)} sequences of a step, such as ${span(at.dp * sequences, sequences, "sequence")}, in ${tools.count(m)} microbatch${m > 1 ? "es" : ""} of ${settings.microbatch}${tokens}`;
  }

  // Which part of what is sharded over the ranks with the same weights is this rank's.
  function shard(settings, counts) {
    const { replicas } = settings;
    const { shards } = model.sharing(settings);
    const uses = ["optimizer state", "gradients", "parameters"];
    const [whole, own] = [0, settings.zero].map((zero) => model.residentOf({ ...settings, zero }));
    const share = (use) => own[use].reduce((least, held, group) => (whole[use][group] > 0 ? Math.min(least, held / whole[use][group]) : least), 1);
    const sharded = uses.filter((use) => share(use) < 1);
    const rest = uses.filter((use) => !sharded.includes(use)).reverse();
    const owners = replicas > 1 ? `all ${tools.count(replicas)} ranks with these weights do` : "no other rank has these weights";
    const held = `${new Intl.ListFormat("en-GB").format(rest)} whole, as ${owners}`;
    if (!sharded.length) return held;
    const place = tools.count(groups.group(settings, chosen, "dp").indexOf(chosen) % shards);
    const part = `part ${place} of ${tools.count(shards)}, ${tools.count(Math.round(share(sharded[0]) * counts.reduce((all, count, group) => all + (whole[sharded[0]][group] > 0 ? count : 0), 0)))} parameters`;
    return `${new Intl.ListFormat("en-GB").format(sharded)}: only ${part}${rest.length ? `; ${held}` : ", and gathers whole layers to use them"}`;
  }

  function drawAbout({ settings, ranks, stages: memory }) {
    const at = groups.coordinates(settings, chosen);
    const own = ranks[at.pp];
    const total = model.parametersOf(own);
    const { peak } = memory[settings.zero].ranks[at.pp];
    const lines = [
      ["place", `node ${tools.count(Math.floor(chosen / facts.machine.per_node))}; tp ${at.tp} of ${settings.tp}, cp ${at.cp} of ${settings.cp}, dp ${at.dp} of ${settings.dp}, pp ${at.pp} of ${settings.pp}${experts.there ? `; ep ${at.ep} of ${settings.ep}, etp ${at.etp} of ${settings.etp}, edp ${at.edp} of ${settings.edp}` : ""} (counted from 0)`],
      ["layers", holds(own)],
      ["slice of each weight", `${slices(settings, at)}. Together ${parameters(total)} parameters`],
      ...(experts.there ? [["experts", experts.holds(settings, chosen)]] : []),
      ["data", samples(settings, at)],
      [["DDP", "ZeRO 1", "ZeRO 2", "ZeRO 3"][settings.zero], shard(settings, model.parametersBy(own))],
      ["peak memory", `${tools.bytes(peak)} of ${tools.bytes(facts.machine.capacity)}`],
    ];
    about.replaceChildren(...lines.flatMap(([name, words]) => [element("dt", name), element("dd", words)]));
  }

  function listed(ranks) {
    if (ranks.length <= 4) return ranks.map(tools.count).join(", ");
    return `${ranks.slice(0, 3).map(tools.count).join(", ")} … ${tools.count(ranks[ranks.length - 1])}`;
  }

  const PURPOSE = {
    tp: (settings) => (settings.split ? "gathers inputs and scatters sums of each layer" : "sums the parts of each layer's results"),
    cp: () => "passes keys and values round a ring",
    dp: (settings) => {
      const { every, again, shards } = model.sharing(settings);
      const gathers = again ? "gathers each layer's parameters for each pass" : "gathers each layer's parameters";
      const scatters = `scatters ${every ? "gradients of each microbatch" : "gradients once a step"}`;
      const words = ["sums gradients once a step", `${scatters}, gathers new parameters`, `${scatters}, gathers new parameters`, `${gathers}, ${scatters}`][settings.zero];
      return shards > 1 && shards < settings.replicas ? `${words}, sums them across replicas` : words;
    },
    ep: () => "sends tokens to the ranks of their experts, and gets them back",
    etp: () => "gathers tokens for its parts of experts, and sums the parts' results",
    edp: () => "what dp does, of experts' gradients and parameters",
    pp: () => "hands activations on and gradients back",
    embedding: () => "sums the gradients of the embedding, which is the logits' matrix, too",
  };

  function drawTalks(settings) {
    const sent = model.traffic(settings, groups.coordinates(settings, chosen).pp);
    const others = (ranks) => ranks.filter((partner) => partner !== chosen);
    const rows = ["tp", "cp", "dp", ...(experts.there ? ["ep", "etp", "edp"] : [])].map((role) => [role, others(groups.group(settings, chosen, role))]);
    rows.push(["pp", pipelineNeighbours(settings, chosen)], ["embedding", sent.embedding ? groups.partners(settings, chosen, "embedding") : []]);
    const lines = rows.filter(([, ranks]) => ranks.length).map(([role, ranks]) => {
      const tier = groups.tier([chosen, ...ranks]);
      return tableRow(role, [`${tools.count(ranks.length)}: ${listed(ranks)}`, TIERS[tier] ?? tier, tools.bytes(sent[role]), PURPOSE[role](settings)]);
    });
    if (!lines.length) lines.push(tableRow("nobody: one GPU does it all", []));
    talks.replaceChildren(...lines);
  }

  function drawStages({ settings, ranks, stages: memory }) {
    const every = settings.gpus / settings.pp;
    const rows = memory[settings.zero].ranks.slice(0, MOST_STAGES).map(({ peak }, rank) => {
      const fits = peak <= facts.machine.capacity ? "fits" : "does not fit";
      return tableRow(`pp ${rank}`, [tools.count(every), holds(ranks[rank]), parameters(model.parametersOf(ranks[rank])), tools.bytes(peak), fits]);
    });
    if (settings.pp > MOST_STAGES) rows.push(tableRow(`… ${settings.pp - MOST_STAGES} more …`, []));
    stagesTable.replaceChildren(...rows);
  }

  function draw(drawn) {
    const { settings } = drawn;
    chosen = Math.min(chosen, settings.gpus - 1);
    chosenInput.max = settings.gpus - 1;
    chosenInput.value = chosen;
    drawGrid(settings, relations(settings, chosen));
    drawAbout(drawn);
    drawTalks(settings);
    drawStages(drawn);
    experts.draw(settings, chosen);
  }

  function choose(rank, focus) {
    const drawn = explorer.drawn();
    const there = Number.isInteger(rank) && rank >= 0 && rank < drawn.settings.gpus;
    chosenInput.setCustomValidity(there ? "" : `There are ranks 0 to ${drawn.settings.gpus - 1}.`);
    chosenInput.reportValidity();
    if (!there) return;
    chosen = rank;
    draw(drawn);
    if (focus) grid.querySelector(`[data-rank="${rank}"]`)?.focus();
  }

  // Arrow keys go to the neighbours on the drawing.
  function moved({ key }) {
    const buttons = [...grid.querySelectorAll("button")];
    const place = buttons.findIndex((button) => Number(button.dataset.rank) === chosen);
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: COLUMNS, ArrowUp: -COLUMNS }[key];
    return step === undefined ? undefined : buttons[place + step];
  }

  grid.addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    if (button) choose(Number(button.dataset.rank), true);
  });
  grid.addEventListener("keydown", (event) => {
    const button = moved(event);
    if (!button) return;
    event.preventDefault();
    choose(Number(button.dataset.rank), true);
  });
  chosenInput.addEventListener("change", () => choose(Number(chosenInput.value), false));

  explorer.onDraw(draw);
})();
