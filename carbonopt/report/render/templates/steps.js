// Steps: the answers are a step function of one number.
(function () {
  if (!content.steps) return;
  const [field, range, reset, answer] =
    ["number", "range", "reset", "answer"].map((name) => document.getElementById(`step-${name}`));
  const [label, text] = answer.children;
  const { steps, own, lowest, highest, rising, refusal } = content.steps;

  function stepOf(value) {
    const beyond = (one) => one.begins === null || (rising ? one.begins < value : one.begins > value);
    return steps.findLastIndex((one) => one.begins === value || (beyond(one) && !one.alone));
  }

  function show(value, shown, at) {
    const step = steps[at];
    range.value = at;
    range.setAttribute("aria-valuetext", step.label);
    label.textContent = step.label;
    text.textContent = step.text;
    field.setCustomValidity("");
    if (interactive) interactive.step(value, shown, step);
    for (const filter of stepFilters) filter(value, shown);
  }

  field.addEventListener("input", function () {
    const value = field.valueAsNumber;
    const inside = (lowest === null || value >= lowest) && (highest === null || value <= highest);
    if (inside && !Number.isNaN(value)) return show(value, field.value, stepOf(value));
    field.setCustomValidity(refusal);
    label.textContent = "";
    text.textContent = refusal;
  });
  range.addEventListener("input", function () {
    const at = Number(range.value);
    field.value = steps[at].number;
    show(field.valueAsNumber, field.value, at);
  });
  reset.addEventListener("click", function () {
    field.value = own;
    show(own, field.value, stepOf(own));
  });
})();
