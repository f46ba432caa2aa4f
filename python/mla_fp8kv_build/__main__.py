"""`python -m mla_fp8kv_build`: what build.sh calls."""

import sys

from mla_fp8kv_build.cli import main

sys.exit(main(sys.argv[1:]))
