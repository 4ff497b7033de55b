"""The command's frame: help, errors as one line, exit codes."""

from __future__ import annotations

import pytest

from vllm_eagle3 import embedded
from vllm_eagle3.cli import main


def exit_code(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    return stopped.value.code


def test_an_error_is_one_line_and_exit_code_2(capsys):
    assert exit_code(["target", "smollm9"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: embedded name: got 'smollm9'")
    assert len(message.splitlines()) == 1


def test_debug_shows_where_an_error_came_from():
    with pytest.raises(ValueError, match="smollm9"):
        main(["--debug", "target", "smollm9"])


def test_unknown_commands_are_refused():
    assert exit_code(["serv"]) == 2


def test_target_prints_both_paths_and_a_serve_line(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "target_path", lambda name, out: tmp_path / "target")
    monkeypatch.setattr(embedded, "head_path", lambda name: tmp_path / "head")

    assert exit_code(["target", "smollm2"]) == 0

    printed = capsys.readouterr().out
    assert f"target: {tmp_path}/target\nhead:   {tmp_path}/head\n" in printed
    assert f"vllm serve {tmp_path}/target --speculative-config" in printed
