// Which experts has a rank, and how much does it send to whom in one dispatch? Look-ups and sums of what Python says.
clustersim.explorerExperts = (explorer, tools) => {
  "use strict";
  const { facts, model, groups } = explorer;
  const MOST = 16; // bars
  const card = document.getElementById("explorer-dispatch");
  const [level, unit] = facts.machine.levels[0];
  const WHERE = { nvlink: "NVLink domain", host: "node" }[level] ?? level;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const element = (tag, text, kind = "") => Object.assign(document.createElement(tag), { textContent: text, className: kind });
  const mixture = (settings) => facts.models[settings.model].dimensions.experts;

  // A rank's experts in words.
  function holds(settings, rank) {
    const at = groups.coordinates(settings, rank);
    const expertCount = mixture(settings) / settings.ep;
    const first = at.ep * expertCount;
    const which = expertCount === 1 ? `expert ${tools.count(first)}` : `experts ${tools.count(first)} to ${tools.count(first + expertCount - 1)}`;
    const part = settings.etp > 1 ? `, part ${at.etp} of ${settings.etp} of each (${tools.count(facts.models[settings.model].dimensions.expert_ffn / settings.etp)} columns)` : "";
    const same = settings.edp > 1 ? `; ${tools.count(settings.edp)} ranks have the same` : "; no other rank has them";
    return `${which} of the ${tools.count(mixture(settings))} of each layer that has some${part}${same}`;
  }

  // Members of the group that has parts of all experts, by where they are: {where, members: [rank, place]}.
  function places(ranks) {
    const byUnit = new Map();
    ranks.forEach((rank, place) => byUnit.set(unit[rank], [...(byUnit.get(unit[rank]) ?? []), [rank, place]]));
    return [...byUnit].map(([where, members]) => ({ where, members }));
  }

  // Bytes to the ranks of one domain; null where the tables say nothing of so uneven a part.
  function sent(settings, rank, own, { where, members }) {
    const { ranks, all, nodes } = model.sends(settings);
    const { etp } = settings;
    if (nodes && where !== unit[rank]) {
      const width = members.length / etp;
      const block = Math.floor(members[0][1] / etp) / width;
      return Number.isInteger(block) && nodes[width] ? nodes[width][block] * settings.sent : null;
    }
    const there = members.filter(([member, place]) => member !== rank && (all || place % etp === own % etp));
    return sum(there.map(([, place]) => ranks[Math.floor(place / etp)])) * settings.sent;
  }

  // Bytes that a rank sends in one dispatch to each domain, its own first.
  function dispatch(settings, rank) {
    if (!model.sends(settings)) return [];
    const ranks = groups.group(settings, rank, "etp_ep");
    const own = ranks.indexOf(rank);
    const destinations = places(ranks).map((destination) => ({ ...destination, bytes: sent(settings, rank, own, destination) }));
    return destinations.sort((one, other) => (other.where === unit[rank]) - (one.where === unit[rank]));
  }

  function words(settings, rank, destinations) {
    if (!destinations.length) return "Every rank has all experts (ep 1, etp 1): its tokens stay where they are.";
    const { ranks, nodes, all } = model.sends(settings);
    const tokens = `${tools.count(settings.sent)} tokens, each for ${facts.models[settings.model].dimensions.top_k} experts`;
    const own = groups.coordinates(settings, rank).ep;
    const payloads = ranks.filter((_, place) => place !== own).map((value) => value * settings.sent);
    const to = payloads.length ? `each of the ${payloads.length} other places along ep gets ${tools.bytes(sum(payloads) / payloads.length)}${all && settings.etp > 1 ? ", on all ranks that have a part of its experts" : ""}` : "no other rank has other experts";
    const way = nodes ? `A token crosses the network once to each ${WHERE} that has one of its experts, and is passed on there.` : all ? "All ranks get all tokens." : "A row goes straight to each of a token's experts.";
    return `In one dispatch of a layer and a microbatch rank ${tools.count(rank)} sends rows of ${tokens}: ${to}. ${way} Choices are even. They come back in combine, and backward does both again.`;
  }

  function bar({ where, members, bytes }, rank, most) {
    const line = element("div", "", "sent");
    const name = `${WHERE} ${tools.count(where)}${where === unit[rank] ? ", its own" : ""}: ${members.length} rank${members.length > 1 ? "s" : ""}`;
    const track = element("div", "", "track");
    track.append(element("i", ""));
    track.firstChild.style.width = `${most > 0 ? (100 * (bytes ?? 0)) / most : 0}%`;
    line.append(element("span", name), track, element("b", bytes === null ? "not told for so uneven a part" : tools.bytes(bytes)));
    return line;
  }

  function draw(settings, rank) {
    if (!card) return;
    const destinations = dispatch(settings, rank);
    const most = Math.max(0, ...destinations.map(({ bytes }) => bytes ?? 0));
    const bars = destinations.slice(0, MOST).map((destination) => bar(destination, rank, most));
    const more = destinations.length > MOST ? [element("p", `… ${tools.count(destinations.length - MOST)} more …`, "skipped")] : [];
    card.replaceChildren(element("p", words(settings, rank, destinations)), ...bars, ...more);
  }

  return { there: Boolean(card), holds, dispatch, draw };
};
