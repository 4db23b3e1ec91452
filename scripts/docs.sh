#!/bin/bash
# The documentation as a site: builds it into build/site, or shows it with --serve.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
ensure_environment dev
export NO_MKDOCS_2_WARNING=1
if [ "${1:-}" = --serve ]; then
    exec "$PYTHON" -m mkdocs serve -f scripts/site/mkdocs.yml
fi
"$PYTHON" -m mkdocs build -q -f scripts/site/mkdocs.yml
echo "written: build/site/index.html"
