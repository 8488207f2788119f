// Another target: the answers are a step function of it, made by the same code as `carbonopt recommend --target`.
(function () {
  const [field, range, reset, answer] =
    ["number", "range", "reset", "answer"].map((name) => document.getElementById(`target-${name}`));
  const [label, text] = answer.children;
  const { answers, study_target: own } = content;

  function stepOf(target) {
    return answers.findLastIndex((one) => one.from === target || (one.from < target && !one.alone));
  }

  function show(target, shown, step) {
    const found = answers[step];
    range.value = step;
    range.setAttribute("aria-valuetext", found.label);
    label.textContent = found.label;
    text.textContent = found.text;
    field.setCustomValidity("");
    if (pareto) pareto.target(target, shown, found);
    if (trialFilter) trialFilter.target(target, shown);
  }

  field.addEventListener("input", function () {
    const target = field.valueAsNumber;
    if (target >= 1) return show(target, field.value, stepOf(target));
    field.setCustomValidity("1 or more");
    label.textContent = "";
    text.textContent = "A perplexity is 1 or more.";
  });
  range.addEventListener("input", function () {
    const step = Number(range.value);
    field.value = answers[step].number;
    show(field.valueAsNumber, field.value, step);
  });
  reset.addEventListener("click", function () {
    field.value = own;
    show(own, field.value, stepOf(own));
  });
})();
