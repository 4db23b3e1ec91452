"""python -m tools.bench.pipeline, by a name that stays."""

import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
# the root in place of tools/, where files would hide libraries; under python -P that is not there
sys.path[: Path(sys.path[0]).resolve() == TOOLS] = [str(TOOLS.parent)]
from tools.bench.pipeline import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
