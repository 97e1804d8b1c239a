"use strict";
// Draws the charts that the page carries as data; colours by role, so that a change of theme is a redraw.
const DATA = JSON.parse(document.getElementById("data").textContent);

// Okabe and Ito's colours, darker on light and lighter on dark ground.
const THEMES = {
  light: {
    ink: "#16202c", soft: "#5a6675", line: "#e6e9ed", mark: "#7b8794", card: "#ffffff",
    policy: ["#0072b2", "#d55e00", "#009e73", "#cc6699", "#c98a00", "#3aa0dc", "#6b7280"],
    kind: { reuse: "#8fd4b5", local: "#3fa7a0", pool: "#3b6fb6", remote: "#d0643b" },
  },
  dark: {
    ink: "#e6ebf0", soft: "#9aa7b4", line: "#27313b", mark: "#8794a1", card: "#171e26",
    policy: ["#4fa8e0", "#f0803c", "#2fc598", "#e39ac0", "#e8b53c", "#8fd3ff", "#a3adb8"],
    kind: { reuse: "#9fe0c3", local: "#48b5ad", pool: "#5b8fd9", remote: "#e8835c" },
  },
};
const DASHES = ["solid", "dash", "dot", "dashdot"];
const CONFIG = { responsive: true, displayModeBar: false };
const darkMedia = window.matchMedia("(prefers-color-scheme: dark)");
let theme = THEMES.light;
let run = 0;

function colour(role) {
  const [family, name] = role.split("-");
  return theme[family][name];
}

function rgba(hex, alpha) {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

// Several parts per bar, rather than one bar per series.
function isStacked(chart) {
  return chart.series.some((series) => series.x.length > 1);
}

function trace(chart, series) {
  const c = colour(series.colour);
  const unit = (axis) => (axis.percent ? ".1%" : ".4~g");
  const hover = `%{x:${unit(chart.x)}}, %{y:${unit(chart.y)}}<extra>${series.name}</extra>`;
  const base = { name: series.name, x: series.x, y: series.y, hovertemplate: hover };
  if (chart.kind === "bar") {
    const stacked = isStacked(chart);
    const form = chart.x.percent ? (v) => `${(100 * v).toFixed(0)} %` : (v) => (v >= 100 ? v.toFixed(0) : v.toPrecision(3));
    const cut = chart.x.high != null && series.y.some((v) => v > chart.x.high);
    return {
      type: "bar", orientation: "h", name: series.name, x: series.y, y: series.x, marker: { color: c },
      // A cut bar ends at the edge, so its figure must stand before that.
      ...(cut ? { x: series.y.map((v) => Math.min(v, chart.x.high)), customdata: series.y } : { customdata: series.y }),
      text: series.y.map((v) => (v == null || (stacked && v < 0.05) ? "" : cut ? `${form(v)} ▸` : form(v))),
      textposition: stacked || cut ? "inside" : "outside", insidetextanchor: cut ? "end" : "middle", textangle: 0,
      hovertemplate: `%{y}: %{customdata:${unit(chart.x)}}<extra>${stacked ? series.name : ""}</extra>`, cliponaxis: false,
    };
  }
  if (chart.kind === "area") {
    return { ...base, type: "scatter", mode: "lines", stackgroup: "all", line: { width: 0, color: c }, fillcolor: rgba(c, 0.92) };
  }
  if (chart.kind === "point") {
    return { ...base, type: "scatter", mode: "markers", marker: { color: rgba(c, 0.45), size: 5 } };
  }
  return { ...base, type: "scatter", mode: "lines", line: { color: c, width: 2.2, dash: DASHES[series.dash || 0] } };
}

// 1, 2, 5 of each decade, or whole decades where there are many.
function logTicks(values) {
  const known = values.filter((v) => v > 0);
  if (!known.length) return {};
  const [low, high] = [Math.log10(Math.min(...known)), Math.log10(Math.max(...known))];
  const steps = high - low > 3.5 ? [1] : high - low > 1.2 ? [1, 2, 5] : [1, 2, 3, 5, 7];
  const tickvals = [];
  for (let decade = Math.floor(low); decade <= Math.ceil(high); decade++) {
    for (const step of steps) tickvals.push(Number((step * 10 ** decade).toPrecision(3)));
  }
  return { tickangle: 0, tickmode: "array", tickvals, ticktext: tickvals.map(String) };
}

function axis(spec, values, extra) {
  const ticks = spec.log ? logTicks(values) : {};
  const bounds = spec.low != null && spec.high != null ? [spec.low, spec.high * 1.005] : undefined;
  return {
    title: { text: spec.label, font: { size: 13, color: theme.soft }, standoff: 8 },
    type: spec.log ? "log" : undefined, range: bounds, rangemode: spec.low === 0 && !bounds ? "tozero" : undefined,
    tickformat: spec.percent ? ".0%" : undefined, ...ticks,
    gridcolor: theme.line, linecolor: theme.mark, zeroline: false, automargin: true,
    tickfont: { size: 12, color: theme.soft }, minor: spec.log ? { showgrid: false } : undefined, ...extra,
  };
}

function shapes(chart) {
  const line = { color: theme.mark, width: 1.4, dash: "dot" };
  return (chart.marks || []).map((mark) => {
    if (mark.axis === "x") return { type: "line", x0: mark.at, x1: mark.at, yref: "paper", y0: 0, y1: 1, line };
    if (mark.axis === "y") return { type: "line", y0: mark.at, y1: mark.at, xref: "paper", x0: 0, x1: 1, line };
    const all = chart.series.flatMap((s) => [...s.x, ...s.y]).filter((v) => v > 0);
    const [low, high] = [Math.min(...all), Math.max(...all)];
    return { type: "line", x0: low, y0: low, x1: high, y1: high, line };
  });
}

function annotations(chart) {
  const bars = chart.kind === "bar";
  const text = { showarrow: false, font: { size: 12, color: theme.soft } };
  return (chart.marks || []).filter((mark) => mark.label).map((mark) => {
    // plotly wants the exponent where the axis is logarithmic.
    const at = mark.axis === "x" && chart.x.log ? Math.log10(mark.at) : mark.at;
    return mark.axis === "x"
      ? { ...text, text: mark.label, x: at, y: bars ? 1 : 0, yref: "paper", xanchor: "left",
          yanchor: bars ? "top" : "bottom", xshift: 4, bgcolor: rgba(theme.card, 0.75) }
      : { ...text, text: mark.label, y: at, x: 0, xref: "paper", xanchor: "left", yanchor: "bottom", xshift: 4 };
  });
}

function layout(chart) {
  const bars = chart.kind === "bar";
  const names = bars ? [...new Set(chart.series.flatMap((s) => s.x))] : [];
  const legend = !bars || isStacked(chart);
  return {
    font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", color: theme.ink },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 56, r: 18, t: legend ? 8 : 14, b: 48 },
    xaxis: axis(chart.x, chart.series.flatMap((s) => s.x)),
    yaxis: bars
      ? axis(chart.y, [], { autorange: "reversed", categoryorder: "array", categoryarray: names, gridcolor: "rgba(0,0,0,0)",
          tickfont: { size: 13, color: theme.ink } })
      : axis(chart.y, chart.series.flatMap((s) => s.y)),
    barmode: "stack", bargap: names.length < 4 ? 0.5 : 0.3, hovermode: bars || chart.kind === "point" ? "closest" : "x unified",
    hoverlabel: { bgcolor: theme.card, bordercolor: theme.line, font: { color: theme.ink, size: 12 } },
    showlegend: legend,
    legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", font: { size: 12 }, traceorder: "normal" },
    shapes: shapes(chart), annotations: annotations(chart),
  };
}

function draw(holder, charts) {
  const wanted = new Map(charts.map((chart) => [chart.key, chart]));
  for (const figure of holder.querySelectorAll("figure")) if (!wanted.has(figure.dataset.key)) figure.remove();
  // All frames first: a plot takes the width that its frame has among the others.
  const figures = charts.map((chart) => {
    const found = [...holder.children].find((node) => node.dataset.key === chart.key);
    const figure = found || document.createElement("figure");
    if (!found) {
      figure.className = "card chart";
      figure.dataset.key = chart.key;
      figure.innerHTML = '<h3></h3><figcaption></figcaption><div class="plot"></div>';
    }
    holder.append(figure);
    return figure;
  });
  charts.forEach((chart, index) => {
    const figure = figures[index];
    figure.querySelector("h3").textContent = chart.title;
    figure.querySelector("figcaption").textContent = chart.caption;
    const plot = figure.querySelector(".plot");
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `${chart.title}. ${chart.caption}`);
    Plotly.react(plot, chart.series.map((series) => trace(chart, series)), layout(chart), CONFIG);
  });
}

