// Who communicates with whom, and over which tier? Ranks are numbered along the order of axes, the first one fastest.
clustersim.explorerGroups = (facts) => {
  "use strict";
  const { tables, machine } = facts;
  const sum = (values) => values.reduce((total, value) => total + value, 0);

  // Of each axis of a mesh the step from one rank to the next, and the degree.
  function strides(settings, order) {
    let step = 1;
    return Object.fromEntries(order.map((axis) => [axis, [step, (step *= settings[axis], settings[axis])]]));
  }

  function along(settings, rank, order) {
    const steps = Object.entries(strides(settings, order));
    return Object.fromEntries(steps.map(([axis, [step, degree]]) => [axis, Math.floor(rank / step) % degree]));
  }

  // A rank's places along all axes.
  const coordinates = (settings, rank) => Object.assign({}, ...tables.orders.map((order) => along(settings, rank, order)));

  const rankAt = (settings, place, order = tables.orders[0]) => sum(Object.entries(strides(settings, order)).map(([axis, [step]]) => place[axis] * step));

  // The members of a rank's group of a role, in ascending order, the rank itself among them.
  function group(settings, rank, role) {
    const place = coordinates(settings, rank);
    const spread = (places, axis) => Array.from({ length: settings[axis] }, (_, at) => places.map((partial) => ({ ...partial, [axis]: at }))).flat();
    const axes = tables.roles[role];
    const order = tables.orders.find((candidate) => axes.every((axis) => candidate.includes(axis)));
    return axes.reduce(spread, [place]).map((partial) => rankAt(settings, partial, order)).sort((one, other) => one - other);
  }

  // The ranks of other pipeline ranks with which a rank talks in a role.
  function partners(settings, rank, role) {
    const place = coordinates(settings, rank);
    const stages = tables.partners.values[settings.pp][settings.chunks][role]?.[place.pp] ?? [];
    return stages.map((pp) => rankAt(settings, { ...place, pp }));
  }

  // The first tier in one of whose units all ranks are.
  function tier(ranks) {
    if (ranks.length < 2) return "gpu";
    const level = machine.levels.find(([, unit]) => ranks.every((rank) => unit[rank] === unit[ranks[0]]));
    return level ? level[0] : machine.top;
  }

  return { coordinates, group, partners, tier };
};
