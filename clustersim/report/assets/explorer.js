// The state of the explorer page: what its controls say, what was last legal, and who must draw it anew.
//
// `chosen` are the controls' present values; `drawn` the last legal ones, with all that follows from them. Both are in
// the address (what differs from the scenario), so that an address shares a state. `clustersim.opened` is the promise of
// it: what the page knows is unpacked first.
clustersim.opened = (async () => {
  "use strict";
  const packed = JSON.parse(document.getElementById("explorer-facts").textContent);
  const facts = JSON.parse(new TextDecoder().decode(await clustersim.unpacked(packed)));
  const model = clustersim.explorerModel(facts);
  const groups = clustersim.explorerGroups(facts);
  const { start } = facts;
  const controls = new Map([...document.querySelectorAll("[data-key]")].map((control) => [control.dataset.key, control]));
  const names = { model: facts.models.map((model) => model.name), precision: facts.formats };
  const drawers = [];
  let chosen = { ...start };
  let drawn = null;

  const valuesOf = (control) => JSON.parse(control.dataset.values);

  // The value of a control, of the kind that the scenario's has.
  function read(key) {
    const control = controls.get(key);
    if (control.type === "checkbox") return control.checked;
    const value = control.type === "range" ? valuesOf(control)[control.value] : control.value;
    return typeof start[key] === "number" ? Number(value) : value;
  }

  function show(key) {
    const control = controls.get(key);
    const value = chosen[key];
    if (control.type === "checkbox") control.checked = value;
    else control.value = control.type === "range" ? valuesOf(control).indexOf(value) : String(value);
    const output = document.querySelector(`output[for="${control.id}"]`);
    if (!output) return;
    output.textContent = clustersim.tools.count(value);
    control.setAttribute("aria-valuetext", output.textContent);
  }

  // From the address: `#tp=4&model=llama3-8b`; what it says of no control, or with no legal value, is passed over.
  function fromAddress() {
    const chosen = { ...start };
    for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
      const control = controls.get(key);
      if (!control) continue;
      const place = names[key]?.indexOf(text) ?? -1;
      const value = names[key] ? place : typeof start[key] === "number" ? Number(text) : text;
      if (control.type === "checkbox") chosen[key] = text === "yes";
      else if (valuesOf(control).includes(value)) chosen[key] = value;
    }
    return chosen;
  }

  function toAddress() {
    const changed = Object.keys(start).filter((key) => chosen[key] !== start[key]);
    const word = (key) => (names[key] ? names[key][chosen[key]] : { true: "yes", false: "no" }[chosen[key]] ?? chosen[key]);
    const text = new URLSearchParams(changed.map((key) => [key, word(key)])).toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  }

  // Controls that mean nothing for the present choice say so by being switched off.
  function quieten(settings) {
    controls.get("chunks").disabled = settings.chunks === 1;
    controls.get("split").disabled = settings.tp === 1;
  }

  function update() {
    for (const key of controls.keys()) show(key);
    const settings = model.settled(chosen);
    quieten(settings);
    const problems = model.problems(settings);
    if (!problems.length) drawn = { chosen, settings, ranks: model.stagesOf(settings), stages: model.memory(settings) };
    document.body.classList.toggle("stale", problems.length > 0);
    const said = document.getElementById("explorer-problems");
    said.hidden = !problems.length;
    said.replaceChildren(...problems.map((problem) => Object.assign(document.createElement("li"), { textContent: problem })));
    if (!drawn || problems.length) return;
    drawers.forEach((draw) => draw(drawn));
  }

  function set(changes) {
    chosen = { ...chosen, ...changes };
    toAddress();
    update();
  }

  function begin() {
    for (const [key, control] of controls) control.addEventListener("input", () => set({ [key]: read(key) }));
    document.getElementById("explorer-reset").addEventListener("click", () => set(start));
    addEventListener("hashchange", () => {
      chosen = fromAddress();
      update();
    });
    update(); // the scenario, which is legal, so that there is always something drawn
    chosen = fromAddress();
    update();
  }

  // Ask for a drawing, now and whenever something legal is chosen.
  function onDraw(draw) {
    drawers.push(draw);
    if (drawn) draw(drawn);
  }

  // The bubble in sentences: the schedule's own, and where the scenario itself is shown, what its simulation says.
  function bubbleWords(settings) {
    const share = (part) => `${(100 * part).toFixed(1)} % of the step`;
    const alone = `The schedule by itself, with equal stages and messages that take no time, has a bubble of ${share(model.bubble(settings))}.`;
    const itself = facts.simulated_bubble !== null && Object.keys(start).every((key) => chosen[key] === start[key]);
    return itself ? `${alone} The scenario, simulated with its real stages and messages, has ${share(facts.simulated_bubble)}, as clustersim run says.` : alone;
  }

  begin();
  clustersim.explorer = { facts, model, groups, set, onDraw, bubbleWords, drawn: () => drawn };
})();
