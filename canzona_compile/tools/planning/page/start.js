// Reads the figures and puts everything in place.

const data = JSON.parse(byId("forecast").textContent);
readColours();
for (const section of [headline, comparison, memory, templates, groups, matrices, rates, closing]) section(data);
const timeline = new Timeline(data);
const chart = new Chart(data);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  readColours();
  timeline.draw();
  chart.draw();
});
addEventListener("scroll", () => tip.hide(), { passive: true });
