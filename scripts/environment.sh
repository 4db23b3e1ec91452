# Sourced by the other scripts: makes .venv once and installs the project into it.
# usage: ensure_environment [extra]
ensure_environment() {
    local extra="${1:-}"
    local root stamp want
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    cd "$root"
    PYTHON="$root/.venv/bin/python"
    stamp="$root/.venv/.installed-${extra:-core}"
    want="$(cat setup.py pyproject.toml | sha256sum | cut -d' ' -f1)"
    if [ -x "$PYTHON" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
        return 0
    fi
    local python="${PYTHON_BIN:-python3}"
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
        echo "error: $python is not Python 3.10 or newer; set PYTHON_BIN to one that is" >&2
        return 2
    fi
    if [ ! -x "$PYTHON" ]; then
        echo "making .venv"
        "$python" -m venv .venv || { echo "error: python3 -m venv failed; install the venv module (apt-get install python3-venv)" >&2; return 2; }
    fi
    echo "installing megaasync${extra:+ with $extra} into .venv (a few minutes the first time)"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check -e ".${extra:+[$extra]}" 2> "$root/.venv/pip.log" || {
        tail -n 5 "$root/.venv/pip.log" >&2
        echo "error: pip install failed; the whole log is $root/.venv/pip.log" >&2
        return 2
    }
    echo "$want" > "$stamp"
}
