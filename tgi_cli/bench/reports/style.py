"""How the page of HTML looks, in light and in dark."""

from __future__ import annotations

_LIGHT = ("#0b62a8", "#c2410c", "#0f7b4f", "#9d2f8f", "#8a6d00", "#3f51b5", "#a31545", "#47606e")
_DARK = ("#5fb0f0", "#ff9a5c", "#4fd39a", "#e28ad8", "#e3c14a", "#9aa8ff", "#ff7fa6", "#a9c0cc")


def _colours(values: tuple[str, ...]) -> str:
    return "".join(f"--c{number}:{value};" for number, value in enumerate(values))


def _classes() -> str:
    return "".join(f".s{n}{{stroke:var(--c{n})}}.f{n}{{fill:var(--c{n})}}" for n in range(8))


CSS = (
    ":root{--back:#fff;--fore:#1c2127;--soft:#5b6570;--edge:#dfe3e8;--panel:#f7f8fa;"
    f"--bad:#c62828;--wait:#b9c0c8;{_colours(_LIGHT)}}}"
    "@media (prefers-color-scheme:dark){:root{--back:#14171b;--fore:#e4e8ec;--soft:#98a2ad;"
    f"--edge:#2c3238;--panel:#1b1f24;--bad:#ff6b6b;--wait:#59636d;{_colours(_DARK)}}}}}"
    "*{box-sizing:border-box}"
    "body{margin:0;background:var(--back);color:var(--fore);"
    "font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    "header,main{max-width:1180px;margin:0 auto;padding:0 20px}"
    "header{padding-top:28px}h1{font-size:26px;margin:0;overflow-wrap:anywhere}"
    "header p{color:var(--soft);margin:2px 0 18px}"
    "h2{font-size:19px;margin:36px 0 10px}h3{font-size:15px;margin:0 0 6px}"
    ".notes{background:var(--panel);border-left:3px solid var(--c0);padding:10px 14px 10px 30px}"
    ".cards{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}"
    ".cards div{background:var(--panel);border:1px solid var(--edge);border-radius:8px;"
    "padding:10px 16px;min-width:190px;display:flex;flex-direction:column}"
    ".cards b{font-size:22px;font-weight:600}.cards span{color:var(--soft);font-size:13px}"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));"
    "gap:18px}"
    "figure{margin:0;background:var(--panel);border:1px solid var(--edge);border-radius:8px;"
    "padding:14px}figure>svg{width:100%;height:auto;display:block}"
    "figcaption p{margin:4px 0 0;color:var(--soft);font-size:13px}"
    ".keys{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px}"
    ".keys span{display:inline-flex;align-items:center;gap:5px}.keys svg{width:10px;height:10px}"
    "details{margin:0 0 10px}summary{cursor:pointer;padding:4px 0}"
    ".scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px;width:100%}"
    "td,th{padding:4px 7px;border-bottom:1px solid var(--edge);text-align:right;"
    "vertical-align:top;font-variant-numeric:tabular-nums;white-space:nowrap}"
    "thead th{color:var(--soft);font-weight:600}"
    "th:first-child,th:nth-child(2),td:nth-child(2),td.text,.facts td{text-align:left}"
    "tbody th{font-weight:500}td.text{white-space:normal;overflow-wrap:anywhere}"
    "small{display:block;color:var(--soft);font-size:11px}"
    ".facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));"
    "gap:18px}.facts section{min-width:0}.facts table{table-layout:fixed}"
    ".facts th{width:38%;white-space:normal;overflow-wrap:anywhere}"
    "dt{font-weight:600;margin-top:8px}dd{margin:0;color:var(--soft)}"
    "svg text{font:11px system-ui,sans-serif;fill:var(--soft)}"
    "svg .note{fill:var(--fore)}svg .label{font-size:12px}"
    ".grid{stroke:var(--edge);stroke-width:1}.axis{stroke:var(--soft);fill:none}"
    ".line{fill:none;stroke-width:2;stroke-linejoin:round}"
    ".bar{stroke:var(--soft);stroke-width:1.2;opacity:.7}"
    ".waiting{fill:var(--wait)}.first{fill:var(--c1)}.decoding{fill:var(--c0)}"
    ".failed{fill:var(--bad)}"
    f"{_classes()}"
    "@media print{details{break-inside:avoid}figure{break-inside:avoid}}"
)
"""Of the whole page; classes of the charts are those of ``reports.svg``."""
