#!/usr/bin/env bash
# The tests: scripts/test.sh [pytest args] runs the default ones, scripts/test.sh --slow [area] the long checks.
# TEST_WORKERS=N sets the number of pytest workers of the default ones; 0 runs them in one process, for a debugger.
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
# Nothing here is timed, and half of it waits: workers share the cores, each with whole files, whose runs it keeps.
exec "$PYTHON" -m pytest -n "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "$@"
