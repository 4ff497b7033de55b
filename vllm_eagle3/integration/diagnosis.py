"""What only vLLM can tell the doctor: its platform, and the state of our hooks."""

from __future__ import annotations

import contextlib
import sys

from vllm_eagle3.doctor import Finding, check_hooks, check_platform, check_release


def findings() -> list[Finding]:
    """Import vLLM and ask it; its log lines go to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        from vllm.platforms import current_platform

        from vllm_eagle3.integration import fingerprints, releases
        from vllm_eagle3.integration.plugin import status

        version = fingerprints.vllm_version()
        was_run = version in fingerprints.read_record()
        return [
            check_platform(current_platform.device_type),
            check_release(version, was_run, releases.describe(version)),
            *check_hooks(status()),
        ]
