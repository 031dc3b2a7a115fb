"""Reports of runs: markdown (TGI's tables and ours), and an HTML page with charts."""

from tgi_cli.bench.reports.html import html
from tgi_cli.bench.reports.markdown import comparison, markdown, tgi_tables

__all__ = ["comparison", "html", "markdown", "tgi_tables"]
