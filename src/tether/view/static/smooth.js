// Series of numbers made calmer: an exponential mean of one, the mean and band of several seeds.

// Each value is a mean of those before it, which weigh less the older they are; corrected for the
// missing past, so the first value is itself. Gaps stay gaps.
export function smooth(values, weight) {
  if (!weight) return values;
  let [sum, mass] = [0, 0];
  return values.map((value) => {
    if (typeof value !== "number") return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}

// Mean, lowest and highest of several series at each iteration that any of them has.
export function fold(series) {
  const at = new Map();
  for (const { x, y } of series) {
    x.forEach((iteration, i) => {
      if (typeof y[i] !== "number") return;
      if (!at.has(iteration)) at.set(iteration, []);
      at.get(iteration).push(y[i]);
    });
  }
  const x = [...at.keys()].sort((a, b) => a - b);
  const of = (summary) => x.map((iteration) => summary(at.get(iteration)));
  return {
    x,
    mean: of((all) => all.reduce((a, b) => a + b, 0) / all.length),
    low: of((all) => Math.min(...all)),
    high: of((all) => Math.max(...all)),
  };
}

export function meanOf(values) {
  const known = values.filter((value) => typeof value === "number");
  return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
}
