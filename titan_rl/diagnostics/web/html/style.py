"""How the page looks, light and dark. No font, image or script from anywhere."""

PANEL_COLOURS = ("#2f7d8c", "#d9822b", "#7b5ea7", "#5a8f3c", "#c2476b", "#8a6d3b")
"""Of curves: a run each where there are several, else a metric each; seen on white and on black."""
CSS = """
:root { --bg:#f6f7f8; --card:#ffffff; --ink:#1d2329; --soft:#68727d; --line:#e2e6ea; --accent:#1f6f7d; --bad:#b8383d;
  --good:#3c7d3f; --gap:#eceff2; --tok-model:#cfe6f7; --tok-tool:#fbe1bd; --tok-template:#eceef0;
  --tok-repeated:#e0e3f5;
  --hue-up:60,140,70; --hue-down:214,69,65; }
body.body--dark { --bg:#14171a; --card:#1d2125; --ink:#e4e8eb; --soft:#939da7; --line:#30363c; --accent:#6cbfcd;
  --bad:#ef8083; --good:#86c987; --gap:#24292e; --tok-model:#1f4560; --tok-tool:#5d4318; --tok-template:#2c3136;
  --tok-repeated:#34385c; --hue-up:80,170,90; --hue-down:224,85,80; }
body, body.body--dark { background:var(--bg); color:var(--ink);
  font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif; font-size:14px; }
.nicegui-content { padding:0; gap:0; align-items:stretch; }
.top { display:flex; align-items:center; gap:14px; padding:10px 22px; background:var(--card); width:100%;
  border-bottom:1px solid var(--line); position:sticky; top:0; z-index:10; flex-wrap:wrap; }
.brand { font-weight:650; letter-spacing:.2px; } .soft { color:var(--soft); } .grow { flex:1; }
.pill { padding:2px 10px; border-radius:11px; border:1px solid var(--line); font-size:12.5px; white-space:nowrap; }
.pill.active { color:var(--good); border-color:currentColor; } .pill.ended { color:var(--soft); }
.nav { display:flex; gap:2px; } .nav button { all:unset; cursor:pointer; padding:6px 12px; border-radius:7px;
  color:var(--soft); } .nav button:hover { background:var(--gap); }
.nav button:focus-visible { outline:2px solid var(--accent); }
.nav button.on { color:var(--accent); font-weight:600; background:var(--gap); }
.page { padding:18px 22px 40px; width:100%; max-width:1680px; margin:0 auto; gap:16px; align-items:stretch; }
.card { background:var(--card); border:1px solid var(--line); border-radius:10px; padding:14px 16px; min-width:0;
  width:100%; }
.card h2, .sheet h2 { all:unset; display:block; font-weight:600; font-size:14px; margin-bottom:8px; line-height:1.3; }
.panels { display:grid; grid-template-columns:repeat(auto-fill,minmax(290px,1fr)); gap:14px; width:100%; }
.panels .card { padding:12px 12px 4px; } .two { display:grid; grid-template-columns:1fr 1fr; gap:14px; width:100%; }
@media (max-width:1000px) { .two { grid-template-columns:1fr; } }
table.plain { border-collapse:collapse; width:100%; font-size:13px; }
table.plain td, table.plain th { padding:5px 10px 5px 0; border-bottom:1px solid var(--line); text-align:left;
  vertical-align:top; overflow-wrap:anywhere; } table.plain tr:last-child td { border-bottom:0; }
table.plain th { color:var(--soft); font-weight:500; } table.plain .n { text-align:right; white-space:nowrap;
  font-variant-numeric:tabular-nums; }
table.plain td:has(.bar) { vertical-align:middle; }
.bar { height:7px; border-radius:4px; background:var(--accent); opacity:.75; min-width:1px; }
.bad { color:var(--bad); } .good { color:var(--good); }
.facts { display:grid; grid-template-columns:max-content 1fr; gap:3px 16px; font-size:13px; }
.facts span:nth-child(odd) { color:var(--soft); } .facts span { overflow-wrap:anywhere; }
.said { white-space:pre-wrap; overflow-wrap:anywhere; font-size:13px; background:var(--bg); border-radius:8px;
  padding:9px 11px; max-height:180px; overflow:auto; }
.filters { display:flex; flex-wrap:wrap; gap:10px 12px; align-items:flex-end; } .filters .q-field { min-width:70px; }
.filters .wide { flex:1; min-width:240px; } .filters .short { width:84px; } .filters
  .range:has([aria-label*=disagreement]) .short:first-child { width:112px; }
.range { display:flex; gap:4px; align-items:flex-end; }
.rollouts { background:transparent; width:100%; } .rollouts .q-table th { color:var(--soft); font-weight:500; }
.rollouts tbody tr { cursor:pointer; } .rollouts tbody td { font-variant-numeric:tabular-nums; height:32px; }
.rollouts table { table-layout:fixed; width:100%; min-width:0; } .rollouts .q-table th, .rollouts .q-table td {
  padding:4px 6px; overflow:hidden; text-overflow:ellipsis; }
.rollouts .q-table th { white-space:normal; line-height:1.2; vertical-align:bottom; }
.rollouts td.said-short { font-family:ui-monospace,"DejaVu Sans Mono",monospace; font-size:12.5px; }
.group { width:100%; } .group .q-item { padding:4px 2px; min-height:30px; font-weight:600; color:var(--soft); }
.group .nicegui-expansion-content { padding:6px 0 4px; } .wide-sheet { max-width:1600px !important; width:96vw; }
.answers { display:grid; grid-template-columns:repeat(auto-fill,minmax(270px,1fr)); gap:12px; width:100%; }
.answer { border:1px solid var(--line); border-radius:8px; padding:10px; cursor:pointer; min-width:0; }
.answer:hover { border-color:var(--accent); } .answer-head { display:flex; gap:10px; flex-wrap:wrap; font-size:12.5px;
  margin-bottom:6px; } .answer .said { max-height:260px; }
.rollouts .q-table tbody td, .rollouts .q-table th { border-color:var(--line); }
.rollouts.q-table--dark, .rollouts .q-table__card { background:transparent; box-shadow:none; }
.sheet { background:var(--card); color:var(--ink); max-width:1200px !important; width:92vw; padding:18px 22px;
  border-radius:12px; gap:12px; align-items:stretch; }
.tok { font-family:ui-monospace,"DejaVu Sans Mono",monospace; font-size:13px; line-height:1.95; overflow-wrap:anywhere;
  white-space:pre-wrap; } .tok span, .tok-key span { border-radius:4px; padding:2px 1px; margin-right:1px; }
.tok span:hover { outline:1.5px solid var(--accent); } .tok-key span { padding:2px 8px; margin-right:6px; }
.tok-key { font-size:12.5px; color:var(--soft); } .tok-branch { border:0; border-top:1px dashed var(--soft);
  margin:8px 0; }
.tok-model { background:var(--tok-model); color:var(--ink); } .tok-tool { background:var(--tok-tool);
  color:var(--ink); }
.tok-template { background:var(--tok-template); color:var(--ink); }
.tok-repeated { background:var(--tok-repeated); color:var(--ink); } .tok-plain { color:var(--soft); }
.tok-forced { background:rgba(var(--hue-down),.25); color:var(--ink); }
.tok-up { background:rgba(var(--hue-up),var(--a)); } .tok-down { background:rgba(var(--hue-down),var(--a)); }
.tok-version0 { background:var(--tok-model); } .tok-version1 { background:var(--tok-tool); }
.tok-version2 { background:rgba(var(--hue-up),.25); } .tok-version3 { background:var(--tok-repeated); }
.tok-version4 { background:rgba(var(--hue-down),.2); }
.tl { width:100%; } .tl-row { display:grid; grid-template-columns:132px 1fr 52px; gap:10px; align-items:center;
  margin-bottom:6px; font-size:12.5px; } .tl-row > :last-child { text-align:right; color:var(--soft);
  font-variant-numeric:tabular-nums; } .tl-name { overflow:hidden; text-overflow:ellipsis; white-space:nowrap; }
.tl-track { position:relative; border-radius:5px; overflow:hidden; background:repeating-linear-gradient(135deg,
  var(--gap) 0 6px, transparent 6px 12px); border:1px solid var(--line); }
.tl-track i { position:absolute; border-radius:2px; font-style:normal; font-size:11px; color:#fff; overflow:hidden;
  white-space:nowrap; padding-left:4px; box-sizing:border-box; min-width:1px; line-height:18px; }
.tl-axis .tl-track { border:0; background:none; height:18px; overflow:visible; color:var(--soft); }
.tl-axis span { position:absolute; white-space:nowrap; transform:translateX(-50%); } .tl-axis span:first-child {
  transform:none; }
.tl-axis span:last-child { transform:translateX(-100%); }
.tl-legend { display:flex; flex-wrap:wrap; gap:6px 16px; font-size:12px; color:var(--soft); margin-top:10px; }
.tl-legend b { font-weight:400; display:flex; gap:6px; align-items:center; }
.tl-legend i { width:14px; height:11px; border-radius:3px; display:inline-block; }
.tl-generate { background:#2f7d8c; } .tl-episode { background:#8fb3d9; } .tl-scoring { background:#d9a23b; }
.tl-train { background:#5a8f3c; } .tl-optimizer { background:#7b5ea7; } .tl-weights { background:#c2476b; }
.tl-roles { background:#8a6d3b; } .tl-other { background:#7a858f; } i.tl-wait { background:var(--line);
  color:var(--soft); } .tl-gap { background:repeating-linear-gradient(135deg,var(--line) 0 3px,transparent 3px 6px);
  border:1px solid var(--line); }
.interval { position:relative; height:10px; min-width:90px;
  background:linear-gradient(var(--line),var(--line)) 0 50%/100% 1px no-repeat; }
.interval i { position:absolute; top:3px; height:4px; border-radius:2px; background:var(--accent); opacity:.45;
  min-width:1px; }
.interval b { position:absolute; top:0; width:3px; height:10px; margin-left:-1px; border-radius:1px;
  background:var(--accent); } .interval.of-beside i, .interval.of-beside b { background:var(--soft); }
table.estimates td:first-child { min-width:120px; }
.said.tall { max-height:60vh; }
.images { display:flex; flex-wrap:wrap; gap:8px; } .images img { image-rendering:pixelated; border-radius:4px; }
@media (max-width:640px) { .wide-only { display:none; } .page { padding:10px 8px 30px; } .card { padding:10px; }
  .top { padding:8px 10px; gap:8px; } .top > .q-btn { position:absolute; right:6px; top:4px; }
  .nav { flex-wrap:wrap; } .nav button { padding:6px 5px; font-size:13px; } .sheet { padding:12px; width:98vw; }
  table.estimates .n { white-space:normal; overflow-wrap:normal; padding-right:6px; }
  table.estimates td:first-child { min-width:84px; } }
.alarm { border-left:3px solid var(--bad); padding-left:10px; margin:6px 0; overflow-wrap:anywhere; }
.alarm.past { border-color:var(--line); color:var(--soft); }
"""
