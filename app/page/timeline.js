// Draws the timeline of a request: its stages as a waterfall, and how long each token let its reader wait.

const SLOW = 2;
const ENGINE = /^(prefill|decode)/;

export function drawTimeline(place, request) {
  place.replaceChildren(...request.answers.flatMap(drawAnswer));
}

function drawAnswer(answer) {
  const end = Math.max(answer.total_ms ?? 0, ...answer.stages.map((stage) => stage.end_ms), 0.001);
  const facts = [
    `${answer.model}: ${answer.prompt_tokens} tokens in (${answer.cached_tokens} cached), ${answer.completion_tokens} out`,
    `TTFT ${ms(answer.ttft_ms)}, TPOT ${ms(answer.tpot_ms)}, outcome: ${answer.outcome}`,
    ...(answer.num_attempts > 1 ? [`resumed on another replica ${answer.num_attempts - 1} time(s)`] : []),
    `request ${answer.id}`,
  ];
  return [
    ...facts.map((fact) => node("p", { className: "facts", textContent: fact })),
    ...answer.stages.map((stage) => drawStage(stage, end)),
    drawArrivals(answer.arrivals),
  ];
}

function drawStage(stage, end) {
  const kind = stage.name === "queue" ? "queue" : ENGINE.test(stage.name) ? "engine" : "";
  const bar = node("div", { className: `bar ${kind}` });
  bar.style.left = `${(100 * stage.start_ms) / end}%`;
  bar.style.width = `${(100 * (stage.end_ms - stage.start_ms)) / end}%`;
  const track = node("div", { className: "track" });
  track.append(bar);
  const row = node("div", { className: "stage" });
  row.append(
    node("span", { textContent: stage.name }),
    track,
    node("span", { textContent: ms(stage.end_ms - stage.start_ms) }),
  );
  return row;
}

// One bar for each arrival: the time since the one before, over the tokens that it brought.
function drawArrivals(arrivals) {
  const gaps = arrivals.slice(1).map(([at, count], index) => (at - arrivals[index][0]) / count);
  if (!gaps.length) return node("p", { className: "quiet", textContent: "" });
  const highest = Math.max(...gaps);
  const typical = [...gaps].sort((a, b) => a - b)[Math.floor(gaps.length / 2)];
  const svg = svgNode("svg", { viewBox: `0 0 ${gaps.length} 100`, preserveAspectRatio: "none", role: "img" });
  svg.append(Object.assign(svgNode("title", {}), { textContent: `time between tokens, up to ${ms(highest)}` }));
  gaps.forEach((gap, index) => {
    const height = Math.max(1, (100 * gap) / highest);
    const bar = svgNode("rect", { x: index, y: 100 - height, width: 0.85, height });
    if (gap > SLOW * typical) bar.setAttribute("class", "slow");
    bar.append(Object.assign(svgNode("title", {}), { textContent: `token ${index + 2}: ${ms(gap)}` }));
    svg.append(bar);
  });
  const box = node("div", {});
  box.append(svg, node("p", { className: "quiet", textContent: `time between tokens: typical ${ms(typical)}, longest ${ms(highest)}` }));
  return box;
}

function ms(value) {
  if (value === null || value === undefined) return "–";
  return value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 2 : 0)} ms`;
}

const node = (name, fields) => Object.assign(document.createElement(name), fields);

function svgNode(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
