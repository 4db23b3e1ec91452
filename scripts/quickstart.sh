#!/usr/bin/env bash
# From a fresh machine to a comparison of a flushed and an asynchronous pipeline on real text: scripts/quickstart.sh
# Further arguments are overrides for all runs, as in: scripts/quickstart.sh train.steps=200
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment
exec "$PYTHON" -m tools.study.quickstart "$@"
