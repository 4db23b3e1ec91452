#!/usr/bin/env bash
# A command in the image, on this folder: scripts/docker_run.sh [-i IMAGE] [command ...]
#     scripts/docker_run.sh python -m megaasync.pretrain experiment=quickstart
#     scripts/docker_run.sh -i megaasync:cpu python -m tools.study.quickstart
# Runs as you, in the folder you are in, with all GPUs if there are any. DOCKER=podman takes podman.
set -euo pipefail
image=megaasync
if [ "${1:-}" = "-i" ]; then
    image="${2:?error: -i needs the name of an image}"
    shift 2
fi
docker="${DOCKER:-docker}"
if ! command -v "$docker" > /dev/null; then
    echo "error: there is no $docker on this host; install it, or set DOCKER=podman" >&2
    exit 2
fi
gpus=()
if command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; then
    gpus=(--gpus all)
fi
terminal=()
if [ -t 0 ] && [ -t 1 ]; then
    terminal=(--interactive --tty)
fi
cache="${MEGAASYNC_CACHE:-$HOME/.cache/megaasync}"
mkdir -p "$cache"
exec "$docker" run --rm "${terminal[@]}" "${gpus[@]}" --ipc=host --ulimit memlock=-1 --ulimit stack=67108864 \
    --user "$(id -u):$(id -g)" --env HOME=/tmp --env "MEGAASYNC_CACHE=$cache" --volume "$cache:$cache" \
    --volume "$PWD:$PWD" --workdir "$PWD" "$image" "$@"
