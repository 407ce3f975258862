"""Chromium without a window: what a page looks like, measured inside a copy of it that reports to a frame around."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

NAMES = ("chromium", "chromium-browser", "google-chrome")

MEASURE = r"""
for (const d of document.querySelectorAll("details")) { d.removeAttribute("name"); }
for (const d of document.querySelectorAll("details")) { d.open = true; }
function shown(e) { const r = e.getBoundingClientRect(); return r.width > 0 && r.height > 0; }
function words(e) {
  const c = e.cloneNode(true);
  c.querySelectorAll("title").forEach(t => t.remove());
  return c.textContent;
}
function overlaps() {
  const found = [];
  for (const svg of document.querySelectorAll("svg[role=img]")) {
    const box = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter(shown).map(e => [e, e.getBoundingClientRect()]);
    texts.sort((a, b) => a[1].top - b[1].top);
    texts.forEach(([e, r], i) => {
      if (r.left < box.left - 1 || r.right > box.right + 1 || r.top < box.top - 1 || r.bottom > box.bottom + 1)
        found.push("cut: " + words(e));
      for (let j = i + 1; j < texts.length && texts[j][1].top < r.bottom - 2; j++) {
        const s = texts[j][1];
        if (Math.min(r.right, s.right) - Math.max(r.left, s.left) > 1 && Math.min(r.bottom, s.bottom) - s.top > 2)
          found.push(words(e) + " | " + words(texts[j][0]));
      }
    });
  }
  return found;
}
function rgb(text) { return (text.match(/[\d.]+/g) || []).map(Number); }
function light(c) {
  const [r, g, b] = c.slice(0, 3).map(v => { v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function under(e) {
  for (; e; e = e.parentElement) {
    const c = rgb(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c;
  }
  return [255, 255, 255];
}
const readable = [...document.querySelectorAll("body *")].filter(e =>
  !["SCRIPT", "STYLE", "title"].includes(e.tagName) && shown(e)
  && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()));
function faint() {
  const found = [];
  for (const e of readable) {
    const style = getComputedStyle(e);
    const a = light(rgb(e.tagName === "text" ? style.fill : style.color)), b = light(under(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(ratio.toFixed(2) + ": " + words(e).slice(0, 60));
  }
  return found;
}
addEventListener("load", () => parent.postMessage({
  name: NAME,
  width: innerWidth,
  texts: readable.length,
  plots: [...document.querySelectorAll("svg[role=img]")].filter(shown).length,
  overlaps: overlaps(),
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  cramped: [...document.querySelectorAll(".plot")].filter(e => e.scrollWidth > e.clientWidth).length,
  faint: faint(),
  small: readable.filter(e => parseFloat(getComputedStyle(e).fontSize) < 12).map(e => words(e).slice(0, 60)),
  requests: performance.getEntriesByType("resource").map(e => e.name),
  background: getComputedStyle(document.body).backgroundColor,
}, "*"));
"""
_AROUND = """<!doctype html><html style="color-scheme:light dark"><body>%s<pre id="found"></pre><script>
const found = {};
addEventListener("message", e => { found[e.data.name] = e.data;
  document.getElementById("found").textContent = JSON.stringify(found); });
</script></body></html>"""


@dataclass(frozen=True)
class Seen:
    """What one frame told. overlaps: pairs of texts of plots, and texts that stand out of theirs.

    cramped: plots that have to be scrolled in their box. faint: below 4.5 to 1. small: below 12 pixels.
    """

    name: str
    width: int
    texts: int
    plots: int
    overlaps: list[str]
    overflow: float
    cramped: int
    faint: list[str]
    small: list[str]
    requests: list[str]
    background: str


def path() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def look(
    pages: Mapping[str, tuple[str, int]], *, scheme: Literal["light", "dark"] = "light", seconds: int = 60
) -> dict[str, Seen]:
    """What a reader sees of each page. pages: name -> (the page's text, pixels of its window's width)."""
    with tempfile.TemporaryDirectory(prefix="page-") as folder:
        frames = []
        for number, (name, (text, width)) in enumerate(pages.items()):
            file = Path(folder) / f"{number}.html"
            file.write_text(_measured(text, name), encoding="utf-8")
            frames.append(
                f'<iframe src="{number}.html" style="width:{width}px;height:900px;border:0"></iframe>'
            )
        around = Path(folder) / "around.html"
        around.write_text(_AROUND % "".join(frames), encoding="utf-8")
        dom = _run(["--virtual-time-budget=30000", "--dump-dom", around.as_uri()], scheme, folder, seconds)
    told = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    found: dict[str, Any] = json.loads(html.unescape(told[1]) or "{}") if told else {}
    if missing := pages.keys() - found.keys():
        raise AssertionError(f"no answer from {sorted(missing)}: {dom[-300:]}")
    return {name: Seen(**values) for name, values in found.items()}


def _measured(text: str, name: str) -> str:
    """The page with a script at its end, which its own policy would forbid."""
    allowed, count = re.subn(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert count == 1, "the page states its policy once"
    script = f"<script>const NAME = {json.dumps(name)};{MEASURE}</script>"
    return allowed.replace("</body>", f"{script}</body>")


def _run(arguments: list[str], scheme: str, folder: str, seconds: int) -> str:
    chromium = path()
    assert chromium is not None
    command = [
        chromium,
        "--headless",
        "--no-sandbox",  # it refuses to run as root with one
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-background-networking",
        "--no-first-run",
        f"--user-data-dir={folder}/profile",
        f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
        "--window-size=1400,1000",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
