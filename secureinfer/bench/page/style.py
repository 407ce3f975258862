"""How the page looks: two schemes through the same variables, the system's own fonts, nothing to fetch.

It is text in a module and no file beside it, so that it is there however the package was installed.
"""

from __future__ import annotations

from typing import Final

LIGHT: Final = {
    "page": "#f6f7f9", "surface": "#ffffff", "ink": "#1a1f26", "muted": "#525a66", "rule": "#d8dce2", "grid": "#e6e9ed",
    "setup": "#747e8c", "setup-soft": "#dfe3e8", "offline": "#b3590a", "offline-soft": "#fbdcbb", "online": "#1d5fa8",
    "waiting-soft": "#d5e6f8", "other": "#6d4aa0", "other-soft": "#e6dcf5", "plain": "#2a7d4b", "aim": "#b3261e",
    "good": "#1e6b3c", "bad": "#a3201a", "bad-soft": "#fdecea", "note-soft": "#fff4dc",
}  # fmt: skip
DARK: Final = {
    "page": "#101317", "surface": "#181c22", "ink": "#e9ecf0", "muted": "#a9b2bd", "rule": "#353c46", "grid": "#282e36",
    "setup": "#8d97a5", "setup-soft": "#39414b", "offline": "#f0a04b", "offline-soft": "#5a3a16", "online": "#6db1f2",
    "waiting-soft": "#213f5e", "other": "#b899ea", "other-soft": "#40305c", "plain": "#63c088", "aim": "#ff8a80",
    "good": "#7fd6a0", "bad": "#ff9c94", "bad-soft": "#3a1d1c", "note-soft": "#382c14",
}  # fmt: skip
"""By what they are for. Text is written in ink, muted, aim, good and bad alone: each has 4.5 to 1 and more on what lies
under it, and marks have 3 to 1."""

TEXT_COLOURS: Final = ("ink", "muted", "aim", "good", "bad")

BREAK: Final = 820
"""Pixels of a window from which plots are the wide ones."""


def variables(scheme: dict[str, str]) -> str:
    return "".join(f"--{name}:{colour};" for name, colour in scheme.items())


