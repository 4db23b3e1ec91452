"""python -m tools.data.preprocess, by a name that stays."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])  # in place of tools/, where files would hide libraries
from tools.data.preprocess import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
