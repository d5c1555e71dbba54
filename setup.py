"""Package metadata. Exact versions of everything are in requirements.lock."""

from pathlib import Path

from setuptools import find_packages, setup

TEST = ["beartype", "import-linter", "pytest", "pytest-xdist", "pyyaml", "ruff"]

setup(
    name="electra_jax",
    version="0.1.0",
    description="ELECTRA pre-training in JAX, the same on a laptop and on a pod",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["electra_jax*"]),
    package_data={
        "electra_jax.interop": ["*.jinja"],
        "electra_jax.reporting": ["*.html", "*.css", "*.mplstyle"],
    },
    python_requires=">=3.11",
    install_requires=[
        "absl-py",
        "filelock",
        "flax>=0.12.8",
        "fsspec",
        "grain>=0.2.18",
        "jax>=0.10.2",
        "jaxtyping",
        "jinja2",
        "matplotlib",
        "ml_collections>=1.1",
        "numpy",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12.8",
        "protobuf",
        "pyarrow",
        "rich",
        "safetensors",
        "scikit-learn",
        "scipy",
        "sentencepiece>=0.2.2",
        "tensorboardX",
        "tensorflow-datasets",
        "tokenizers>=0.23",
        "zstandard",
    ],
    extras_require={
        "gpu": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        "test": TEST,
        "dev": [*TEST, "tensorboard"],
        "tensorflow": ["tensorflow"],
        "wandb": ["wandb"],
        "benchmark": ["torch", "transformers"],
    },
)