CSS: Final = f"""
:root{{color-scheme:light dark;{variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}
""" + """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%;scroll-behavior:smooth}
@media (prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;overflow-wrap:break-word}
.definitions{position:absolute}
main,header,footer{max-width:1180px;margin:0 auto;padding:0 22px}
header{padding-top:34px}
h1{font-size:27px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em;text-wrap:balance}
h1,h2,h3,p,li,summary,dt,.hero{overflow-wrap:anywhere}
h2{font-size:20px;line-height:1.3;margin:0 0 4px}
h3{font-size:16px;line-height:1.35;margin:0}
.scroll+p{margin-top:14px}
h3.apart{margin-top:24px}
h2+p,h2+dl{margin-top:8px}
.reason{min-width:15em;white-space:normal}
th .reason{max-width:17em}
p{margin:0 0 10px;max-width:74ch}
a{color:inherit;text-underline-offset:3px}
.muted{color:var(--muted)}
.small{font-size:13px}
.strong{font-weight:650}
.good{color:var(--good)}
.bad{color:var(--bad)}
.nowrap{white-space:nowrap}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:13px}
pre{margin:8px 0 0;padding:12px 14px;background:var(--page);border:1px solid var(--rule);border-radius:8px;
white-space:pre-wrap;overflow-wrap:anywhere}
header .nowrap{display:inline-block;white-space:normal}
nav{margin:14px 0 0}
nav ul{list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;margin:0;padding:0;font-size:13px}
nav a{color:var(--muted);display:inline-block;padding:3px 0}
section{background:var(--surface);border:1px solid var(--rule);border-radius:12px;padding:22px 22px 24px;margin:18px 0}
.heroes{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(290px,100%),1fr));gap:14px 34px;margin:14px 0 18px}
.hero{border-left:4px solid var(--online);padding:2px 0 2px 14px}
.hero.aimed{border-left:4px dashed var(--aim)}
.hero b{display:block;font-size:34px;line-height:1.15;font-weight:700;letter-spacing:-.02em;
font-variant-numeric:tabular-nums}
.hero span{display:block;font-size:14px;max-width:44ch}
.warning{background:var(--note-soft);border:1px solid var(--rule);border-left:4px solid var(--offline);border-radius:8px;
padding:10px 14px;margin:12px 0}
.warning ul{margin:4px 0 0;padding-left:20px}
.fault{background:var(--bad-soft);border-left:4px solid var(--bad);border-radius:8px;padding:12px 14px;margin:12px 0 0}
.fault pre{background:var(--surface)}
figure{margin:22px 0 0;padding:20px 0 0;border-top:1px solid var(--rule);display:grid;gap:8px 36px;
grid-template-columns:minmax(0,1fr)}
section>figure:first-of-type{border-top:0;padding-top:6px}
figcaption{font-size:14px;color:var(--muted)}
figcaption p{margin:0 0 8px}
.plot svg{display:block}
.plot.narrow svg+svg{margin-top:14px}
.plot{overflow-x:auto}
.wide{display:none}
.legend{list-style:none;margin:2px 0 6px;padding:0;display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;color:var(--ink)}
.legend li{display:inline-flex;align-items:center;gap:8px}
.legend svg{flex:none}
.legend span{min-width:0}
.numbers{font-size:13px;margin:8px 0 0;padding:0;list-style:none;color:var(--muted)}
.numbers li{break-inside:avoid;padding-left:2em;text-indent:-2em}
.numbers b{display:inline-block;width:2em;text-indent:0;color:var(--ink)}
svg text{font-size:12px;fill:var(--ink);white-space:pre}
svg text.strong{font-size:13px}
svg .muted,svg .tick{fill:var(--muted)}
svg .tick{font-variant-numeric:tabular-nums}
svg .title{font-weight:600}
svg .note{fill:var(--muted);font-style:italic;
paint-order:stroke;stroke:var(--surface);stroke-width:4px;stroke-linejoin:round}
svg .aimed{fill:var(--aim);font-weight:600}
svg .beside{paint-order:stroke;stroke:var(--surface);stroke-width:3px;stroke-linejoin:round}
svg .grid{stroke:var(--grid);stroke-width:1}
svg .rule{stroke:var(--rule);stroke-width:1}
svg .base{stroke:var(--muted);stroke-width:1}
svg .aim{stroke:var(--aim);stroke-width:1.6;stroke-dasharray:6 4;fill:none}
svg .interval{stroke:var(--ink);stroke-width:1.5}
svg .between{stroke:var(--muted);stroke-width:1;fill:none}
svg .leader{stroke:var(--muted);stroke-width:.8}
svg .mark{stroke-width:1.2;stroke:var(--surface);fill:var(--c);stroke-linejoin:round;paint-order:stroke}
svg .mark.hollow{stroke-width:1.6;stroke:var(--c);fill:var(--surface);paint-order:normal}
svg .bar{stroke:var(--c);stroke-width:1;fill:var(--c)}
svg .ground{fill:var(--soft)}
svg .line{stroke:var(--c);stroke-width:1.6;fill:none}
svg .dot{fill:var(--c)}
svg .ink{--c:var(--ink)}
svg .online,svg .rounds{--c:var(--online)}
svg .plain{--c:var(--plain)}
svg .aimed-at{--c:var(--aim)}
svg .setup{--c:var(--setup);--soft:var(--setup-soft)}
svg .offline{--c:var(--offline);--soft:var(--offline-soft)}
svg .waiting{--c:var(--online);--soft:var(--waiting-soft)}
svg .other{--c:var(--other);--soft:var(--other-soft)}
svg .bar.setup{fill:url(#fill-setup)}
svg .bar.offline{fill:url(#fill-offline)}
svg .bar.waiting{fill:url(#fill-waiting)}
svg .bar.other{fill:url(#fill-other)}
.scroll{overflow-x:auto;margin:10px 0 0;background:
linear-gradient(90deg,var(--surface) 30%,transparent) 0 0/40px 100% no-repeat local,
linear-gradient(270deg,var(--surface) 30%,transparent) 100% 0/40px 100% no-repeat local,
linear-gradient(90deg,var(--rule),transparent) 0 0/14px 100% no-repeat,
linear-gradient(270deg,var(--rule),transparent) 100% 0/14px 100% no-repeat}
.scroll:focus-visible,summary:focus-visible,a:focus-visible{outline:2px solid var(--online);outline-offset:2px}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;min-width:100%}
td{white-space:nowrap}
th,td{padding:7px 10px;text-align:right;vertical-align:top;border-bottom:1px solid var(--rule)}
thead th{color:var(--muted);font-weight:600;vertical-align:bottom}
.text{text-align:left}
td.text{white-space:normal;min-width:8em;max-width:30em}
.text:first-child{padding-left:2px}
tbody th{font-weight:400;min-width:12em;max-width:24em}
table .muted{font-size:12.5px}
details{border-top:1px solid var(--rule);padding:10px 0}
details details{border:0}
details>.scroll{margin-top:18px}
details>figure{border-top:0;margin-top:0;padding-top:10px}
summary{cursor:pointer;font-size:14px;font-weight:600;padding:2px 0}
summary .muted{font-weight:400}
dl{margin:8px 0 0;display:grid;grid-template-columns:minmax(0,1fr);gap:2px 22px}
dt{font-weight:650}
dd{margin:0 0 10px;color:var(--ink);max-width:78ch;overflow-wrap:anywhere}
footer{padding-bottom:40px;font-size:13px;color:var(--muted)}
@media (min-width:640px){dl{grid-template-columns:13em minmax(0,1fr);gap:8px 22px}dd{margin:0}
tbody th{position:sticky;left:0;background:var(--surface)}}
@media (max-width:639px){body{font-size:15px}main,header,footer{padding-left:10px;padding-right:10px}
section{padding:18px 11px 20px;border-radius:10px}h1{font-size:24px}.hero b{font-size:29px}}
@media (max-width:380px){main,header,footer{padding-left:5px;padding-right:5px}section{padding-left:9px;padding-right:9px}}
@media print{details:not([open])>*{display:revert}section{break-inside:auto;border:0}}
""" + f"""
@media (min-width:{BREAK}px){{.wide{{display:block}}.narrow{{display:none}}}}
@media (min-width:1120px){{figure.drawn{{grid-template-columns:720px minmax(0,1fr);
grid-template-areas:"head side" "plot side";
grid-template-rows:auto 1fr}}figure.drawn>h3{{grid-area:head}}figure.drawn>.plot.wide{{grid-area:plot}}
figure.drawn>figcaption{{grid-area:side;padding-top:3px}}figure.drawn .legend{{flex-direction:column}}}}
"""  # fmt: skip
