#!/usr/bin/env bash
# The tests: scripts/test.sh [pytest args] runs the default ones, scripts/test.sh --slow [area] the long checks.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ensure_environment dev
if [ "${1:-}" = "--slow" ]; then
    shift
    area=""
    if [ $# -gt 0 ] && [[ "$1" != -* ]]; then
        area="$1"
        shift
    fi
    exec "$PYTHON" -m pytest -m slow ${area:+--area "$area"} -s "$@"
fi
exec "$PYTHON" -m pytest "$@"
