"""python -m roundelay."""

import sys

from roundelay.cli import main

sys.exit(main())
