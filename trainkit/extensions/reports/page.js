// The script of all pages: draws charts in the system's scheme, and hints at tables that scroll.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 520px)");
  const medium = matchMedia("(max-width: 960px)");
  const config = {
    displaylogo: false,
    responsive: true,
    modeBarButtonsToRemove: ["select2d", "lasso2d"],
  };

  // Names beside an axis without the parts that all of them begin with, and without their middles:
  // long ones leave no room for the chart.
  function shortNames(names) {
    const parts = names.map((name) => String(name).split("."));
    let common = 0;
    const most = Math.min(...parts.map((own) => own.length)) - 1;
    while (common < most && parts.every((own) => own[common] === parts[0][common])) common += 1;
    return parts.map((own) => {
      const rest = own.slice(common).join(".");
      return rest.length > 20 ? `${rest.slice(0, 10)}…${rest.slice(-9)}` : rest;
    });
  }

  function shortenAxis(figure) {
    const bars = figure.data.filter((trace) => trace.orientation === "h");
    const names = [...new Set(bars.flatMap((trace) => trace.y))];
    if (names.length < 2) return;
    const shown = shortNames(names);
    if (new Set(shown).size < names.length) return;
    figure.layout.yaxis = { ...figure.layout.yaxis, tickvals: names, ticktext: shown };
  }

  // The chart grows by the lines that its legend has more than on a wide page.
  function growByLegend(figure, width) {
    const labels = figure.data.filter((t) => t.name && t.visible !== false).map((t) => t.name);
    const longest = Math.max(0, ...labels.map((label) => label.length));
    const columns = Math.max(1, Math.floor(width / (6.5 * longest + 50)));
    figure.layout.height += 18 * (Math.ceil(labels.length / columns) - 1);
  }

  function fitted(figure, width) {
    if (medium.matches) shortenAxis(figure);
    if (!narrow.matches) return figure;
    figure.layout.font = { ...figure.layout.font, size: 11 };
    figure.layout.legend = { ...figure.layout.legend, xref: "container" };
    for (const trace of figure.data) if (trace.type === "heatmap") trace.showscale = false;
    growByLegend(figure, width);
    return figure;
  }

  function draw(chart) {
    const text = chart.querySelector("script").textContent;
    const colored = text.replace(/"#[0-9a-f]{6}"/g, (quoted) => {
      const color = quoted.slice(1, -1);
      return `"${(dark.matches && DARK[color]) || color}"`;
    });
    const plot = chart.querySelector(".plot");
    const { data, layout } = fitted(JSON.parse(colored), plot.clientWidth);
    plot.style.height = `${layout.height}px`;
    Plotly.react(plot, data, layout, config);
  }

  function drawAll() {
    document.querySelectorAll(".chart").forEach(draw);
  }

  function hint(scroll) {
    const left = scroll.scrollWidth - scroll.clientWidth - scroll.scrollLeft;
    scroll.parentElement.classList.toggle("more", left > 2);
  }

  drawAll();
  dark.addEventListener("change", drawAll);
  narrow.addEventListener("change", drawAll);
  medium.addEventListener("change", drawAll);
  const sizes = new ResizeObserver((seen) => seen.forEach((entry) => hint(entry.target)));
  for (const scroll of document.querySelectorAll(".scroll")) {
    sizes.observe(scroll);
    scroll.addEventListener("scroll", () => hint(scroll), { passive: true });
  }
})();
