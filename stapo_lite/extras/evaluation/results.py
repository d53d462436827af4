"""Results of evaluations as Markdown tables, aligned for a terminal; shares in per cent."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from pandas import DataFrame
from tabulate import tabulate

markdown = partial(tabulate, headers="firstrow", tablefmt="github", disable_numparse=True)
"""Rows of texts as a table with aligned columns; the first row is its head."""

COLUMNS = {
    "problems": "{problems}",
    "N": "{samples}",
    "avg@N": "{avg:.1%}",
    "95 % interval": "{low:.1%} to {high:.1%}",
    "tokens": "{length:.0f}",
    "cut off": "{truncated:.1%}",
    "no answer": "{no_answer:.1%}",
}


def results_page(results: dict[str, Any]) -> str:
    """The text of `results.md`."""
    parts = [
        f"# {results['model']}, adapter {results['adapter']}",
        f"In per cent, at temperature {results['temperature']}, top-p {results['top_p']}, at most "
        f"{results['max_completion_length']} tokens; intervals by bootstrap.",
        results_table(results),
        pass_table(results),
    ]
    return "\n\n".join(parts) + "\n"


def results_table(results: dict[str, Any]) -> str:
    """The scores of each benchmark, and their average."""
    rows = [["benchmark", *COLUMNS]]
    lines = results["benchmarks"] | {"average": results["average"]}
    for name, scores in lines.items():
        cells = [cell(form, scores) for form in COLUMNS.values()]
        rows.append([name, *cells])
    return markdown(rows)


def pass_table(results: dict[str, Any]) -> str:
    """pass@k of each benchmark."""
    benchmarks = results["benchmarks"].items()
    shares = DataFrame({name: scores["pass"] for name, scores in benchmarks})
    cells = (100 * shares).map("{:.1f}".format).replace("nan", "")  # N may differ
    rows = [["benchmark", *(f"pass@{k}" for k in cells.index)]]
    rows += [[name, *cells[name]] for name in cells]
    return markdown(rows)


def cell(form: str, scores: Mapping[str, Any]) -> str:
    """Scores as text; empty if there are none."""
    try:
        return form.format_map(scores).replace("%", "")
    except KeyError:
        return ""
