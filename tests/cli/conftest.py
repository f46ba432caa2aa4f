"""The command line's tests run on any machine; an installed wheel is preferred to the checkout."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "python"))
