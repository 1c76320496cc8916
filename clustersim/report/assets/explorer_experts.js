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
    const many = mixture(settings) / settings.ep;
    const first = at.ep * many;
    const which = many === 1 ? `expert ${tools.count(first)}` : `experts ${tools.count(first)} to ${tools.count(first + many - 1)}`;
    const part = settings.etp > 1 ? `, part ${at.etp} of ${settings.etp} of each (${tools.count(facts.models[settings.model].dimensions.expert_ffn / settings.etp)} columns)` : "";
    const same = settings.edp > 1 ? `; ${tools.count(settings.edp)} ranks have the same` : "; no other rank has them";
    return `${which} of the ${tools.count(mixture(settings))} of each layer that has some${part}${same}`;
  }

  // Members of the group that has parts of all experts, by where they are: {where, members: [rank, place]}.
  function places(ranks) {
    const found = new Map();
    ranks.forEach((rank, place) => found.set(unit[rank], [...(found.get(unit[rank]) ?? []), [rank, place]]));
    return [...found].map(([where, members]) => ({ where, members }));
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
    const there = members.filter(([each, place]) => each !== rank && (all || place % etp === own % etp));
    return sum(there.map(([, place]) => ranks[Math.floor(place / etp)])) * settings.sent;
  }

  // Bytes that a rank sends in one dispatch to each domain, its own first.
  function dispatch(settings, rank) {
    if (!model.sends(settings)) return [];
    const ranks = groups.group(settings, rank, "etp_ep");
    const own = ranks.indexOf(rank);
    const found = places(ranks).map((each) => ({ ...each, bytes: sent(settings, rank, own, each) }));
    return found.sort((one, other) => (other.where === unit[rank]) - (one.where === unit[rank]));
  }

  function words(settings, rank, found) {
    if (!found.length) return "Every rank has all experts (ep 1, etp 1): its tokens stay where they are.";
    const { ranks, nodes, all } = model.sends(settings);
    const tokens = `${tools.count(settings.sent)} tokens, each for ${facts.models[settings.model].dimensions.top_k} experts`;
    const own = groups.coordinates(settings, rank).ep;
    const each = ranks.filter((_, place) => place !== own).map((value) => value * settings.sent);
    const to = each.length ? `each of the ${each.length} other places along ep gets ${tools.bytes(sum(each) / each.length)}${all && settings.etp > 1 ? ", on all ranks that have a part of its experts" : ""}` : "no other rank has other experts";
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
    const found = dispatch(settings, rank);
    const most = Math.max(0, ...found.map(({ bytes }) => bytes ?? 0));
    const bars = found.slice(0, MOST).map((each) => bar(each, rank, most));
    const more = found.length > MOST ? [element("p", `… ${tools.count(found.length - MOST)} more …`, "skipped")] : [];
    card.replaceChildren(element("p", words(settings, rank, found)), ...bars, ...more);
  }

  return { there: Boolean(card), holds, dispatch, draw };
};
