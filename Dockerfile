# megaasync in a container. For GPUs, on NVIDIA's PyTorch image (torch, Transformer Engine and apex come with it):
#     docker build -t megaasync .
# Small, for CPUs, as a try-out or for tests:
#     docker build -t megaasync:cpu --build-arg BASE_IMAGE=python:3.11-slim-bookworm --build-arg GPU=0 .
# Run it: scripts/docker_run.sh, or python -m megaasync.launch cluster=docker. docs/cluster.md says more.
ARG BASE_IMAGE=nvcr.io/nvidia/pytorch:26.05-py3

# hadolint ignore=DL3006
FROM ${BASE_IMAGE} AS base
# The images are made from the last stage, whose user is not root.
# hadolint ignore=DL3002
USER 0
# A bare base may have no Python, or a cut one.
# hadolint ignore=DL3008
RUN if ! python3 -c "import ensurepip, venv, dataclasses, sqlite3"; then \
        apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*; \
    fi \
    && useradd --create-home --uid 10001 megaasync

FROM base AS dependencies
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# 1: the base has CUDA's torch, which is kept, with Transformer Engine and apex. 0: torch is installed, for CPUs.
ARG GPU=1
# Further options of pip, as an index of your own.
ARG PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
# If the base has no Transformer Engine: transformer-engine[pytorch]==2.20.2 builds it against the base's torch.
ARG TRANSFORMER_ENGINE=""
# A virtual environment that sees the base's packages: what is installed here never replaces the base's torch.
RUN python3 -m venv --system-site-packages /opt/megaasync
ENV PATH=/opt/megaasync/bin:${PATH}
WORKDIR /src
# The dependencies alone, in a layer that changes only with setup.py. NVIDIA's torch calls itself an alpha version, which
# our bound on torch would not take for what it is, so with GPU=1 torch is left out here and looked at below.
COPY setup.py pyproject.toml README.md ./
COPY hydra_configs hydra_configs
# hadolint ignore=DL3013,DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir megaasync && touch megaasync/__init__.py \
    && python -m pip install ${PIP_OPTIONS} --no-deps . \
    && GPU="${GPU}" python -c "import os, importlib.metadata as m; \
print('\n'.join(r for r in m.requires('megaasync') if 'extra ==' not in r \
and not (os.environ['GPU'] == '1' and r.startswith('torch'))))" > /tmp/requirements.txt \
    && python -m pip install ${PIP_OPTIONS} -r /tmp/requirements.txt \
    && if [ -n "${TRANSFORMER_ENGINE}" ]; then \
        python -m pip install ${PIP_OPTIONS} --no-build-isolation "${TRANSFORMER_ENGINE}"; \
    fi
COPY megaasync megaasync
COPY tools tools
# hadolint ignore=DL3042
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip install ${PIP_OPTIONS} --no-deps --force-reinstall .
# What the framework needs is there, or the build ends here.
RUN python -c "import torch; version = tuple(map(int, torch.__version__.split('.')[:2])); \
assert (2, 11) <= version < (2, 14), f'torch {torch.__version__} is not 2.11 to 2.13; take another BASE_IMAGE'" \
    && if [ "${GPU}" = 1 ]; then \
        python -c "import torch, transformer_engine.pytorch, apex, fused_weight_gradient_mlp_cuda" \
        && python -m megaasync.tools.bench.te_signatures installed=true; \
    fi \
    && python -m megaasync.pretrain --help > /dev/null

FROM base AS runtime
COPY --from=dependencies /opt/megaasync /opt/megaasync
COPY --chown=megaasync:megaasync tools /workspace/tools
COPY --chown=megaasync:megaasync scripts /workspace/scripts
ENV PATH=/opt/megaasync/bin:${PATH} \
    PYTHONUNBUFFERED=1
RUN chown megaasync:megaasync /workspace
USER 10001
WORKDIR /workspace
CMD ["python", "-m", "megaasync.pretrain", "--help"]