function cell(row, text, kind) {
  const node = row.insertCell();
  node.textContent = text ?? "–";
  if (kind) node.className = kind;
}

function seconds(value) {
  if (value == null) return "–";
  if (value < 5e-5) return "0";
  return value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms`;
}

function drawRequests(rows) {
  const body = document.querySelector("#requests tbody");
  body.replaceChildren();
  for (const r of rows) {
    const row = body.insertRow();
    cell(row, `${r.request}${r.why === "slowest" ? " (slow)" : ""}`);
    cell(row, seconds(r.arrival_s));
    cell(row, r.prompt_tokens.toLocaleString("en"));
    cell(row, Math.max(r.decode_cached_tokens, r.site_cached_tokens).toLocaleString("en"));
    cell(row, r.output_tokens.toLocaleString("en"));
    cell(row, r.kind, "words");
    cell(row, r.decode == null ? r.reason || r.state : r.site === r.decode ? r.decode : `${r.decode} ← ${r.site}`, "words");
    cell(row, (r.kv_bytes / 1e6).toFixed(0));
    cell(row, seconds(r.predicted_ttft_s));
    cell(row, seconds(r.ttft_s));
    cell(row, seconds(r.tpot_s));
    cell(row, seconds(r.regret_s));
  }
}

function showRun(index) {
  run = index;
  for (const button of document.querySelectorAll(".tabs button")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.run) === index));
  }
  draw(document.getElementById("inside"), DATA.runs[index].charts);
  drawRequests(DATA.runs[index].requests);
}

function show() {
  const forced = document.documentElement.dataset.theme;
  theme = THEMES[forced || (darkMedia.matches ? "dark" : "light")];
  for (const dot of document.querySelectorAll(".dot")) dot.style.background = colour(dot.dataset.colour);
  draw(document.getElementById("comparison"), DATA.charts);
  showRun(run);
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = theme === THEMES.dark ? "light" : "dark";
  show();
});
for (const button of document.querySelectorAll(".tabs button")) {
  button.addEventListener("click", () => showRun(Number(button.dataset.run)));
}
darkMedia.addEventListener("change", show);
show();
document.documentElement.dataset.ready = "yes";
