// Steps: the answers are a step function of one number.
function stepControl(content) {
  const [field, range, reset, answer] =
    ["number", "range", "reset", "answer"].map((name) => document.getElementById(`step-${name}`));
  const [label, text] = answer.children;
  let isOwn = true; // until the reader chooses another number

  function stepOf(value) {
    const { steps, rising } = content;
    const beyond = (one) => one.begins === null || (rising ? one.begins < value : one.begins > value);
    return steps.findLastIndex((one) => one.begins === value || (beyond(one) && !one.alone));
  }

  function show(value, shown, at) {
    const step = content.steps[at];
    range.value = at;
    range.setAttribute("aria-valuetext", step.label);
    label.textContent = step.label;
    text.textContent = step.text;
    field.setCustomValidity("");
    if (interactive) interactive.step(value, shown, step);
    for (const filter of rowFilters) filter.step(value, shown);
  }

  function showField() {
    const { lowest, highest, refusal } = content;
    const value = field.valueAsNumber;
    const inside = (lowest === null || value >= lowest) && (highest === null || value <= highest);
    if (inside && !Number.isNaN(value)) return show(value, field.value, stepOf(value));
    field.setCustomValidity(refusal);
    label.textContent = "";
    text.textContent = refusal;
  }

  function showOwn() {
    isOwn = true;
    field.value = content.own;
    show(content.own, field.value, stepOf(content.own));
  }

  field.addEventListener("input", function () {
    isOwn = false;
    showField();
  });
  range.addEventListener("input", function () {
    isOwn = false;
    const at = Number(range.value);
    field.value = content.steps[at].number;
    show(field.valueAsNumber, field.value, at);
  });
  reset.addEventListener("click", showOwn);
  return {
    element: field,
    // Shows other steps, at the number that the reader has chosen.
    update(next) {
      content = next;
      range.max = content.steps.length - 1;
      if (isOwn) showOwn();
      else showField();
    },
  };
}
