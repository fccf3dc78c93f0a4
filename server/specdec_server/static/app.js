// The dashboard's one script: local times, live values, charts, the token reader. No build step.
"use strict";
(() => {
  const MISSING = "\u2013";
  const page = document.body.dataset.page;
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  // ---- numbers, as server/specdec_server/format.py writes them

  const three = (value) => {
    if (value === 0) return "0";
    const a = Math.abs(value);
    let digits = a < 9.995 ? 2 : a < 99.95 ? 1 : 0;
    while (digits < 6 && a < 1 && a * 10 ** digits < 99.5) digits += 1;
    const text = value.toFixed(digits);
    return a < 1 ? text.replace(/0+$/, "").replace(/\.$/, "") : text;
  };
  const grouped = (value) => Math.round(value).toLocaleString("en-US");
  const known = (f) => (value) => (value === null || value === undefined ? MISSING : f(value));
  const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
  const fmt = {
    count: known(grouped),
    number: known((v) => (Math.abs(v) >= 99.95 ? grouped(v) : three(v))),
    size: known((v) => {
      let unit = 0;
      while (v >= 999.5 && unit < UNITS.length - 1) { v /= 1000; unit += 1; }
      return `${unit ? three(v) : Math.round(v)} ${UNITS[unit]}`;
    }),
    fraction: known((v) => {
      const p = v * 100;
      if (p === 0 || p === 100) return `${p.toFixed(0)}%`;
      return `${p.toFixed(p < 0.1 || (p >= 99.9 && p < 100) ? 2 : 1)}%`;
    }),
    duration: known((s) => {
      if (s < 9.95) return `${three(s)} s`;
      const w = Math.round(s);
      if (w < 60) return `${w} s`;
      const [big, small, b, c] = w < 3600 ? [60, 1, "min", "s"] : w < 86400 ? [3600, 60, "h", "min"] : [86400, 3600, "d", "h"];
      const rest = Math.floor((w % big) / small);
      return `${grouped(Math.floor(w / big))} ${b}${rest ? ` ${rest} ${c}` : ""}`;
    }),
    exact: known((v) => (Math.abs(v) >= 1000 ? grouped(v) : String(Number(v.toPrecision(4))))),
    generated: (v) => `${fmt.count(v)} of them generated`,
    of_raw: (v) => `${fmt.fraction(v)} of raw`,
    reused: (v) => `${fmt.count(v)} rows not stored twice`,
    skipped: (v) => `${fmt.count(v)} skipped on purpose`,
    forecast: (f) => (f.full_in_s === null ? `${fmt.size(f.usable_bytes)} usable` : `full in ${fmt.duration(f.full_in_s)}`),
    forecast_note: (f) => f.why || `${fmt.size(f.usable_bytes)} usable`,
  };

  const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };

  const localTimes = (root) => {
    for (const node of $$("time[datetime]", root)) {
      const at = new Date(node.dateTime);
      if (Number.isNaN(at.getTime())) continue;
      const pad = (n) => String(n).padStart(2, "0");
      setText(node, `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`);
      node.title = at.toString();
    }
  };

  // ---- colours

  const THEMES = ["auto", "light", "dark"];
  const themeButton = $("#theme");
  const themeNow = () => document.documentElement.dataset.theme || "auto";
  const nameTheme = () => {
    const name = themeNow();
    setText(themeButton, name[0].toUpperCase() + name.slice(1));
    themeButton.setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
  };
  themeButton.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(themeNow()) + 1) % THEMES.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try { localStorage.setItem("specdec-tap-theme", next); } catch { /* storage is off */ }
    nameTheme();
    redrawCharts();
  });
  nameTheme();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redrawCharts());

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // ---- charts

  const charts = new Map();
  const WHOLE = [1, 2, 5].flatMap((n) => Array.from({ length: 10 }, (_, i) => n * 10 ** i)).sort((a, b) => a - b);
  const clock = (unixS) => {
    const at = new Date(unixS * 1000);
    return [at.getHours(), at.getMinutes(), at.getSeconds()].map((n) => String(n).padStart(2, "0")).join(":");
  };
  // Every series at its own newest value: a run that ended earlier still shows where.
  const newest = (plot) => plot.setLegend({ idxs: plot.data.map((values) => values.findLastIndex((v) => v !== null && v !== undefined)) });

  // Draw or update a chart. `series`: [{label, values, color, dots, thin, format}], all over the same x.
  const draw = (id, x, series, options = {}) => {
    const figure = document.getElementById(id);
    if (!figure) return;
    const box = $(".plot", figure);
    const format = options.format || fmt.number;
    const filled = series.filter((s) => s.values.some((v) => v !== null && v !== undefined));
    let chart = charts.get(id);
    if (chart && chart.box !== box) { chart.plot.destroy(); charts.delete(id); chart = undefined; }
    if (x.length < (options.time ? 2 : 1) || !filled.length) { // one moment is no curve
      if (chart) { chart.plot.destroy(); charts.delete(id); }
      box.replaceChildren(Object.assign(document.createElement("p"), { className: "nothing", textContent: options.nothing || "no numbers yet" }));
      box.setAttribute("aria-label", `${$("figcaption", figure).textContent}: ${options.nothing || "no numbers yet"}`);
      return;
    }
    const data = [x, ...filled.map((s) => s.values)];
    const shape = JSON.stringify(filled.map((s) => [s.label, s.color, s.dots, s.thin]));
    const last = filled.map((s) => `${s.label} ${format(s.values.findLast((v) => v !== null && v !== undefined))}`).join(", ");
    box.setAttribute("aria-label", `${$("figcaption", figure).textContent}; newest: ${last}`);
    fillNumbers(figure, x, filled, format, options);
    if (chart && chart.shape === shape) {
      chart.plot.setData(data);
      chart.again = [id, x, series, options];
      if (chart.plot.cursor.idx === null || chart.plot.cursor.idx === undefined) newest(chart.plot);
      return;
    }
    if (chart) chart.plot.destroy();
    box.replaceChildren();
    const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const plot = new uPlot({
      width: Math.max(box.clientWidth, 120),
      height: 168,
      cursor: { y: false, points: { size: 6 }, focus: { prox: 24 } },
      legend: { show: true, live: true },
      scales: { x: { time: Boolean(options.time) }, y: { range: (u, low, high) => range(low, high, options) } },
      axes: [
        { ...axis, size: 24, space: 70, incrs: options.time ? undefined : WHOLE, values: (u, ticks) => ticks.map((t) => (options.time ? clock(t) : fmt.exact(t))) },
        { ...axis, size: 58, space: 34, values: (u, ticks) => ticks.map((t) => format(t)) },
      ],
      series: [
        { label: options.xLabel || (options.time ? "time" : "step"), value: options.time ? "{HH}:{mm}:{ss}" : (u, v) => fmt.exact(v) },
        ...filled.map((s) => ({
          label: s.label,
          stroke: css(s.color),
          width: s.thin ? 1 : 1.75,
          alpha: s.thin ? 0.55 : 1,
          points: { show: Boolean(s.dots), size: 5, fill: css(s.color) },
          spanGaps: !options.time, // rows of one series lie between those of another
          value: (u, v) => format(v),
        })),
      ],
    }, data, box);
    // Without a pointer over it, the legend shows the newest values.
    requestAnimationFrame(() => newest(plot));
    plot.over.addEventListener("mouseleave", () => newest(plot));
    const observer = new ResizeObserver(() => {
      const width = box.clientWidth;
      if (width && Math.abs(width - plot.width) > 1) plot.setSize({ width, height: 168 });
    });
    observer.observe(box);
    charts.set(id, { plot, shape, box, again: [id, x, series, options] });
  };

  const range = (low, high, options) => {
    if (low === null || high === null) return [0, 1];
    if (options.zero) return [0, high > 0 ? high * 1.08 : options.least || 1];
    const room = (high - low || Math.abs(high) || 1) * 0.08;
    return [low - room, high + room];
  };

  const fillNumbers = (figure, x, series, format, options) => {
    const details = $(".chart-data", figure);
    const fill = () => {
      if (!details.open) return;
      const table = document.createElement("table");
      table.className = "compact";
      const row = (cells, tag) => {
        const tr = document.createElement("tr");
        cells.forEach((text, i) => {
          const cell = document.createElement(i === 0 ? "th" : tag);
          cell.scope = tag === "th" ? "col" : "row";
          if (i) cell.className = "num";
          cell.textContent = text;
          if (cell.tagName === "TD") cell.removeAttribute("scope");
          tr.append(cell);
        });
        return tr;
      };
      const head = document.createElement("thead");
      head.append(row([options.xLabel || (options.time ? "time" : "step"), ...series.map((s) => s.label)], "th"));
      const body = document.createElement("tbody");
      for (let i = x.length - 1; i >= 0 && i >= x.length - 100; i -= 1) {
        const at = options.time ? clock(x[i]) : fmt.exact(x[i]);
        body.append(row([at, ...series.map((s) => format(s.values[i]))], "td"));
      }
      table.append(head, body);
      $(".table-wrap", details).replaceChildren(table);
    };
    details.ontoggle = fill;
    fill();
  };

  const redrawCharts = () => {
    for (const chart of [...charts.values()]) {
      charts.delete(chart.again[0]);
      chart.plot.destroy();
      draw(...chart.again);
    }
  };

  const json = (id) => {
    const node = document.getElementById(id);
    return node ? JSON.parse(node.textContent) : null;
  };

  // ---- live events

  const live = $("#live");
  const setLive = (state, text) => {
    live.classList.toggle("on", state === "on");
    live.classList.toggle("lost", state === "lost");
    setText($(".live-text", live), text);
  };
  const handlers = { capture: [], shards: [], runs: [] };
  let source = null;
  const wants = ["capture", "shards", "shard", "runs", "run", "evaluations"].includes(page);
  live.hidden = !wants;
  const connect = () => {
    if (!wants || source || document.hidden) return;
    source = new EventSource("/api/events");
    source.addEventListener("open", () => setLive("on", "live"));
    source.addEventListener("error", () => setLive("lost", "reconnecting"));
    for (const name of Object.keys(handlers)) {
      source.addEventListener(name, (event) => {
        const data = JSON.parse(event.data);
        for (const handler of handlers[name]) handler(data);
      });
    }
  };
  const disconnect = () => { if (source) { source.close(); source = null; setLive("", "paused"); } };
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  addEventListener("pagehide", disconnect);
  addEventListener("pageshow", connect);

  // Fetch this page again and put its live regions in place of the old ones.
  let refreshing = false;
  const refresh = async (after) => {
    if (refreshing) return;
    refreshing = true;
    try {
      const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const region of $$("[data-live]")) {
        const other = fresh.getElementById(region.id);
        if (!other || region.contains(document.activeElement) && document.activeElement.matches("input, select")) continue;
        const focused = region.contains(document.activeElement) ? document.activeElement.id : null;
        const checked = new Set($$("input[type=checkbox]:checked", region).map((c) => c.value));
        const opened = $$("details", region).map((d) => d.open);
        region.replaceChildren(...document.importNode(other, true).childNodes);
        for (const box of $$("input[name=compare]", region)) box.checked = checked.size ? checked.has(box.value) : box.checked;
        $$("details", region).forEach((d, i) => { d.open = opened[i] || false; });
        localTimes(region);
        if (focused) document.getElementById(focused)?.focus();
      }
      if (after) after();
    } finally { refreshing = false; }
  };
  const onVersion = (name, key, after) => {
    let version = null;
    handlers[name].push((data) => {
      const now = key(data);
      if (version !== null && now !== version) refresh(after);
      version = now;
    });
  };

  const post = async (url, body) => {
    const answer = await fetch(url, {
      method: "POST",
      headers: { "X-Specdec-Tap": "1", "Content-Type": "application/json" },
      body: JSON.stringify(body || {}),
    });
    const data = await answer.json();
    if (!answer.ok) throw new Error(data.hint ? `${data.detail}; ${data.hint}` : data.detail);
    return data;
  };

  // ---- capture

  const pick = (data, path) => path.split(".").reduce((value, key) => (value === null || value === undefined ? value : value[key]), data);
  const badge = (state) => {
    const node = document.createElement("span");
    node.className = `badge ${{ capturing: "good", paused: "warn", stale: "bad", off: "bad" }[state] || "plain"}`;
    node.textContent = state;
    return node;
  };

  const capturePage = () => {
    const history = json("history");
    const keep = 900;
    const series = [
      ["chart-rows", "rows_per_s", "rows/s", "--series-0", fmt.number],
      ["chart-bytes", "stored_bytes_per_s", "bytes/s", "--series-2", fmt.size, 1000],
      ["chart-ring", "ring_fill_fraction", "fill", "--series-3", fmt.fraction],
      ["chart-drops", "dropped_per_s", "drops/s", "--series-1", fmt.number],
    ];
    const drawAll = () => {
      for (const [id, key, label, color, format, least] of series) {
        draw(id, history.unix_s, [{ label, values: history[key], color }], { time: true, zero: true, least, format, nothing: "watching; the first numbers come in a few seconds" });
      }
    };
    let last = null;
    const onCapture = (data) => {
      const running = data.ranks.length > 0;
      $("#idle").hidden = running;
      $("#running").hidden = !running;
      const state = running ? badge(data.state) : badge("nothing is running");
      const holder = $("#capture-state");
      if (holder.textContent.trim() !== state.textContent) holder.replaceChildren(state);
      const now = data.ranks.map((r) => r.stream).join(" ");
      const shown = $$("#ranks tbody tr").map((r) => r.dataset.stream).join(" ");
      if (now !== shown) { rebuildRanks(data.ranks); setText($("#capture-ranks"), running ? `${data.ranks.length} ${data.ranks.length === 1 ? "rank" : "ranks"}` : ""); }
      for (const node of $$("[data-v]")) setText(node, fmt[node.dataset.f](pick(data, node.dataset.v)));
      for (const rank of data.ranks) {
        for (const cell of $$(`#ranks tr[data-stream="${CSS.escape(rank.stream)}"] [data-r]`)) {
          const value = rank[cell.dataset.r];
          if (cell.dataset.f === "badge") { if (cell.textContent.trim() !== value) cell.replaceChildren(badge(value)); }
          else setText(cell, fmt[cell.dataset.f](value));
        }
      }
      const messages = data.ranks.filter((r) => r.reason || r.last_error).map((r) => `${r.stream}: ${[r.reason, r.last_error].filter(Boolean).join("; ")}`);
      const list = $("#rank-messages");
      if ($$("li", list).map((li) => li.textContent).join("\n") !== messages.join("\n")) {
        list.replaceChildren(...messages.map((text) => Object.assign(document.createElement("li"), { textContent: text })));
      }
      // The same differences that the server's history has, taken from the sums.
      const at = Date.now() / 1000;
      const point = { at, streams: now, rows: data.total.rows_copied, bytes: data.total.stored_bytes, drops: data.total.num_dropped };
      if (running && last && last.streams === now && at - last.at > 0.4) {
        const s = at - last.at;
        const rate = (a, b) => Math.max(a - b, 0) / s;
        history.unix_s.push(at);
        history.rows_per_s.push(rate(point.rows, last.rows));
        history.stored_bytes_per_s.push(rate(point.bytes, last.bytes));
        history.dropped_per_s.push(rate(point.drops, last.drops));
        history.ring_fill_fraction.push(Math.max(...data.ranks.map((r) => r.ring_fill_fraction)));
        for (const values of Object.values(history)) if (values.length > keep) values.shift();
        last = point;
        drawAll();
      } else if (!last || last.streams !== now) last = point;
    };
    const rebuildRanks = (ranks) => {
      const body = $("#ranks tbody");
      const names = [["state", "badge"], ["num_started", "count"], ["num_live", "count"], ["num_sealed", "count"], ["num_skipped", "count"], ["num_dropped", "count"], ["num_tokens", "count"], ["stored_bytes", "size"], ["dedupe_fraction", "fraction"], ["ring_fill_fraction", "fraction"], ["num_lag_steps", "count"], ["disk_free_bytes", "size"]];
      body.replaceChildren(...ranks.map((rank) => {
        const row = document.createElement("tr");
        row.dataset.stream = rank.stream;
        const head = document.createElement("th");
        head.scope = "row";
        head.append(`${rank.dp_rank} `, Object.assign(document.createElement("span"), { className: "muted mono", textContent: rank.stream }));
        row.append(head);
        for (const [name, format] of names) {
          const cell = document.createElement("td");
          cell.dataset.r = name;
          cell.dataset.f = format;
          if (format !== "badge") cell.className = "num";
          row.append(cell);
        }
        return row;
      }));
    };
    drawAll();
    handlers.capture.push(onCapture);

    const answer = $("#control-answer");
    const act = async (button, action, body) => {
      button.disabled = true;
      setText(answer, `${action} \u2026`);
      try {
        await post(`/specdec_tap/${action}`, body);
        setText(answer, `${action}: done on every rank`);
      } catch (err) { setText(answer, err.message); } finally { button.disabled = false; }
    };
    for (const button of $$("[data-action]")) button.addEventListener("click", () => act(button, button.dataset.action));
    $("#rate-form")?.addEventListener("submit", (event) => {
      event.preventDefault();
      act($("button", event.target), "rate", { rate: Number($("#rate").value) });
    });
  };

  // ---- shards

  const shardPages = () => {
    onVersion("shards", (d) => `${d.version} ${d.verifications}`);
    document.addEventListener("click", async (event) => {
      const button = event.target.closest("[data-post]");
      if (!button) return;
      button.disabled = true;
      try { await post(button.dataset.post); } catch (err) { setText($("#post-answer"), err.message); button.disabled = false; }
    });
  };

  // ---- runs

  const COLORS = [0, 1, 2, 3, 4, 5].map((i) => `--series-${i}`);

  // Merge series over different steps into one x axis.
  const merge = (parts) => {
    const x = [...new Set(parts.flatMap((p) => p.x))].sort((a, b) => a - b);
    const at = new Map(x.map((v, i) => [v, i]));
    return [x, parts.map((p) => {
      const values = new Array(x.length).fill(null);
      p.x.forEach((v, i) => { values[at.get(v)] = p.values[i] ?? null; });
      return { ...p, values };
    })];
  };
  const plain = (part, name, k) => {
    const values = part[name];
    if (!values) return null;
    return Array.isArray(values[0]) ? values[k || 0] || null : values;
  };
  const drawMerged = (id, parts, options) => draw(id, ...merge(parts.filter((p) => p.values)), options);

  const runsPage = () => {
    const runs = json("curves");
    if (!runs) return;
    const each = (name, where, k, more) => runs.map((run, i) => ({ label: run.name, x: run[where].step, values: plain(run[where], name, k), color: COLORS[i], ...more }));
    const both = (name) => runs.flatMap((run, i) => [
      { label: `${run.name}, training`, x: run.train.step, values: plain(run.train, name), color: COLORS[i], thin: true },
      { label: run.name, x: run.eval.step, values: plain(run.eval, name), color: COLORS[i], dots: true },
    ]);
    drawMerged("chart-loss", both("loss"), {});
    drawMerged("chart-accuracy", each("accuracy", "eval", 0, { dots: true }), { format: fmt.fraction });
    drawMerged("chart-length", each("simulated_acceptance_length", "eval", 0, { dots: true }), { format: (v) => (v === null || v === undefined ? MISSING : v.toFixed(3)) });
    drawMerged("chart-speed", each("tokens_per_s", "train"), { zero: true });
    drawMerged("chart-wait", each("data_wait", "train"), { zero: true, format: fmt.fraction });
  };

  const runPage = () => {
    const curves = json("curves");
    if (!curves) return;
    const run = curves[0];
    const positions = (name) => {
      const parts = [];
      const width = Math.max((run.train[name] || []).length, (run.eval[name] || []).length);
      for (let k = 0; k < Math.min(width, 6); k += 1) {
        parts.push({ label: `${k + 1}, training`, x: run.train.step, values: run.train[name]?.[k], color: COLORS[k], thin: true });
        parts.push({ label: `${k + 1}`, x: run.eval.step, values: run.eval[name]?.[k], color: COLORS[k], dots: true });
      }
      return parts;
    };
    drawMerged("chart-loss", positions("loss"), {});
    drawMerged("chart-accuracy", positions("accuracy"), { format: fmt.fraction });
    drawMerged("chart-length", [
      { label: "greedy", x: run.eval.step, values: run.eval.simulated_acceptance_length, color: COLORS[0], dots: true },
      { label: "the captured traffic", x: run.eval.step, values: run.eval.sampled_acceptance_length, color: COLORS[1], dots: true },
    ], { format: (v) => (v === null || v === undefined ? MISSING : v.toFixed(3)) });
    drawMerged("chart-speed", [{ label: "tokens/s", x: run.train.step, values: run.train.tokens_per_s, color: COLORS[0] }], { zero: true });
    drawMerged("chart-wait", [{ label: "data wait", x: run.train.step, values: run.train.data_wait, color: COLORS[1] }], { zero: true, format: fmt.fraction });
    const rates = run.train.lr || [];
    const lines = Array.isArray(rates[0]) ? rates : [rates];
    drawMerged("chart-lr", lines.slice(0, 6).map((values, k) => ({ label: `group ${k + 1}`, x: run.train.step, values, color: COLORS[k] })), { zero: true, format: fmt.exact });
  };

  const evaluationsPage = () => {
    const all = json("evaluations");
    if (!all) return;
    const shown = all.slice(0, 6);
    drawMerged("chart-depth", shown.map((e, i) => {
      const values = [1];
      for (const share of e.acceptance_per_position) values.push(values.at(-1) + (share || 0));
      return { label: e.name, x: values.map((v, k) => k), values, color: COLORS[i], dots: true };
    }), { xLabel: "draft tokens", format: (v) => (v === null || v === undefined ? MISSING : v.toFixed(3)) });
    const under = (e) => e.loads.filter((load) => load.speedup);
    drawMerged("chart-load", shown.filter((e) => under(e).length).map((e, i) => ({ label: e.name, x: under(e).map((load) => load.concurrency), values: under(e).map((load) => load.speedup), color: COLORS[i], dots: true })), { xLabel: "requests under way", format: (v) => (v === null || v === undefined ? MISSING : `${v.toFixed(2)}\u00d7`), nothing: "no evaluation with --loads has a baseline beside it" });
    const points = all.filter((e) => e.speedup).map((e) => [e.acceptance_per_position.length, e.speedup]);
    points.sort((a, b) => a[0] - b[0]);
    const best = new Map();
    for (const [k, speed] of points) best.set(k, Math.max(best.get(k) || 0, speed));
    drawMerged("chart-speedup", [{ label: "best speed-up", x: [...best.keys()], values: [...best.values()], color: COLORS[0], dots: true }], { xLabel: "draft tokens", format: (v) => (v === null || v === undefined ? MISSING : `${v.toFixed(2)}\u00d7`), nothing: "no evaluation has a baseline beside it" });
  };

  // ---- one sequence

  const recordPage = () => {
    const box = $("#tokens");
    const panel = $("#token-panel");
    let active = null;
    const describe = (node) => {
      const rows = [["Position", grouped(Number(node.dataset.p))]];
      if (node.dataset.id) rows.push(["Token id", node.dataset.id]);
      const is = [node.classList.contains("k-earlier") ? "earlier answer" : node.classList.contains("k-response") ? "response" : "prompt"];
      if (node.classList.contains("k-cached")) is.push("states from the prefix cache");
      if (node.classList.contains("k-gap")) is.push("no states");
      if (node.classList.contains("acc")) is.push("accepted draft");
      if (node.classList.contains("tgt")) is.push("cost a target step");
      rows.push(["Is", is.join(", ")]);
      const drafts = (node.dataset.d || "").split(" ").filter(Boolean).map((text, k) => {
        if (text === "-") return [String(k + 1), "not evaluated", "", ""];
        const [correct, probability, rank] = text.split("/");
        return [String(k + 1), correct === "1" ? "right" : "wrong", probability ? fmt.fraction(Number(probability)) : MISSING, rank || "not in its vocabulary"];
      });
      return [rows, drafts];
    };
    const show = (node) => {
      const [rows, drafts] = describe(node);
      const title = document.createElement("h2");
      title.textContent = "Token ";
      const text = box.classList.contains("hidden-text") ? null : node.textContent;
      if (text !== null) title.append(Object.assign(document.createElement("span"), { className: "shown", textContent: text.replaceAll(" ", "\u2423") }));
      const list = Object.assign(document.createElement("dl"), { className: "facts" });
      for (const [name, value] of rows) {
        list.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value }));
      }
      panel.replaceChildren(title, list);
      if (drafts.length) {
        const table = document.createElement("table");
        const head = table.createTHead().insertRow();
        for (const name of ["Draft", "", "Gave it", "Rank"]) head.append(Object.assign(document.createElement("th"), { textContent: name, scope: "col" }));
        const body = table.createTBody();
        for (const cells of drafts) {
          const row = body.insertRow();
          cells.forEach((cell, i) => { const td = row.insertCell(); td.textContent = cell; if (i === 1) td.className = cell === "right" ? "good-text" : cell === "wrong" ? "bad-text" : "muted"; });
        }
        panel.append(table);
      }
    };
    const label = (node) => {
      const [rows, drafts] = describe(node);
      const what = box.classList.contains("hidden-text") ? "" : `\u201c${node.textContent.trim() || "space"}\u201d, `;
      return `${what}position ${rows[0][1]}, ${rows.at(-1)[1]}${drafts.filter((d) => d[2] !== "").map((d) => `, draft ${d[0]} ${d[1]} ${d[2]}`).join("")}`;
    };
    const activate = (node, scroll) => {
      if (!node) return;
      if (active) { active.setAttribute("aria-selected", "false"); active.removeAttribute("aria-label"); }
      active = node;
      node.setAttribute("aria-selected", "true");
      node.setAttribute("aria-label", label(node));
      box.setAttribute("aria-activedescendant", node.id);
      if (scroll) node.scrollIntoView({ block: "nearest" });
      show(node);
    };
    box.addEventListener("mouseover", (event) => { const t = event.target.closest(".t"); if (t) show(t); });
    box.addEventListener("mouseleave", () => { if (active) show(active); });
    box.addEventListener("click", (event) => activate(event.target.closest(".t"), false));
    box.addEventListener("focus", () => { if (!active) activate($(".t", box), false); });
    const line = (node, direction) => {
      // The token in the next visual line that is nearest to this one.
      const here = node.getBoundingClientRect();
      let best = null, bestGap = Infinity, row = null;
      for (let t = direction > 0 ? node.nextElementSibling : node.previousElementSibling; t; t = direction > 0 ? t.nextElementSibling : t.previousElementSibling) {
        const r = t.getBoundingClientRect();
        if (Math.abs(r.top - here.top) < 4) continue;
        row ??= r.top;
        if (Math.abs(r.top - row) > 4) break;
        const gap = Math.abs(r.left - here.left);
        if (gap < bestGap) { best = t; bestGap = gap; }
      }
      return best;
    };
    const nextMiss = (node, direction) => {
      const mode = [1, 2, 3, 4].find((k) => box.classList.contains(`mode-${k}`)) || 1;
      for (let t = direction > 0 ? node.nextElementSibling : node.previousElementSibling; t; t = direction > 0 ? t.nextElementSibling : t.previousElementSibling) {
        if (t.classList.contains(`n${mode}`)) return t;
      }
      return null;
    };
    box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const at = active || $(".t", box);
      const target = {
        ArrowRight: () => at.nextElementSibling,
        ArrowLeft: () => at.previousElementSibling,
        ArrowDown: () => line(at, 1),
        ArrowUp: () => line(at, -1),
        Home: () => box.firstElementChild,
        End: () => box.lastElementChild,
        n: () => nextMiss(at, 1),
        p: () => nextMiss(at, -1),
      }[event.key];
      if (!target) return;
      event.preventDefault();
      activate(target(), true);
    });
    const modes = $$(".segmented [role=radio]");
    const setMode = (button) => {
      for (const other of modes) { other.setAttribute("aria-checked", String(other === button)); other.tabIndex = other === button ? 0 : -1; }
      const mode = button.dataset.mode;
      box.className = box.className.replace(/mode-\S+/, `mode-${mode}`);
      const legend = $(".legend");
      legend.classList.toggle("run", mode === "run");
      legend.classList.toggle("off", mode === "off");
    };
    modes.forEach((button, i) => {
      button.tabIndex = i ? -1 : 0;
      button.addEventListener("click", () => setMode(button));
      button.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (!step) return;
        event.preventDefault();
        const other = modes[(i + step + modes.length) % modes.length];
        other.focus();
        setMode(other);
      });
    });
    const select = $("#run");
    if (select) select.addEventListener("change", () => select.form.requestSubmit());
    const fromHash = () => { const t = location.hash.startsWith("#t") && document.getElementById(location.hash.slice(1)); if (t) { activate(t, false); t.scrollIntoView({ block: "center" }); } };
    addEventListener("hashchange", fromHash);
    fromHash();
  };

  // ---- start

  window.specdecTap = { fmt }; // for the test that compares them with Python's

  localTimes(document);
  if (page === "capture") capturePage();
  if (page === "shards" || page === "shard") shardPages();
  if (page === "runs") { runsPage(); onVersion("runs", (d) => d.version, runsPage); }
  if (page === "run") { runPage(); onVersion("runs", (d) => d.version, runPage); }
  if (page === "evaluations") { evaluationsPage(); onVersion("runs", (d) => d.version, evaluationsPage); }
  if (page === "record") recordPage();
  connect();
})();
