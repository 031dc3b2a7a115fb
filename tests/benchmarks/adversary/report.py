"""Table of the worst case of each route: with rich on a terminal, as Markdown otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from tests.benchmarks.adversary.measure import Result


def worst(results: Iterable[Result], key: Callable[[Result], float]) -> dict[str, Result]:
    """Return each route's result with the largest ``key``, in order of first appearance."""
    found: dict[str, Result] = {}
    for result in results:
        if result.route not in found or key(result) > key(found[result.route]):
            found[result.route] = result
    return found


def rows(results: Sequence[Result]) -> list[list[str]]:
    """Return a row per route: cases, and the worst stall, gap and growth with their fields."""
    stalls = worst(results, lambda one: one.stall)
    gaps = worst(results, lambda one: one.gap)
    growths = worst(results, lambda one: one.largest_growth)
    table = []
    for route in stalls:
        own = [one for one in results if one.route == route]
        stall, gap, growth = stalls[route], gaps[route], growths[route]
        table.append(
            [
                route,
                str(len(own)),
                f"{stall.stall * 1e3:.0f}",
                _where(stall),
                f"{gap.gap * 1e3:.0f}",
                _where(gap),
                f"{growth.largest_growth / 2**20:.0f}",
                _where(growth),
                str(sum(bool(one.violations) for one in own)),
            ]
        )
    return table


HEAD = ["route", "cases", "stall ms", "by", "gap ms", "by", "growth MB", "by", "exceeded"]


def _where(result: Result) -> str:
    return f"{result.field} {result.kind}".strip()


def show(head: Sequence[str], table: Sequence[Sequence[str]], title: str) -> None:
    """Print a table."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        shown = Table(*head, title=title)
        for row in table:
            shown.add_row(*row)
        Console().print(shown)
        return
    print(f"\n{title}\n")
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join("---" for _ in head) + " |")
    for row in table:
        print("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")


def show_violations(results: Sequence[Result], limit: int = 200) -> None:
    """Print the cases that exceeded the budget, worst first."""
    exceeded = sorted(
        (one for one in results if one.violations),
        key=lambda one: (-one.stall, -one.largest_growth),
    )
    if exceeded:
        table = [[one.route, _where(one), "; ".join(one.violations)] for one in exceeded[:limit]]
        show(["route", "by", "violations"], table, f"{len(exceeded)} cases exceeded the budget")


def summary(results: Sequence[Result]) -> str:
    """Summarize all results in one line."""
    if not results:
        return "nothing was measured"
    blames = sum(
        count
        for one in results
        for status, count in one.statuses.items()
        if status == "424" or (status.startswith("5") and status not in ("501", "503", "505"))
    )
    words = ("died", "killed", "closed")
    killed = sum(any(word in text for text in one.violations for word in words) for one in results)
    stall = max(results, key=lambda one: one.stall)
    gap = max(results, key=lambda one: one.gap)
    growth = max(results, key=lambda one: one.largest_growth)
    return (
        f"{len(results)} cases: worst stall {stall.stall * 1e3:.0f} ms ({stall.route} "
        f"{_where(stall)}), worst gap {gap.gap * 1e3:.0f} ms ({gap.route} {_where(gap)}), worst "
        f"growth {growth.largest_growth / 2**20:.0f} MB ({growth.route} {_where(growth)}); "
        f"{blames} responses blame the server, {killed} cases killed a process or a connection, "
        f"{sum(bool(one.violations) for one in results)} exceeded the budget"
    )
